"""Figure 11: draft throughput of the routed experts of a layer, fused into one launch or expert by expert.

python -m figures.fig11_draft_throughput --kernels results/h200/kernels.csv --out outputs/figures
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures import kernels, lines, style

NAME = "fig11_draft_throughput"
LOOKS = {"unfused": ("#0072B2", "", "unfused (one launch per expert)"), "fused": ("#D55E00", "", "fused")}


def needed(rows: pd.DataFrame) -> pd.DataFrame:
    """Timed INT4 rows of moe shapes, fused and unfused."""
    rows = kernels.timed(rows)
    return rows[(rows["kind"] == "moe") & rows["variant"].isin(list(LOOKS)) & (rows["backend"] != "fp16")]


def figure(rows: pd.DataFrame) -> Figure:
    """rows: kernels.csv. One panel per model: tokens per millisecond that one MoE layer's routed experts process, by
    number of tokens (batch of a draft step); the number above a pair is fused over unfused."""
    with style.look():
        rows = needed(rows)
        table = kernels.spread(rows)
        names = [m for m in style.MODELS if m in set(table["size"])]
        names += sorted(set(table["size"]) - set(names))
        width = min(style.TEXT_WIDTH_IN, 1.0 + 2.3 * len(names))
        fig = Figure(figsize=(max(width, style.COLUMN_WIDTH_IN), 2.7), layout="constrained")
        axes = fig.subplots(1, len(names), squeeze=False)[0]
        for axis, name in zip(axes, names, strict=True):
            _panel(axis, table[table["size"] == name])
            axis.set_title(style.model_label(name), loc="left")
            axis.set_xlabel("tokens per draft step")
        axes[0].set_ylabel("tokens per ms, one MoE layer")
        lines.legend(fig, axes)
        backends = ", ".join(kernels.label(b) for b in sorted(rows["backend"].unique()))
        kernels.stamp(fig, rows, f"routed experts of one layer, {backends}")
        return fig


def _panel(axis: Axes, own: pd.DataFrame) -> None:
    tokens = sorted(own["tokens"].unique())
    best = own.sort_values("us").groupby(["variant", "tokens"]).head(1).set_index(["variant", "tokens"])
    for number, (variant, (colour, hatch, name)) in enumerate(LOOKS.items()):
        us = np.array([best["us"].get((variant, t), np.nan) for t in tokens], dtype=float)
        error = np.array([best["error"].get((variant, t), np.nan) for t in tokens], dtype=float)
        rate = np.array(tokens) / us * 1e3
        at = np.arange(len(tokens)) + (number - 0.5) * 0.4
        axis.bar(at, rate, 0.38, color=colour, hatch=hatch, label=name)
        axis.errorbar(at, rate, rate * error / us, fmt="none", ecolor="#222222", elinewidth=0.7, capsize=1.5)
    for place, t in enumerate(tokens):
        if ("fused", t) in best.index and ("unfused", t) in best.index:
            gain = best["us"][("unfused", t)] / best["us"][("fused", t)]
            top = max(t / best["us"][(v, t)] * 1e3 for v in LOOKS)
            axis.annotate(
                f"{gain:.3g}x", (place, top), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=6.5
            )
    axis.margins(y=0.12)
    axis.set_xticks(range(len(tokens)), [f"{t:g}" for t in tokens])


if __name__ == "__main__":
    kernels.main(figure, NAME)
