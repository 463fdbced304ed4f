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
    assert table["vLLM"][place].startswith("298 ±") and table["vLLM"][place].endswith("(1.82x)")
    assert len(table) == 2 + 8


def test_the_setting_and_what_failed_stand_below(found):
    text = markdown.comparison(found)
    assert "weights official; link native; device cuda." in text
    assert "- MO-SC (Phi-3.5-MoE high native): oom: 9 GB of 8" in text


def test_nothing_is_listed_where_nothing_failed(tmp_path):
    write_records(tmp_path / "main", main_rows())
    assert "Not measured" not in markdown.comparison(results.read(tmp_path))


def test_batches_have_both_measures_by_size(found):
    head, *_ = markdown.batch(found).splitlines()
    assert "B = 32" in head and "Qwen1.5-MoE | Specter | 35.3 / 28.4" in markdown.batch(found)


def test_only_what_stands_between_marks_is_replaced(found, tmp_path):
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- table: comparison -->\nold\n<!-- end -->\nafter\n")
    arguments = ["--results", str(found.folder), "--update", str(page)]
    for _ in range(2):
        assert markdown.main(arguments) == 0
        first, *middle, last = page.read_text().splitlines()
        assert (first, last) == ("before", "after") and "old" not in middle and "| Specter |" in "\n".join(middle)


def test_unknown_tables_and_tables_without_rows_are_one_line(found, tmp_path):
    with pytest.raises(SystemExit, match="known: comparison, batch"):
        markdown.updated("<!-- table: other -->\n<!-- end -->", found)
    with pytest.raises(SystemExit, match="has no rows for table batch"):
        markdown.updated("<!-- table: batch -->\n<!-- end -->", results.read(tmp_path))


def test_the_readmes_tables_are_those_of_the_committed_records():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert markdown.updated(text, results.read(ROOT / "results" / "h200")) == text
