"""Which rows of a results folder share a figure, and which system of a figure a row belongs to."""

from __future__ import annotations

import pandas as pd
import pytest
from artifact_fixture import batch_rows, depth_rows, main_rows, row, write_all, write_records
from matplotlib.colors import to_rgb

from figures import efficiency, fig14_tpot, io, memory, redraw, results, style, sweeps
from harness import claims
from harness.claim_verdict import load


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return results.read(write_all(tmp_path_factory.mktemp("results")))


def test_sweeps_are_told_apart_by_what_varies(found):
    for name, rows in found.records.items():
        matching = {sweep for sweep, rows_of in sweeps.SWEEPS.items() if len(rows_of(rows))}
        assert matching == {name}


def test_settings_never_share_a_figure_and_dummy_weights_stand_beside_every_one():
    rows = pd.DataFrame(main_rows())
    paced = rows.assign(link="pcie4")
    weights = rows["weights"].where(rows["system"] != "vllm", "dummy")
    mixed = pd.concat([rows.assign(weights=weights), paced[paced["system"] != "vllm"]], ignore_index=True)
    blocks = dict(sweeps.settings(mixed))
    assert set(blocks) == {"-native", "-pcie4"}
    assert set(blocks["-native"]["weights"]) == {"official", "dummy"}
    assert set(blocks["-pcie4"]["weights"]) == {"official"}
    labels = [t.get_text() for t in fig14_tpot.figure(blocks["-native"]).legends[0].get_texts()]
    assert "vllm (dummy weights)" in labels


def test_a_main_run_is_found_in_other_sweeps_where_there_is_none(tmp_path):
    write_records(tmp_path / "batch", batch_rows())
    rows = redraw.gather(results.read(tmp_path), "main")
    assert set(rows["B"]) == {1} and rows["system"].nunique() == 4


def test_systems_measured_in_folders_of_their_own_are_compared_and_none_counts_twice(tmp_path):
    rows = [r for r in main_rows() if r["model"] == "phi35_moe"]
    write_records(tmp_path / "ours", [r for r in rows if r["system"] in ("specter", "mo_sm")])
    write_records(tmp_path / "vllm", [r for r in rows if r["system"] == "vllm"])
    again = [r | {"tpot_ms": 1.0, "config_hash": "other"} for r in rows if r["system"] == "specter"]
    write_records(tmp_path / "alone", again)
    found = redraw.gather(results.read(tmp_path), "main")
    assert set(found["system"]) == {"specter", "mo_sm", "vllm"}
    assert found["tpot_ms"].min() > 1, "of two Specters the one beside MO-SM counts"


def test_a_slow_system_measured_with_fewer_tokens_stands_beside_the_others_and_says_so(tmp_path):
    rows = [r for r in main_rows() if r["model"] == "phi35_moe" and r["system"] in ("specter", "mo_sm", "transformers")]
    few = [r | {"new_tokens": 6, "config_hash": r["config_hash"] + "-few"} for r in rows]
    slow = [r for r in few if r["system"] == "transformers" and r["label"] in ("GK", "C4")]
    write_records(tmp_path / "main", [r for r in rows if r["system"] != "transformers"] + slow)
    found = redraw.gather(results.read(tmp_path), "main")
    ((suffix, block),) = sweeps.settings(found)
    assert suffix == "" and block["system"].nunique() == 3
    assert "Transformers (6 tokens, GK, C4 only)" in [s.label for s in style.systems(block)]
    write_records(tmp_path / "short", [r for r in few if r["system"] != "transformers"])
    blocks = dict(sweeps.settings(redraw.gather(results.read(tmp_path), "main")))
    assert {s: b["system"].nunique() for s, b in blocks.items()} == {"-new_tokens128": 2, "-new_tokens6": 3}


def test_a_system_measured_alone_with_more_tokens_stands_beside_the_others_and_says_so(tmp_path):
    rows = [r for r in main_rows() if r["model"] == "phi35_moe" and r["system"] in ("specter", "mo_sm", "llama_cpp")]
    more = [r | {"new_tokens": 256} for r in rows if r["system"] == "llama_cpp"]
    write_records(tmp_path / "main", [r for r in rows if r["system"] != "llama_cpp"])
    write_records(tmp_path / "serving", more)
    ((suffix, block),) = sweeps.settings(redraw.gather(results.read(tmp_path), "main"))
    assert suffix == "" and block["system"].nunique() == 3
    assert [s.label for s in style.systems(block)] == ["Specter", "MO-SM", "llama.cpp (256 tokens)"]


def test_nested_experts_have_an_efficiency_figure_of_their_own(found):
    tables = {name: found.tables[name] for name in results.EFFICIENCY}
    both = {n: pd.concat([t, t.assign(encoding="nested", variant="nested")]) for n, t in tables.items()}
    blocks = dict(efficiency.settings(both))
    assert list(blocks) == ["", "-nested"]
    for encoding, own in zip(("plain", "nested"), blocks.values(), strict=True):
        assert {n: set(t["encoding"]) for n, t in own.items()} == {name: {encoding} for name in tables}
        assert all(len(own[n]) == len(tables[n]) for n in tables)


def test_the_efficiency_figure_has_the_depth_of_the_comparison_and_of_sweeps_alone_the_fastest(found):
    tables = {name: found.tables[name] for name in results.EFFICIENCY}

    def at(depth: int, folder: str, tpot_ms: float) -> dict[str, pd.DataFrame]:
        moved = {n: t.assign(K=depth, folder=folder) for n, t in tables.items()}
        return moved | {"efficiency": moved["efficiency"].assign(tpot_ms=tpot_ms, moved_loads=float(depth))}

    def chosen(*blocks: dict[str, pd.DataFrame]) -> dict[str, set[int]]:
        ((_, own),) = efficiency.settings({n: pd.concat([b[n] for b in blocks]) for n in tables})
        assert all(len(own[n]) == len(tables[n]) for n in tables), "each cell once"
        efficiency.figure(own)
        return {n: set(t["K"]) for n, t in own.items()}

    swept = [at(8, "sweeps/depth", 7.0), at(16, "sweeps/depth", 6.0)]
    assert chosen(*swept, at(32, "comparison", 9.0)) == {n: {32} for n in tables}
    assert chosen(at(16, "comparison", 9.0), *swept) == {n: {16} for n in tables}
    assert chosen(*swept) == {n: {16} for n in tables}


def test_two_systems_measured_apart_with_more_tokens_stand_beside_the_others(tmp_path):
    rows = [r for r in main_rows() if r["model"] == "phi35_moe"]
    served = [r | {"new_tokens": 256} for r in rows if r["system"] in ("llama_cpp", "vllm")]
    write_records(tmp_path / "main", [r for r in rows if r["system"] in ("specter", "mo_sm")])
    write_records(tmp_path / "serving", served)
    ((suffix, block),) = sweeps.settings(redraw.gather(results.read(tmp_path), "main"))
    assert suffix == "" and block["system"].nunique() == 4
    assert [s.label for s in style.systems(block)][-2:] == ["vLLM (256 tokens)", "llama.cpp (256 tokens)"]


def test_rows_of_folders_named_after_sweeps_are_no_main_rows_where_there_is_a_main_run(tmp_path):
    rows = [r for r in main_rows() if r["model"] == "phi35_moe" and r["system"] in ("specter", "mo_sm")]
    longer = [r | {"prefix_len": 64, "config_hash": "p" + r["system"]} for r in rows]
    write_records(tmp_path / "main", rows)
    write_records(tmp_path / "sweeps" / "prefix", longer)
    assert set(redraw.gather(results.read(tmp_path), "main")["prefix_len"]) == {16}


def test_a_system_measured_at_several_batch_sizes_beside_a_main_run_stands_in_both(tmp_path):
    rows = [r for r in main_rows() if r["model"] == "phi35_moe" and r["system"] in ("specter", "vllm")]
    batched = [r | {"B": 4, "config_hash": r["config_hash"] + "4"} for r in rows if r["system"] == "vllm"]
    write_records(tmp_path / "main", [r for r in rows if r["system"] == "specter"])
    write_records(tmp_path / "serving", [r for r in rows if r["system"] == "vllm"] + batched)
    found = results.read(tmp_path)
    assert set(redraw.gather(found, "main")["system"]) == {"specter", "vllm"}
    assert set(redraw.gather(found, "batch")["B"]) == {1, 4}


def test_batches_with_other_lengths_than_the_single_requests_beside_them_are_drawn_alone(tmp_path):
    rows = [r for r in main_rows() if r["model"] == "phi35_moe" and r["system"] == "vllm"]
    batched = [r | {"B": b, "new_tokens": 32, "config_hash": f"{r['config_hash']}{b}"} for r in rows for b in (4, 8)]
    write_records(tmp_path / "serving", rows + batched)
    plan, _ = redraw.FIGURES["fig15_batch"]
    (drawing,) = plan(results.read(tmp_path))
    assert drawing.name == "fig15_batch-new_tokens32"
    assert [t.get_text() for t in drawing.draw().axes[-1].get_xticklabels()] == ["4", "8"]


def budget_folders(folder):
    """A main run, llama.cpp beside it with other lengths, and a sweep of two systems over budgets."""
    rows = [r for r in main_rows() if r["model"] == "phi35_moe"]
    own = [r for r in rows if r["system"] == "specter"]
    write_records(folder / "main", [r for r in rows if r["system"] in ("specter", "mo_sm")])
    write_records(folder / "serving", [r | {"new_tokens": 256} for r in rows if r["system"] == "llama_cpp"])
    swept = []
    for gb in (16, 20, 24):
        at = {"memory": f"{gb} GB", "budget_bytes": gb * 10**9, "new_tokens": 32}
        few = [r | at for r in own if r["memory"] == "high" and r["label"] == "GK"]
        missed = {"status": "not_run", "reason": "no time", "tpot_ms": None}
        swept += [r | {"config_hash": f"s{gb}"} for r in few]
        swept += [r | {"config_hash": f"n{gb}", "encoding": "nested"} for r in few]
        swept += [r | missed | {"system": s, "config_hash": f"{s}{gb}"} for r in few for s in ("mo_sm", "vllm")]
    write_records(folder / "sweeps" / "memory", swept)
    return results.read(folder)


def test_comparison_sweep_and_serving_share_one_figure_over_budgets(tmp_path):
    ((suffix, rows),) = redraw.budgets(budget_folders(tmp_path))
    assert suffix == ""
    drawn = rows[rows["status"] == "ok"].groupby("system")["budget_bytes"].unique().map(lambda b: sorted(b // 10**9))
    assert drawn.to_dict() == {
        "specter": [16, 18, 20, 24],
        "specter_nested": [16, 20, 24],
        "mo_sm": [18, 24],
        "llama_cpp": [18, 24],
    }
    at_24 = rows[(rows["system"] == "specter") & (rows["budget_bytes"] == 24 * 10**9)]
    assert set(at_24["memory"]) == {"high"}, "of the sweep and the comparison the comparison counts"


def test_what_was_not_measured_at_a_budget_is_named_and_never_drawn(tmp_path):
    ((_, rows),) = redraw.budgets(budget_folders(tmp_path))
    drawn = memory.figure(rows)
    assert "vLLM" not in " ".join(t.get_text() for t in drawn.legends[0].get_texts())
    said = " ".join(drawn._supxlabel.get_text().split())
    assert "not measured, Phi-3.5-MoE: MO-SM at 16 20 GB, vLLM at 16 20 24 GB" in said


def test_the_configured_variant_stands_for_a_system_that_was_measured_in_several():
    rows = pd.DataFrame(r for r in main_rows() if r["model"] == "phi35_moe" and r["system"] in ("specter", "mo_sm"))
    own = rows[rows["system"] == "mo_sm"]
    rows["variant"] = rows["variant"].where(rows["system"] != "mo_sm", "improved")
    rows = pd.concat([own.assign(variant="as_released"), rows], ignore_index=True)
    assert set(sweeps.main(rows).query("system == 'mo_sm'")["variant"]) == {"improved"}


def test_a_system_may_choose_its_variant_per_model():
    rows = pd.DataFrame(r for r in main_rows() if r["system"] in ("specter", "llama_cpp"))
    chosen = (
        rows["model"].map({"phi35_moe": "layers"}).fillna("experts").where(rows["system"] == "llama_cpp", "default")
    )
    found = sweeps.main(rows.assign(variant=chosen))
    assert len(found) == len(rows) and set(found["variant"]) == {"default", "experts", "layers"}


def test_three_named_memory_settings_are_a_main_run_and_lettered_budgets_a_sweep():
    rows = pd.DataFrame(r for r in main_rows() if r["model"] == "phi35_moe" and r["memory"] == "high")
    third = rows.assign(memory="roomy", budget_bytes=1)
    both = pd.concat([rows, rows.assign(memory="low", budget_bytes=2), third], ignore_index=True)
    assert set(sweeps.main(both)["memory"]) == {"high", "low", "roomy"}
    assert sweeps.main(both.assign(memory=both["budget_bytes"].astype(str) + " GB")).empty


def test_nested_experts_are_a_system_of_their_own_in_every_figure_and_in_no_claim(tmp_path):
    rows = [r for r in main_rows() if r["model"] == "phi35_moe"]
    own = [r for r in rows if r["system"] == "specter"]
    rows += [
        r | {"encoding": "nested", "tpot_ms": r["tpot_ms"] / 2, "config_hash": r["config_hash"] + "n"} for r in own
    ]
    write_records(tmp_path / "main", rows)
    found = results.read(tmp_path)
    looks = {s.label: s.colour for s in style.systems(found.records["main"])}
    assert looks["Specter (nested)"] not in [c for name, c in looks.items() if name != "Specter (nested)"]
    assert list(looks)[:2] == ["Specter (plain)", "Specter (nested)"]
    for draw in (fig14_tpot.figure(redraw.gather(found, "main")), memory.figure(redraw.gather(found, "memory"))):
        assert "Specter (nested)" in [t.get_text() for t in draw.legends[0].get_texts()]
    (claim,) = [c for c in load(claims.CLAIMS) if c.id == "tpot_phi35_moe_specter"]
    assert claims.evaluate([claim], found, draws=0)[0].value == pytest.approx(163.3, rel=0.02)


def test_the_papers_switches_stand_beside_the_default_and_have_the_papers_mark(tmp_path):
    rows = [r for r in main_rows() if r["model"] == "phi35_moe" and r["memory"] == "high"]
    own = [r for r in rows if r["system"] == "specter"]
    slow = {"variant": "paper", "config_hash": "paper"}
    write_records(tmp_path / "main", rows + [r | slow | {"tpot_ms": r["tpot_ms"] * 1.5} for r in own])
    drawn = redraw.gather(results.read(tmp_path), "main")
    assert [s.label for s in style.systems(drawn)][:2] == ["Specter", "Specter (paper)"]
    (axis,) = fig14_tpot.figure(drawn).axes
    bars = [bar for bar in axis.patches if bar.get_facecolor()[:3] == to_rgb("#EFA27A")]
    marks = [tuple(map(float, c.get_offsets()[0])) for c in axis.collections if len(c.get_offsets()) == 1]
    assert (bars[-1].get_x() + bars[-1].get_width() / 2, 163.3) in [pytest.approx(mark) for mark in marks]
    write_records(tmp_path / "alone", [r | slow for r in own])
    assert set(results.read(tmp_path / "alone").all_records()["system_label"]) == {"Specter"}


def test_two_depths_are_a_figure_in_a_folder_of_the_sweep_alone_and_nested_experts_have_their_own(tmp_path):
    rows = [r for r in depth_rows() if r["K"] in (8, 16)]
    nested = [r | {"variant": "nested", "encoding": "nested", "config_hash": r["config_hash"] + "n"} for r in rows]
    write_records(tmp_path / "a" / "depth", rows + nested)
    write_records(tmp_path / "b" / "main", rows)
    plan, _ = redraw.FIGURES["fig07_depth"]
    drawings = plan(results.read(tmp_path / "a"))
    assert [d.name for d in drawings] == ["fig07_depth", "fig07_depth-nested"]
    captions = [d.draw().get_supxlabel() for d in drawings]
    assert [text.endswith("experts nested") for text in captions] == [False, True]
    assert plan(results.read(tmp_path / "b")) == []


def test_records_without_a_needed_column_are_named_and_left_out(tmp_path):
    path = write_records(tmp_path / "main", [row()])
    pd.read_csv(path).drop(columns="link").to_csv(path, index=False)
    write_records(tmp_path / "older", [row()])
    older = tmp_path / "older" / "records.csv"
    pd.read_csv(older).drop(columns="distinct_experts").to_csv(older, index=False)
    (tmp_path / "environment.json").write_text("[")
    found = results.read(tmp_path)
    assert list(found.records) == ["older"] and found.records["older"]["distinct_experts"].isna().all()
    assert "has no column link" in found.problems[0] and "no environment" in found.problems[1]


def test_torn_lines_of_records_are_counted_and_left_out(tmp_path):
    records = write_records(tmp_path / "run", main_rows())
    whole = len(results.read(tmp_path).all_records())
    with records.open("a") as file:
        file.write("specter,default\n")
    found = results.read(tmp_path)
    assert len(found.all_records()) == whole
    assert found.problems == [f"{records}: 1 of {whole + 1} rows are torn lines and left out"]


def test_a_system_may_choose_its_depth_per_prompt_but_not_twice(tmp_path):
    rows = [row(prompt_id=f"p{n}", K=n, system="specmoeoff", config_hash="a") for n in (2, 4)]
    loaded = io.read_records(write_records(tmp_path, rows))
    io.check_one_workload(loaded)
    rows.append(row(prompt_id="p2", K=8, system="specmoeoff", config_hash="b"))
    with pytest.raises(SystemExit, match="differ in K"):
        io.check_one_workload(io.read_records(write_records(tmp_path, rows)))
