"""Figures and tables of the artifact from fixture CSVs and traces."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pandas as pd
import pytest
from artifact_fixture import (
    DEPTH,
    ablation_rows,
    batch_rows,
    main_rows,
    routing_rows,
    row,
    write_all,
    write_records,
    write_table,
)
from matplotlib.backends.backend_agg import FigureCanvasAgg

from figures import (
    ablation,
    efficiency,
    fig07_depth,
    fig09_timeline,
    fig13_routing,
    fig14_tpot,
    fig15_batch,
    fig16_working_set,
    io,
    memory,
    paper,
    redraw,
    results,
    style,
    sweeps,
    table2_models,
    table3_batch32,
    traces,
)
from figures.results import ROUTING
from harness import claims
from harness.claim_verdict import load

ROOT = Path(__file__).resolve().parents[1]
EXPECTED = {
    "fig07_depth": ["speculation depth K (tokens)", "TPOT (ms)", "AVG", "chosen K", "K in the paper"],
    "fig08_iteration": ["draft", "verify", "commit", "time (ms)"],
    "fig09_timeline": ["Cold Start", "Verification", "link (H2D)", "predicted load", "demanded load"],
    "fig10_kernels": ["tokens", "time (µs)", "FP16", "Marlin INT4"],
    "fig11_draft_throughput": ["draft tokens/s, routed experts", "Marlin INT4, fused", "Marlin INT4, unfused"],
    "fig12_verification": ["compute", "link (H2D)", "demanded load"],
    "fig13_routing": ["GK", "WT", "HE", "GP", "C4", "routing divergence (JS, bits)"],
    "fig14_tpot": ["GK", "WT", "HE", "GP", "C4", "AVG", "Specter", "vLLM", style.PAPER_LABEL],
    "fig15_batch": ["TPOT (ms)", "throughput (tokens/s)", "batch size B (requests)", "Specter", "MO-SM"],
    "fig16_working_set": ["batch size B (requests)", "distinct experts\nper layer and window"],
    "table2_models": ["DeepSeek-V2-Lite", "Qwen1.5-MoE", "Phi-3.5-MoE", "16.5 MiB"],
    "table3_batch32": ["GK", "AVG", "TPOT (ms)", "tokens/s", "Specter", "32"],
    "ablation": ["Specter", "no prefetch", "TPOT over Specter's (1 = all mechanisms on)"],
    "efficiency": ["needed", "LRU", "Belady", "precision", "draft tokens seen", "MoE layer", "experts per token"],
    "memory": ["device memory budget (GB)", "TPOT (ms)"],
    "prefix": ["prefix (tokens)", "TTFT (ms)"],
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return results.read(write_all(tmp_path_factory.mktemp("results")))


@pytest.fixture(scope="module")
def drawn(found):
    """name -> Figure, laid out."""
    figures = {}
    for name, (plan, _) in redraw.FIGURES.items():
        (drawing,) = plan(found)
        figures[name] = drawing.draw()
        FigureCanvasAgg(figures[name])
        with style.look():
            figures[name].draw_without_rendering()
    return figures


def texts(figure) -> list:
    """Every visible text of a figure that says something."""
    import matplotlib.text

    return [t for t in figure.findobj(matplotlib.text.Text) if t.get_visible() and t.get_text().strip()]


def test_every_figure_of_the_artifact_is_expected_here():
    assert set(EXPECTED) == set(redraw.FIGURES)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_each_figure_draws_marks_and_says_what_they_are(name, drawn):
    said = {t.get_text() for t in texts(drawn[name])}
    assert set(EXPECTED[name]) <= said, set(EXPECTED[name]) - said
    marks = sum(len(a.patches) + len(a.lines) + len(a.collections) + len(a.images) for a in drawn[name].axes)
    assert marks >= 3


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_no_text_is_cut_off_at_the_edge_of_a_figure(name, drawn):
    figure = drawn[name]
    shown, hidden = figure.bbox.padded(1), beyond_limits(figure)
    for text in texts(figure):
        if text in hidden or text.get_text() == style.WATERMARK:
            continue
        box = text.get_window_extent()
        assert shown.x0 <= box.x0 and box.x1 <= shown.x1, (text.get_text(), box, shown)
        assert shown.y0 <= box.y0 and box.y1 <= shown.y1, (text.get_text(), box, shown)


def beyond_limits(figure) -> set:
    """Labels of ticks outside their axis's limits, and all of hidden axes: these are not drawn."""
    hidden = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
                if not axes.get_visible() or not axes.axison or not low <= tick.get_loc() <= high:
                    hidden |= {tick.label1, tick.label2}
    return hidden


def test_the_depth_of_least_tpot_is_chosen(found):
    chosen = fig07_depth.best(found.records["depth"]).set_index("model")["K"].to_dict()
    assert chosen == DEPTH


def test_the_working_set_follows_from_slots_and_ceiling_unless_it_was_counted(found):
    rows = found.records["batch"].drop(columns="distinct_experts")
    derived = fig16_working_set.working_set(rows)
    own = derived[(derived["model"] == "qwen15_moe")].groupby("B")["distinct"].mean()
    assert own[2] / own[1] == pytest.approx(1.52)
    counted = fig16_working_set.working_set(rows.assign(distinct_experts=7.0))
    assert set(counted["distinct"]) == {7.0}


def test_windows_that_fit_the_slots_tell_no_working_set(found):
    rows = found.records["batch"].assign(coverage_ceiling=1.0, distinct_experts=None)
    assert fig16_working_set.working_set(rows).empty


def test_distinct_experts_of_records_stand_in_where_no_routing_was_traced(tmp_path):
    write_records(tmp_path / "main", [r | {"distinct_experts": 30.0} for r in main_rows()])
    rows = redraw.routing(results.read(tmp_path))
    assert set(rows["kind"]) == {"distinct"} and set(rows["value"]) == {30.0} and set(rows["window"]) == {9, 17}
    assert len(rows) == 3 * 5 * 2, "one row per model, dataset and prompt, whatever the memory settings"
    write_table(tmp_path / "routing.csv", ROUTING, [r for r in routing_rows() if r["model"] == "phi35_moe"])
    traced = redraw.routing(results.read(tmp_path))
    assert 30.0 not in set(traced[traced["model"] == "phi35_moe"]["value"])
    assert set(traced[traced["model"] == "qwen15_moe"]["value"]) == {30.0}
    said = {t.get_text() for t in texts(fig13_routing.figure(traced))}
    assert "no divergence rows" in said


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


def test_systems_far_above_the_others_are_values_at_the_top_of_the_memory_figure():
    rows = pd.DataFrame(r for r in main_rows() if r["model"] == "phi35_moe" and r["system"] != "autoregressive")
    slow = rows["system"] == "transformers"
    axis = memory.figure(rows.assign(tpot_ms=rows["tpot_ms"] * (1 + 9 * slow))).axes[0]
    assert axis.get_ylim()[1] < 2000
    assert [t.get_text()[-1] for t in axis.texts] == ["\u2191", "\u2191"]


def test_the_configured_variant_stands_for_a_system_that_was_measured_in_several():
    rows = pd.DataFrame(r for r in main_rows() if r["model"] == "phi35_moe" and r["system"] in ("specter", "mo_sm"))
    own = rows[rows["system"] == "mo_sm"]
    rows["variant"] = rows["variant"].where(rows["system"] != "mo_sm", "improved")
    rows = pd.concat([own.assign(variant="as_released"), rows], ignore_index=True)
    assert set(sweeps.main(rows).query("system == 'mo_sm'")["variant"]) == {"improved"}


def test_no_bar_of_the_ablation_ends_outside_its_panel():
    rows = pd.DataFrame(ablation_rows())
    slow = (rows["variant"] == "tokenwise") & (rows["model"] == "deepseek_v2_lite")
    figure = ablation.figure(rows.assign(tpot_ms=rows["tpot_ms"] * (1 + 3 * slow)))
    widths = [patch.get_width() for axis in figure.axes for patch in axis.patches]
    assert 7 < max(widths) < figure.axes[0].get_xlim()[1] == figure.axes[1].get_xlim()[1]


@pytest.mark.parametrize("draw", [fig14_tpot.figure, memory.figure])
def test_long_labels_of_a_legend_are_not_cut_off(draw):
    rows = pd.DataFrame(r for r in main_rows() if r["model"] == "phi35_moe")
    rows = rows[(rows["label"] == "GK") | ~rows["system"].isin(["transformers", "llama_cpp"])]
    rows["new_tokens"] = rows["new_tokens"].where(rows["system"] != "transformers", 6)
    figure = draw(rows)
    FigureCanvasAgg(figure)
    with style.look():
        figure.draw_without_rendering()
    for text in figure.legends[0].get_texts():
        box = text.get_window_extent()
        assert figure.bbox.x0 + 20 < box.x0 and box.x1 < figure.bbox.x1, text.get_text()


def test_curves_far_apart_are_drawn_on_a_logarithmic_axis():
    rows = pd.DataFrame(batch_rows())
    assert fig15_batch.figure(rows).axes[0].get_yscale() == "linear"
    slow = rows.assign(tpot_ms=rows["tpot_ms"] * (1 + 99 * (rows["system"] == "transformers")))
    assert fig15_batch.figure(slow).axes[0].get_yscale() == "log"


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
    assert list(looks)[:2] == ["Specter", "Specter (nested)"]
    for draw in (fig14_tpot.figure(redraw.gather(found, "main")), memory.figure(redraw.gather(found, "memory"))):
        assert "Specter (nested)" in [t.get_text() for t in draw.legends[0].get_texts()]
    (claim,) = [c for c in load(claims.CLAIMS) if c.id == "tpot_phi35_moe_specter"]
    assert claims.evaluate([claim], found, draws=0)[0].value == pytest.approx(163.3, rel=0.02)


def test_colours_are_those_of_the_configuration_where_a_run_left_no_systems_file(tmp_path):
    write_records(tmp_path / "main", [r for r in main_rows() if r["model"] == "phi35_moe"])
    with_file = style.systems(results.read(tmp_path).records["main"])
    (tmp_path / "main" / "systems.csv").unlink()
    assert style.systems(results.read(tmp_path).records["main"]) == with_file


def test_a_figure_whose_sweep_was_not_run_says_why_and_a_bench_may_share_the_name_of_a_table(tmp_path):
    missed = {"status": "not_run", "reason": "the time was used up", "tpot_ms": None}
    write_records(tmp_path / "sweeps" / "depth", [row(**missed)])
    (tmp_path / "kernels.csv").write_text("shape,what,value\ngauss,differs,0\n")
    found = results.read(tmp_path)
    missing = {o.figure: o.missing for o in redraw.redraw(found, tmp_path / "out", ["fig07_depth", "fig10_kernels"])}
    assert missing["fig07_depth"].endswith("; tried here: the time was used up")
    assert "tried" not in missing["fig10_kernels"] and found.problems == []


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


def test_planner_phases_follow_from_the_plans(tmp_path, found):
    table = traces.events(found.traces[0])
    window = traces.windows(table).iloc[0]
    own = traces.between(table, window["start_ms"], window["end_ms"])
    spans = fig09_timeline.phases(own, window["draft_end_ms"] - window["start_ms"])
    assert [s.phase for s in spans] == ["Cold Start", "Prefetch Overlap", "Final Cleanup"]
    assert all(a.end_ms == b.start_ms for a, b in itertools.pairwise(spans))
    one_plan = own[(own["name"] != "plan") | (own["drafted"] == 2)]
    spans = fig09_timeline.phases(one_plan, window["draft_end_ms"] - window["start_ms"])
    assert [s.phase for s in spans] == ["Cold Start", "Final Cleanup"]


def test_a_file_that_is_no_trace_is_one_line(tmp_path):
    path = tmp_path / "expertwise.json"
    path.write_text(json.dumps({"events": []}))
    with pytest.raises(SystemExit, match="is no trace"):
        traces.events(path)


def test_model_sizes_are_those_of_the_configurations():
    table = table2_models.models(ROOT / "conf" / "model").set_index("model")
    assert table.loc["deepseek_v2_lite", "total"] == 15_706_484_224
    assert table.loc["qwen15_moe", "routed"] == 12_457_082_880
    assert table.loc["phi35_moe", "active"] == 6_640_999_744
    assert table.loc["deepseek_v2_lite", "expert_bytes"] == 17_301_504
    assert table.loc["phi35_moe", "draft_bytes"] == pytest.approx(22.331 * 2**30, rel=1e-4)


def test_shipped_models_count_every_element_of_their_checkpoint():
    safetensors = pytest.importorskip("safetensors")
    table = table2_models.models(ROOT / "conf" / "model").set_index("model")
    for name in ("deepseek_v2_mini", "qwen2_moe_mini", "phimoe_mini"):
        total = 0
        for path in (ROOT / "reference" / name).glob("*.safetensors"):
            with safetensors.safe_open(path, "pt") as file:
                for key in file.keys():  # noqa: SIM118
                    count = 1
                    for extent in file.get_slice(key).get_shape():
                        count *= extent
                    total += count
        assert table.loc[name, "total"] == total


def test_table3_takes_the_largest_batch_where_32_was_not_run():
    rows = pd.DataFrame(batch_rows())
    assert set(table3_batch32.table(rows)["B"]) == {32}
    assert set(table3_batch32.table(rows[rows["B"] < 16])["B"]) == {8}


def test_only_stated_averages_of_the_paper_are_marked():
    assert paper.value("tpot_ms", model="phi35_moe", memory="high", system="specter") == 163.3
    assert paper.value("tpot_ms", model="phi35_moe", memory="low", system="specter") is None
    assert paper.value("tpot_ms", model="deepseek_v2_lite", memory="high", system="vllm") is None
    assert paper.value("tpot_ms", model="phimoe_mini", memory="high", system="specter") is None


def test_reference_rows_carry_the_watermark_in_every_record_figure(found):
    rows = found.records["batch"].assign(device="cpu")
    for draw in (fig16_working_set.figure, table3_batch32.figure):
        assert style.WATERMARK in [t.get_text() for t in draw(rows).texts]
    routing = found.tables["routing"].assign(device="cpu")
    assert style.WATERMARK in [t.get_text() for t in fig13_routing.figure(routing).texts]


def test_redraw_writes_what_it_can_and_says_what_is_missing(tmp_path, capsys):
    write_records(tmp_path / "results" / "main", [r for r in main_rows() if r["model"] == "phi35_moe"])
    (tmp_path / "results" / "kernels.csv").write_text("shape,tokens\n")
    assert redraw.main(["--results", str(tmp_path / "results"), "--out", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[1].rstrip(":") for line in lines if line.startswith("drawn")]
    assert names == ["fig14_tpot", "table2_models", "memory"]
    missing = [line for line in lines if line.startswith("missing")]
    assert len(missing) == len(redraw.FIGURES) - len(names)
    assert sum("kernels.csv has no column backend" in line for line in lines) == 1
    assert [entry["name"] for entry in json.loads((tmp_path / "out" / "figures.json").read_text())] == names
    assert (tmp_path / "out" / "fig14_tpot.pdf").read_bytes().startswith(b"%PDF")


def test_a_system_may_choose_its_depth_per_prompt_but_not_twice(tmp_path):
    rows = [row(prompt_id=f"p{n}", K=n, system="specmoeoff", config_hash="a") for n in (2, 4)]
    loaded = io.read_records(write_records(tmp_path, rows))
    io.check_one_workload(loaded)
    rows.append(row(prompt_id="p2", K=8, system="specmoeoff", config_hash="b"))
    with pytest.raises(SystemExit, match="differ in K"):
        io.check_one_workload(io.read_records(write_records(tmp_path, rows)))
