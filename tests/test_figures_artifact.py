"""Figures and tables of the artifact from fixture CSVs and traces: every one is drawn, and says what it shows."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from artifact_fixture import (
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
    fig13_routing,
    fig14_tpot,
    fig15_batch,
    fig16_working_set,
    memory,
    redraw,
    results,
    style,
    table3_batch32,
)
from figures.results import ROUTING

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
    assert len(fig13_routing.figure(rows).axes) == 3, "no column of panels without any divergence"


def test_systems_far_above_the_others_are_values_at_the_top_of_the_memory_figure():
    rows = pd.DataFrame(r for r in main_rows() if r["model"] == "phi35_moe" and r["system"] != "autoregressive")
    slow = rows["system"] == "transformers"
    axis = memory.figure(rows.assign(tpot_ms=rows["tpot_ms"] * (1 + 9 * slow))).axes[0]
    assert axis.get_ylim()[1] < 2000
    assert [t.get_text()[-1] for t in axis.texts] == ["\u2191", "\u2191"]


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
