"""The README's tables come from records."""

from __future__ import annotations

from pathlib import Path

import pytest
from artifact_fixture import batch_rows, main_rows, write_records

from figures import markdown, results

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    failed = {"status": "oom", "reason": "9 GB of 8", "tpot_ms": None}
    out_of_memory = lambda r: (r["system"], r["model"], r["memory"]) == ("mo_sc", "phi35_moe", "high")  # noqa: E731
    write_records(folder / "main", [r | failed if out_of_memory(r) else r for r in main_rows()])
    write_records(folder / "batch", batch_rows())
    return results.read(folder)


def lines(table: str) -> dict[str, list[str]]:
    """First cell -> cells."""
    cells = [[c.strip() for c in line.strip("| ").split("|")] for line in table.splitlines() if line.startswith("|")]
    return {line[0]: line for line in cells}


def test_every_system_has_its_mean_and_its_multiple_of_specter(found):
    table = lines(markdown.comparison(found))
    place = table["TPOT, ms"].index("Phi-3.5-MoE, high")
    assert table["Specter"][place].startswith("**163 ±")
    assert table["vLLM"][place].startswith("298 ±") and table["vLLM"][place].endswith("(1.82x [1.81, 1.83])")
    assert len(table) == 2 + 8


def test_the_setting_and_what_failed_stand_below(found):
    text = markdown.comparison(found)
    assert "weights official; link native; device cuda. (…x): TPOT over Specter's" in text
    assert "- MO-SC (Phi-3.5-MoE high native): oom: 9 GB of 8" in text


def test_nothing_is_listed_where_nothing_failed(tmp_path):
    write_records(tmp_path / "main", main_rows())
    assert "Not measured" not in markdown.comparison(results.read(tmp_path))


def test_nested_experts_and_paced_links_have_lines_and_tables_of_their_own(tmp_path):
    rows = [r for r in main_rows() if r["model"] == "qwen15_moe"]
    own = [r for r in rows if r["system"] == "specter"]
    nested = [r | {"encoding": "nested", "variant": "nested", "config_hash": r["config_hash"] + "n"} for r in own]
    halved = [r | {"tpot_ms": r["tpot_ms"] / 2} for r in nested]
    missed = {"status": "not_run", "reason": "no time", "tpot_ms": None, "encoding": None, "link": "pcie4"}
    paced = [r | {"link": "pcie4", "config_hash": r["config_hash"] + "p"} for r in own + rows if r["B"] == 1]
    write_records(
        tmp_path / "main",
        rows + halved + paced + [r | missed | {"config_hash": r["config_hash"] + "m"} for r in nested],
    )
    text = markdown.comparison(results.read(tmp_path))
    assert text.count("| TPOT, ms |") == 2
    table = lines(text.split("\n\n")[0])
    assert table["Specter (nested)"][1].endswith("(0.50x [0.50, 0.50])") and "Specter (plain)" in table
    assert "(…x): TPOT over that of Specter (plain)" in text
    assert "- Specter (nested) (Qwen1.5-MoE high pcie4; Qwen1.5-MoE low pcie4): no time" in text


def test_the_papers_switches_have_a_line_and_without_plain_rows_nested_ones_are_the_measure(tmp_path):
    rows = [r for r in main_rows() if r["model"] == "qwen15_moe"]
    own = [r for r in rows if r["system"] == "specter"]
    paper = [r | {"variant": "paper", "config_hash": r["config_hash"] + "p", "tpot_ms": 2 * r["tpot_ms"]} for r in own]
    nested = [r | {"encoding": "nested"} if r["system"] == "specter" else r for r in rows]
    write_records(tmp_path / "plain", rows + paper)
    write_records(tmp_path / "nested", nested + paper)
    for name, base in (("plain", "Specter"), ("nested", "Specter (nested)")):
        text = markdown.comparison(results.read(tmp_path / name))
        table = lines(text)
        assert table["Specter (paper)"][1].endswith("(2.00x [2.00, 2.00])") and "x" not in table[base][1]
        assert len(table) == 2 + 9


def test_rows_beyond_their_budget_or_inexact_are_flagged(tmp_path):
    rows = [r for r in main_rows() if r["model"] == "qwen15_moe" and r["memory"] == "high"]
    over = {"within_budget": False, "peak_device_bytes": 26_250_000_000}
    rows = [r | over if r["system"] == "transformers" else r | {"within_budget": True} for r in rows]
    rows = [r | {"exact_match": False} if r["system"] == "mo_sm" and r["label"] == "GK" else r for r in rows]
    write_records(tmp_path / "main", rows)
    text = markdown.comparison(results.read(tmp_path))
    assert " Beyond its budget: Transformers (Qwen1.5-MoE, high, 26.2 of 24 GB)." in text
    assert " Not exact: MO-SM (Qwen1.5-MoE, high)." in text


def test_a_figure_is_drawn_beside_the_page(found, tmp_path):
    page = tmp_path / "README.md"
    page.write_text("<!-- figure: memory -->\n<!-- end -->\n")
    drawn = []
    for _ in range(2):
        assert markdown.main(["--results", str(found.folder), "--update", str(page)]) == 0
        drawn.append((tmp_path / "docs" / "memory.png").read_bytes())
    assert page.read_text().splitlines()[1].endswith("(docs/memory.png)") and drawn[0] == drawn[1]
    with pytest.raises(SystemExit, match="figure other is unknown; known: memory"):
        markdown.updated("<!-- figure: other -->\n<!-- end -->", found)


def test_batches_have_both_measures_by_size(found):
    head, *_ = markdown.batch(found).splitlines()
    assert "B = 32" in head and "Qwen1.5-MoE | Specter | 35.3 / 28.4" in markdown.batch(found)


def test_only_what_stands_between_marks_is_replaced(found, tmp_path):
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- table: comparison -->\nold\n<!-- end -->\nafter\n")
    arguments = ["--results", str(found.folder), "--update", str(page)]
    for _ in range(2):
        assert markdown.main(arguments) == 0
        first, mark, *middle, end, last = page.read_text().splitlines()
        assert (first, last, mark, end) == ("before", "after", "<!-- table: comparison -->", "<!-- end -->")
        assert "old" not in middle and "| Specter |" in "\n".join(middle)


def test_unknown_tables_and_tables_without_rows_are_one_line(found, tmp_path):
    with pytest.raises(SystemExit, match="known: comparison, batch"):
        markdown.updated("<!-- table: other -->\n<!-- end -->", found)
    with pytest.raises(SystemExit, match="has no rows for table batch"):
        markdown.updated("<!-- table: batch -->\n<!-- end -->", results.read(tmp_path))


def test_the_readmes_tables_are_those_of_the_committed_records():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "comparison" in [match["name"] for match in markdown.MARK.finditer(text)]
    assert markdown.updated(text, results.read(ROOT / "results" / "h200")) == text
