"""Figure 15: TPOT and aggregate throughput against the batch size B, mean of the datasets.

python -m figures.fig15_batch --records outputs/batch-run/records.csv --out outputs/batch-run/figures
"""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures import lines, paper, stats, style, sweeps

NAME = "fig15_batch"
FREE = ("B",)
METRICS = {"tpot_ms": "TPOT (ms)", "throughput": "throughput (tokens/s)"}


def figure(rows: pd.DataFrame) -> Figure:
    """rows: records of several systems at several B. Each point is the average over datasets with its standard error;
    diamonds are Specter's value at B = 1 times the growth that the paper states."""
    with style.look():
        rows = sweeps.batch(rows)
        fig = lines.grid(rows, "B", METRICS, "batch size B (requests)", mark=_stated)
        style.finish(fig, rows)
        return fig


def _stated(axis: Axes, panel: pd.DataFrame, metric: str) -> None:
    own = panel[(panel["system"] == sweeps.MAIN) & (panel["memory"] == "high")]
    if own.empty or not (own["B"] == 1).any():
        return
    table = stats.average(own, ["B"], metric).set_index("B")["mean"]
    sizes = sorted(panel["B"].unique())
    growth = {"tpot_ms": "tpot_growth", "throughput": "throughput_growth"}[metric]
    stated = {b: paper.value(growth, model=own["model"].iloc[0], B=b) for b in sizes if b in table.index}
    points = [(sizes.index(b), table[1] * factor) for b, factor in stated.items() if factor is not None]
    if points:
        axis.scatter(*zip(*points, strict=True), label="paper's growth from B = 1", **style.PAPER)


if __name__ == "__main__":
    from figures.io import main

    raise SystemExit(main(figure, NAME, free=FREE))
