"""Figure 14 from fixture records."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import matplotlib.colors
import numpy as np
import pandas as pd
import pytest
from records_fixture import TPOT_MS, main_run, row

from figures import fig14_tpot, io, style
from harness.columns import NAMES
from harness.config import system_entry
from harness.records import cell
from harness.runner import write_systems


def write(folder: Path, rows: list[dict]) -> Path:
    path = folder / "records.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(NAMES)
        writer.writerows([cell(r[name]) for name in NAMES] for r in rows)
    entries = [
        system_entry(name, {"module": "x", "label": name.upper(), "colour": colour, "order": order})
        for order, (name, colour) in enumerate(zip(TPOT_MS, style.FALLBACK, strict=False))
    ]
    write_systems(folder / "systems.csv", entries)
    return path


def bars(axis) -> dict[str, list[float]]:
    """Heights by face colour."""
    found: dict[str, list[float]] = {}
    for patch in axis.patches:
        if patch.get_height() > 0 and patch.get_width() < 0.8:
            found.setdefault(matplotlib.colors.to_hex(patch.get_facecolor()), []).append(patch.get_height())
    return found


def test_bar_heights_are_the_means_of_the_records(tmp_path):
    rows = io.read_records(write(tmp_path, list(main_run())))
    fig = fig14_tpot.figure(rows)
    specter = rows[rows["system"] == "specter"]
    by_label = specter.groupby("label")["tpot_ms"].mean()
    drawn = bars(fig.axes[0])[style.FALLBACK[0].lower()]
    assert drawn[:5] == pytest.approx([by_label[x] for x in style.LABELS[:5]])
    assert drawn[5] == pytest.approx(by_label.mean())


def test_a_mean_of_one_prompt_has_no_whisker(tmp_path):
    few = [row(label="GK", prompt_id="p1", tpot_ms=10.0), row(label="C4", prompt_id="p2", tpot_ms=20.0)]
    more = [*few, row(label="C4", prompt_id="p3", tpot_ms=24.0)]
    whiskers = []
    for name, rows in (("few", few), ("more", more)):
        (tmp_path / name).mkdir()
        axis = fig14_tpot.figure(io.read_records(write(tmp_path / name, rows))).axes[0]
        lines = [s for c in axis.collections if hasattr(c, "get_segments") for s in c.get_segments() if len(s)]
        whiskers.append([ends for ends in (np.array(line)[:, 1] for line in lines) if np.isfinite(ends).all()])
    assert whiskers[0] == []
    assert [list(ends) for ends in whiskers[1]] == [pytest.approx([20, 24]), pytest.approx([15, 17])], "C4 and AVG"


def test_a_system_far_above_all_others_is_cut_off_and_its_values_are_written(tmp_path):
    rows = io.read_records(write(tmp_path, list(main_run())))
    axis = fig14_tpot.figure(rows).axes[0]
    slow = rows[rows["system"] == "transformers"].groupby("label")["tpot_ms"].mean()
    others = rows[rows["system"] != "transformers"].groupby(["system", "label"])["tpot_ms"].mean()
    assert others.max() < axis.get_ylim()[1] < slow.min()
    written = [t.get_text() for t in axis.texts]
    assert all(f"{value:.3g}\u2191" in written for value in slow)


def test_a_value_of_the_paper_beyond_the_axis_is_written_at_its_top(tmp_path):
    systems = ("specter", "mo_sm", "specmoeoff")
    rows = io.read_records(write(tmp_path, [r for r in main_run() if r["system"] in systems]))
    axis = fig14_tpot.figure(rows.assign(model="deepseek_v2_lite", memory="high")).axes[0]
    assert axis.get_ylim()[1] < 72.2 and "\u25c7 72.2\u2191" in [t.get_text() for t in axis.texts]


def test_a_value_of_the_paper_stands_in_the_bar_that_is_cut_off_too(tmp_path):
    rows = io.read_records(write(tmp_path, list(main_run())))
    slow = rows[rows["system"] == "transformers"].groupby("label")["tpot_ms"].mean().mean()
    axis = fig14_tpot.figure(rows.assign(model="deepseek_v2_lite", memory="high")).axes[0]
    assert axis.get_ylim()[1] < min(slow, 344.9)
    written = [t.get_text() for t in axis.texts]
    assert f"\u25c7 345\u2191  {slow:.3g}\u2191" in written and sum("345" in text for text in written) == 1


def test_at_most_half_of_the_systems_are_cut_off():
    def top(**times: float) -> float:
        keys = pd.MultiIndex.from_tuples([(s, "AVG") for s in times], names=["system", "label"])
        return fig14_tpot.ceiling(pd.DataFrame({"mean": list(times.values()), "error": 0.0}, index=keys))

    assert top(a=10, b=12, c=100, d=2000) == pytest.approx(12 * 1.8)
    assert top(a=10, b=12, c=30, d=2000) == pytest.approx(30 * 1.8)
    assert top(a=10, b=100, c=110, d=120) == pytest.approx(120 * 1.2)


def test_a_system_keeps_colour_and_order_whatever_rows_are_missing(tmp_path):
    everything = io.read_records(write(tmp_path, list(main_run())))
    fewer = everything[everything["system"].isin(["transformers", "mo_sc"])].iloc[::-1]
    full = {s.system: s for s in style.systems(everything)}
    assert [s.system for s in style.systems(fewer)] == ["mo_sc", "transformers"]
    assert all(full[s.system] == s for s in style.systems(fewer))


def test_cpu_figures_carry_the_watermark_and_others_do_not(tmp_path):
    rows = io.read_records(write(tmp_path, list(main_run())))
    assert style.WATERMARK in [t.get_text() for t in fig14_tpot.figure(rows).texts]
    rows["device"] = "cuda"
    assert style.WATERMARK not in [t.get_text() for t in fig14_tpot.figure(rows).texts]


def test_the_caption_names_prompts_weights_link_and_device(tmp_path):
    rows = io.read_records(write(tmp_path, list(main_run())))
    caption = style.caption(rows)
    for part in (
        "prompts per system 15",
        "weights reference",
        "scaled (0.1 GB/s)",
        "device cpu",
        "prefix 16",
    ):
        assert part in caption


def test_failed_rows_and_systems_outside_figures_are_not_drawn(tmp_path):
    failed = row(system="mo_sm", status="crashed", reason="killed", tpot_ms=None, K=0, prompt_id="C4-9")
    rows = io.read_records(write(tmp_path, [*main_run(), failed]))
    rows.loc[rows["system"] == "transformers", "system_figure"] = False
    names = [t.get_text() for t in fig14_tpot.figure(rows).legends[0].get_texts()]
    assert names == ["SPECTER", "MO_SM", "MO_SC", "AUTOREGRESSIVE"]


def test_mixed_workloads_are_refused_with_the_value_to_choose(tmp_path):
    rows = [*main_run(), row(prefix_len=64, prompt_id="long", config_hash="other")]
    loaded = io.read_records(write(tmp_path, rows))
    with pytest.raises(SystemExit, match=r"differ in prefix_len \(16, 64\); choose with --where prefix_len"):
        io.check_one_workload(loaded)
    io.check_one_workload(io.read_records(tmp_path / "records.csv", ["prefix_len=16"]))


def test_the_command_writes_png_and_pdf(tmp_path):
    path = write(tmp_path, list(main_run(("deepseek_v2_mini", "phimoe_mini"))))
    command = [
        sys.executable,
        "-m",
        "figures.fig14_tpot",
        "--records",
        str(path),
        "--out",
        str(tmp_path / "f"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [Path(p).suffix for p in done.stdout.split()] == [".png", ".pdf"]
    assert (tmp_path / "f/fig14_tpot.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "f/fig14_tpot.pdf").read_bytes().startswith(b"%PDF")


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(SystemExit, match="does not exist"):
        io.read_records(tmp_path / "nothing.csv")


def test_later_rows_replace_earlier_ones_of_the_same_key(tmp_path):
    failed = row(status="crashed", reason="killed", tpot_ms=None, ttft_ms=None, throughput=None)
    rows = io.read_records(write(tmp_path, [failed, row()]))
    assert rows["status"].tolist() == ["ok"]
    assert isinstance(rows, pd.DataFrame)
