"""Curves of several systems against one axis, one panel per model: figures 15, memory and prefix."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from figures import stats, style

FAR = 30
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")


def grid(
    rows: pd.DataFrame,
    axis_column: str,
    metrics: dict[str, str],
    label: str,
    scale: str = "category",
    mark: Callable[[Axes, pd.DataFrame, str], None] | None = None,
) -> Figure:
    """One row of panels per metric (column -> axis label), one column per (model, memory). scale: "category" spaces the
    values evenly, "linear" as numbers. mark(axis, panel, metric) adds to a panel."""
    memory = "memory" if axis_column != "budget_bytes" else None
    panels = _panels(rows, memory)
    width = min(style.TEXT_WIDTH_IN, 1.2 + 2.6 * len(panels))
    fig = Figure(figsize=(width, 0.95 + 1.9 * len(metrics)), layout="constrained")
    axes = fig.subplots(len(metrics), len(panels), squeeze=False, sharex="col")
    systems = style.systems(rows)
    for column, (title, panel) in enumerate(panels):
        for line, (metric, name) in enumerate(metrics.items()):
            axis = axes[line][column]
            curves(axis, panel, axis_column, metric, systems, scale)
            if mark is not None:
                mark(axis, panel, metric)
            if column == 0:
                axis.set_ylabel(name)
            if line == 0:
                axis.set_title(title, loc="left")
        axes[-1][column].set_xlabel(label)
    legend(fig, axes.ravel())
    return fig


def _panels(rows: pd.DataFrame, memory: str | None) -> list[tuple[str, pd.DataFrame]]:
    panels = []
    for model in style.models(rows):
        own = rows[rows["model"] == model]
        if memory is None:
            panels.append((style.model_label(model), own))
            continue
        panels += [(f"{style.model_label(model)}, {m} memory", own[own["memory"] == m]) for m in style.memories(own)]
    return panels


def curves(
    axis: Axes,
    panel: pd.DataFrame,
    column: str,
    metric: str,
    systems: Sequence[style.SystemStyle],
    scale: str = "category",
) -> None:
    """The average over datasets of each system, with its standard error; logarithmic where the largest is more than
    FAR times the least."""
    table = stats.average(panel, ["system", column], metric)
    values = sorted(table[column].unique())
    place = {v: (i if scale == "category" else v) for i, v in enumerate(values)}
    for number, system in enumerate(systems):
        own = table[table["system"] == system.system].sort_values(column)
        if own.empty:
            continue
        axis.errorbar(
            [place[v] for v in own[column]],
            own["mean"],
            own["error"].fillna(0),
            color=system.colour,
            marker=MARKERS[number % len(MARKERS)],
            ms=3.8,
            lw=1.4,
            ls="--" if system.hatch else "-",
            capsize=2,
            label=system.label,
        )
    if len(table) and table["mean"].max() > FAR * table["mean"].min() > 0:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
    else:
        axis.set_ylim(bottom=0)
    if scale == "category":
        axis.set_xticks(range(len(values)), [f"{v:g}" for v in values])


def legend(fig: Figure, axes: Sequence[Axes], most: int = 4) -> None:
    """One legend above, each label once."""
    handles: dict[str, object] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    handles = dict(sorted(handles.items(), key=lambda item: item[0].startswith("paper")))  # the paper last
    columns = style.legend_columns(list(handles), fig.get_figwidth(), most)
    fig.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=columns, frameon=False)
