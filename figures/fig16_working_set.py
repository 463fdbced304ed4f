"""Figure 16: distinct experts that a verification pass activates, against the batch size B.

python -m figures.fig16_working_set --records outputs/batch-run/records.csv --out outputs/batch-run/figures
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from figures import lines, paper, stats, style, sweeps

NAME = "fig16_working_set"
FREE = ("B",)


def working_set(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of Specter with `distinct`, the mean number of distinct experts per layer and window. Column
    distinct_experts where records have it; else M / coverage_ceiling, which is that mean wherever a layer's window
    needs at least its M slots (coverage_ceiling = sum of min(distinct, M) over sum of distinct)."""
    rows = sweeps.batch(rows)
    rows = rows[rows["system"] == sweeps.MAIN] if len(rows) else rows
    if rows.empty:
        return rows
    derived = (rows["M"] / rows["coverage_ceiling"]).where(rows["coverage_ceiling"] < 1)
    own = rows["distinct_experts"].astype(float) if "distinct_experts" in rows else derived
    return rows.assign(distinct=own.fillna(derived)).dropna(subset=["distinct"])


def figure(rows: pd.DataFrame) -> Figure:
    """rows: records of Specter at several B. Left axis: experts; each point says its multiple of B = 1."""
    with style.look():
        return _draw(working_set(rows))


def _draw(rows: pd.DataFrame) -> Figure:
    names = style.models(rows)
    fig = Figure(figsize=(min(style.TEXT_WIDTH_IN, 1.2 + 2.6 * len(names)), 2.6), layout="constrained")
    axes = fig.subplots(1, len(names), squeeze=False)[0]
    for axis, model in zip(axes, names, strict=True):
        panel = rows[rows["model"] == model]
        lines.curves(axis, panel, "B", "distinct", style.systems(rows))
        table = stats.average(panel, ["B"], "distinct").sort_values("B")
        first = table["mean"].iloc[0]
        for place, row in enumerate(table.itertuples()):
            axis.annotate(
                f"{row.mean / first:.2f}x",
                (place, row.mean),
                xytext=(0, 5),
                textcoords="offset points",
                ha="center",
                fontsize=6.5,
            )
        axis.set_ylim(0, 1.18 * (table["mean"] + table["error"].fillna(0)).max())
        axis.set_xlim(-0.35, len(table) - 0.65)
        axis.set_title(style.model_label(model), loc="left")
        axis.set_xlabel("batch size B (requests)")
        stated = paper.value("working_set_growth", model=model)
        if stated is not None and 2 in set(table["B"]):
            axis.scatter(
                [list(table["B"]).index(2)], [stated * first], label="paper's growth from B = 1", **style.PAPER
            )
    axes[0].set_ylabel("distinct experts\nper layer and window")
    lines.legend(fig, axes)
    style.finish(fig, rows)
    return fig


if __name__ == "__main__":
    from figures.io import main

    raise SystemExit(main(figure, NAME, free=FREE))
