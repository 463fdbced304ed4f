"""Figure 11: draft throughput of the routed experts, expert by expert in FP16 and INT4, and fused, by backend.

python -m figures.fig11_draft_throughput --kernels results/h200/kernels/kernels.csv --out outputs/figures
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures import kernels, lines, stats, style

NAME = "fig11_draft_throughput"
TEXT = "device time of the routed experts alone; number above: best fused INT4 over best unfused INT4"
MOE_LAYERS = {"deepseek_v2_lite": 26, "qwen15_moe": 24, "phi35_moe": 32}  # of the published models


class Look(NamedTuple):
    """One bar of a group."""

    colour: str
    hatch: str = ""


LOOKS = {
    ("fp16", "unfused"): Look("#0072B2"),
    ("marlin", "unfused"): Look("#F0C267", "////"),
    ("marlin", "fused"): Look("#E69F00"),
    ("specter", "unfused"): Look("#EFA27A", "////"),
    ("specter", "fused"): Look("#D55E00"),
}


def needed(rows: pd.DataFrame) -> pd.DataFrame:
    """Timed rows of moe shapes in the backends and variants that are drawn."""
    rows = kernels.timed(rows)
    known = np.array([pair in LOOKS for pair in zip(rows["backend"], rows["variant"], strict=True)], dtype=bool)
    rows = rows[(rows["kind"] == "moe") & known]
    compared = rows[rows["variant"] == "unfused"]
    return rows[rows["tokens"].isin(compared["tokens"])] if len(compared) else rows


def figure(rows: pd.DataFrame) -> Figure:
    """rows: kernels.csv. One panel per model: tokens per second that pass the routed experts of all its MoE layers (of
    one layer, for a model whose number of layers is not known), by tokens of a draft step. The number above a group is
    the best fused INT4 over the best unfused INT4."""
    with style.look():
        rows = needed(rows)
        table = kernels.spread(rows)
        names = [m for m in style.MODELS if m in set(table["size"])]
        names += sorted(set(table["size"]) - set(names))
        width = min(style.TEXT_WIDTH_IN, 1.0 + 2.3 * len(names))
        fig = Figure(figsize=(max(width, style.COLUMN_WIDTH_IN), 3.1), layout="constrained")
        axes = fig.subplots(1, len(names), squeeze=False)[0]
        for axis, name in zip(axes, names, strict=True):
            _panel(axis, table[table["size"] == name], MOE_LAYERS.get(name, 1))
            layers = f"{MOE_LAYERS[name]} MoE layers" if name in MOE_LAYERS else "one MoE layer"
            axis.set_title(f"{style.model_label(name)}, {layers}", loc="left")
            axis.set_xlabel("tokens per draft step")
        axes[0].set_ylabel("draft tokens/s, routed experts")
        lines.legend(fig, axes, 3)
        kernels.stamp(fig, rows, f"{TEXT}; {_launches(rows, names)}")
        return fig


def _panel(axis: Axes, own: pd.DataFrame, layers: int) -> None:
    tokens = sorted(own["tokens"].unique())
    times = own.set_index(["backend", "variant", "tokens"])
    drawn = [key for key in LOOKS if key in set(zip(own["backend"], own["variant"], strict=True))]
    step = 0.84 / len(drawn)
    tops = dict.fromkeys(tokens, 0.0)
    for number, (backend, variant) in enumerate(drawn):
        look = LOOKS[backend, variant]
        found = [(backend, variant, t) in times.index for t in tokens]
        us = np.array([times["us"].get((backend, variant, t), np.nan) for t in tokens], dtype=float)
        error = np.array([times["error"].get((backend, variant, t), np.nan) for t in tokens], dtype=float)
        rate = np.array(tokens) / us * 1e6 / layers
        at = np.arange(len(tokens)) + (number - (len(drawn) - 1) / 2) * step
        name = f"{kernels.label(backend)}, {variant}"
        axis.bar(
            at, rate, step * 0.94, color=look.colour, hatch=look.hatch, edgecolor="white", linewidth=0.3, label=name
        )
        axis.errorbar(
            at, rate, stats.whiskers(rate * error / us), fmt="none", ecolor="#222222", elinewidth=0.7, capsize=1.5
        )
        for t, r, there in zip(tokens, rate, found, strict=True):
            tops[t] = max(tops[t], float(r)) if there else tops[t]
    quick = own[own["backend"] != "fp16"].groupby(["variant", "tokens"])["us"].min()
    for place, t in enumerate(tokens):
        if ("fused", t) in quick.index and ("unfused", t) in quick.index:
            gain = quick["unfused", t] / quick["fused", t]
            axis.annotate(
                f"{gain:.3g}x", (place, tops[t]), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=6.5
            )
    axis.margins(y=0.12)
    axis.set_xticks(range(len(tokens)), [f"{t:g}" for t in tokens])


def _launches(rows: pd.DataFrame, names: list[str]) -> str:
    """Launches per layer at the fewest tokens, per backend and variant, the models in order."""
    first = rows[rows["tokens"] == rows["tokens"].min()]
    parts = []
    for backend, variant in LOOKS:
        own = first[(first["backend"] == backend) & (first["variant"] == variant)]
        counts = [own.loc[own["size"] == name, "launches"].dropna() for name in names]
        told = [f"{count.iloc[0]:.0f}" for count in counts if len(count)]
        if len(own):
            one = told[0] if len(set(told)) == 1 else " / ".join(told)
            parts.append(f"{kernels.label(backend)} {variant} {one}")
    return f"launches per layer at {rows['tokens'].min():g} token: {', '.join(parts)}"


if __name__ == "__main__":
    raise SystemExit(kernels.main(figure, NAME, needed))
