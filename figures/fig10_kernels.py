"""Figure 10: INT4 kernels against FP16, on large dense shapes and on narrow expert shapes.

python -m figures.fig10_kernels --kernels results/h200/kernels/kernels.csv --out outputs/figures
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from figures import kernels, lines, stats, style

NAME = "fig10_kernels"


def needed(rows: pd.DataFrame) -> pd.DataFrame:
    """Timed rows of dense and expert shapes."""
    rows = kernels.timed(rows)
    return rows[rows["kind"].isin(["dense", "expert"])]


def figure(rows: pd.DataFrame) -> Figure:
    """rows: kernels.csv. One panel per shape, dense ones first, large ones first: time of a call in microseconds by the
    number of tokens, both logarithmic. Where FP16 was timed, the INT4 backend's best and worst speedup is written
    above."""
    with style.look():
        rows = needed(rows)
        table = kernels.spread(rows)
        shapes = sorted(table["shape"].unique(), key=lambda s: (not s.startswith("dense"), -_weights(s), s))
        columns = 2 if len(shapes) in (2, 4) else min(3, len(shapes))
        high = -(-len(shapes) // columns)
        size = (min(style.TEXT_WIDTH_IN, 1.1 + 2.3 * columns), 0.85 + 2.0 * high)
        fig = Figure(figsize=size, layout="constrained")
        axes = fig.subplots(high, columns, squeeze=False).ravel()
        for axis in axes[len(shapes) :]:
            axis.set_visible(False)
        for axis, shape in zip(axes, shapes, strict=False):
            own = table[table["shape"] == shape]
            for (backend, variant), line in own.groupby(["backend", "variant"], sort=True):
                line = line.sort_values("tokens")
                name = kernels.label(backend) + (f" ({variant})" if variant else "")
                axis.errorbar(
                    line["tokens"],
                    line["us"],
                    stats.whiskers(line["error"]),
                    color=kernels.colour(backend),
                    marker=kernels.MARKERS.get(backend, "v"),
                    ls="--" if variant == "unfused" else "-",
                    ms=3.5,
                    lw=1.3,
                    capsize=2,
                    label=name,
                )
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            ticks = sorted(own["tokens"].unique())
            axis.set_xticks(ticks, [_count(t) for t in ticks], minor=False)
            axis.minorticks_off()
            low, top = own["us"].min(), own["us"].max()
            axis.set_ylim(low / 1.3, top * 1.3)
            marks = np.unique([float(f"{v:.2g}") for v in np.geomspace(low, top, 4)])
            axis.set_yticks(marks, [f"{v:g}" for v in marks])
            axis.set_title(_title(own, shape), loc="left")
            axis.set_xlabel("tokens")
        for axis in axes[::columns]:
            axis.set_ylabel("time (µs)")
        lines.legend(fig, axes[: len(shapes)], 4)
        text = "inputs x outputs; device time of one call; FP16: 16-bit weights, cuBLAS; 64 tokens or more: prefill"
        kernels.stamp(fig, rows, text)
        return fig


def _weights(shape: str) -> int:
    """Number of weights of '… INxOUT', 0 where the name is another."""
    inputs, _, outputs = shape.rpartition(" ")[2].partition("x")
    return int(inputs) * int(outputs) if inputs.isdigit() and outputs.isdigit() else 0


def _count(tokens: float) -> str:
    return f"{tokens / 1024:g}k" if tokens >= 1024 else f"{tokens:g}"


def _title(own: pd.DataFrame, shape: str) -> str:
    times = own.groupby(["backend", "tokens"])["us"].min().unstack("backend")
    if not {"fp16", "marlin"} <= set(times):
        return shape
    gain = (times["fp16"] / times["marlin"]).dropna()
    return f"{shape}\nMarlin {gain.min():.2f}-{gain.max():.2f}x FP16" if len(gain) else shape


if __name__ == "__main__":
    raise SystemExit(kernels.main(figure, NAME, needed))
