"""Curves of several systems against one axis, one panel per model: figures 15, memory and prefix."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from figures import stats, style
from figures.scale import ceiling, shown

FAR = 30
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")


def grid(
    rows: pd.DataFrame,
    axis_column: str,
    metrics: dict[str, str],
    label: str,
    scale: str = "category",
    mark: Callable[[Axes, pd.DataFrame, str], None] | None = None,
    cut: bool = False,
) -> Figure:
    """One row of panels per metric (column -> axis label), one column per (model, memory). scale: "category" spaces the
    values evenly, "linear" as numbers. mark(axis, panel, metric) adds to a panel. cut: of `curves`."""
    memory = "memory" if axis_column != "budget_bytes" else None
    panels = _panels(rows, memory)
    width = min(style.TEXT_WIDTH_IN, 1.2 + 2.6 * len(panels))
    systems = style.systems(rows)
    lines = -(-len(systems) // style.legend_columns([s.label for s in systems], width))
    fig = Figure(figsize=(width, 0.8 + 0.16 * lines + 1.9 * len(metrics)), layout="constrained")
    axes = fig.subplots(len(metrics), len(panels), squeeze=False, sharex="col")
    for column, (title, panel) in enumerate(panels):
        for line, (metric, name) in enumerate(metrics.items()):
            axis = axes[line][column]
            curves(axis, panel, axis_column, metric, systems, scale, cut)
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
    cut: bool = False,
) -> None:
    """The average over datasets of each system, with its standard error; logarithmic where the largest is more than
    FAR times the least. cut: instead, systems far above the others (scale.ceiling) are left to their values at the
    top."""
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
            stats.whiskers(own["error"]),
            color=system.colour,
            marker=MARKERS[number % len(MARKERS)],
            ms=3.8,
            lw=1.4,
            ls="--" if system.hatch else "-",
            capsize=2,
            label=system.label,
        )
    if cut and len(table):
        top = ceiling(table.set_index(["system", column]))
        axis.set_ylim(0, top)
        axis.margins(x=0.1)  # room for values at both ends
        _beyond(axis, table[table["mean"] > top], column, place, {s.system: s.colour for s in systems}, top)
    elif len(table) and table["mean"].max() > FAR * table["mean"].min() > 0:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
    else:
        axis.set_ylim(bottom=0)
    axis.set_xticks([place[v] for v in values], [f"{v:g}" for v in values])


def _beyond(
    axis: Axes, far: pd.DataFrame, column: str, place: dict[float, float], colours: dict[str, str], top: float
) -> None:
    far = far.sort_values("mean")
    for number, point in zip(far.groupby(column).cumcount(), far.itertuples(), strict=True):
        axis.annotate(
            f"{shown(point.mean)}\u2191",
            (place[getattr(point, column)], top),
            xytext=(0, -1 - 7 * number),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=6.5,
            color=colours[point.system],
        )


def legend(fig: Figure, axes: Sequence[Axes], most: int = 4) -> None:
    """One legend above, each label once."""
    handles: dict[str, object] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    handles = dict(sorted(handles.items(), key=lambda item: item[0].startswith("paper")))  # the paper last
    columns = style.legend_columns(list(handles), fig.get_figwidth(), most)
    fig.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=columns, frameon=False)
