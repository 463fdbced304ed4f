"""Figure 14: TPOT of every system, per model, memory setting and dataset.

python -m figures.fig14_tpot --records outputs/main-run/records.csv --out outputs/main-run/figures
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from figures import paper, stats, style, sweeps
from figures.scale import ceiling, shown

NAME = "fig14_tpot"


def figure(rows: pd.DataFrame) -> Figure:
    """rows: records (status ok or not) with one workload. One panel per (memory, model); bars are the mean
    TPOT in ms over the prompts of a dataset, whiskers its standard error (none with one prompt); AVG is the mean of the
    datasets' means. Diamonds are the averages that the paper states; Specter's stands at the paper's switches where
    these were measured."""
    with style.look():
        return _draw(rows)


def _draw(rows: pd.DataFrame) -> Figure:
    rows = style.shown(rows[(rows["status"] == "ok") & rows["tpot_ms"].notna()])
    systems = style.systems(rows)
    labels = [x for x in style.LABELS if x in set(rows["label"]) or x == "AVG"]
    panels = [
        (memory, model, rows[(rows["memory"] == memory) & (rows["model"] == model)])
        for memory in style.memories(rows)
        for model in style.models(rows)
    ]
    panels = [panel for panel in panels if len(panel[2])]
    fig = Figure(figsize=(style.TEXT_WIDTH_IN, 1.0 + 1.75 * len(panels)), layout="constrained")
    axes = fig.subplots(len(panels), 1, squeeze=False)[:, 0]
    marked = False
    for axis, (memory, model, panel) in zip(axes, panels, strict=True):
        marked |= _panel(axis, panel, systems, labels)
        axis.set_title(f"{style.model_label(model)}, {memory} memory", loc="left")
    handles: list[Artist] = [Rectangle((0, 0), 1, 1, fc=s.colour, ec="white", hatch=s.hatch) for s in systems]
    names = [s.label for s in systems]
    if marked:
        handles.append(axes[0].scatter([], [], **style.PAPER))
        names.append(style.PAPER_LABEL)
    fig.legend(
        handles,
        names,
        loc="outside upper center",
        ncols=style.legend_columns(names, style.TEXT_WIDTH_IN, 4 if len(names) > 5 else len(names)),
        frameon=False,
        handlelength=1.2,
        handleheight=0.8,
    )
    style.finish(fig, rows)
    return fig


def _panel(axis: Axes, panel: pd.DataFrame, systems: list[style.SystemStyle], labels: list[str]) -> bool:
    """Returns whether the paper's averages were marked: it states them for this model and memory setting."""
    table = stats.means(panel, ["system"]).set_index(["system", "label"])
    width = 0.84 / max(1, len(systems))
    top = ceiling(table)
    marked = False
    axis.axvspan(len(labels) - 1.5, len(labels) - 0.5, color="#f2f2f2", zorder=0)
    for number, system in enumerate(systems):
        at = np.arange(len(labels)) + (number - (len(systems) - 1) / 2) * width
        own = np.array([table["mean"].get((system.system, x), np.nan) for x in labels], dtype=float)
        errors = np.array([table["error"].get((system.system, x), 0.0) for x in labels], dtype=float)
        axis.bar(at, own, width * 0.94, color=system.colour, edgecolor="white", linewidth=0.3, hatch=system.hatch)
        told = stats.whiskers(errors)
        axis.errorbar(at, own, yerr=told, fmt="none", ecolor="#222222", elinewidth=0.7, capsize=1.5)
        stated = _stated(panel, system.system)
        if stated is not None and stated <= top:
            axis.scatter([at[-1]], [stated], **style.PAPER)
            marked = True
        beyond = ""  # the paper's average in words, inside the system's own bar where that is cut off too
        if stated is not None and stated > top:
            beyond, stated, marked = f"\u25c7 {shown(stated)}\u2191", None, True
            if not own[-1] > top:
                _note(axis, at[-1], top * 0.985, beyond, "black", "top", rotation=90)
        for x, value, error in zip(at, own, np.nan_to_num(errors), strict=True):
            if value > top:
                told_here = f"{beyond}  " if beyond and x == at[-1] else ""
                _note(axis, x, top * 0.985, f"{told_here}{shown(value)}\u2191", "white", "top", rotation=90)
            elif x == at[-1] and np.isfinite(value):
                place, lift = value + error, 2
                if stated is not None and abs(stated - place) < 0.15 * top:  # above the diamond, not across it
                    place, lift = max(place, stated), 4
                _note(axis, x, place, shown(value), "black", "bottom", 90 * (len(systems) > 5), lift)
        if not np.isfinite(own).any():
            _note(axis, at[-1], 0, "n/a", system.colour, "bottom", rotation=90)
    axis.set_xlim(-0.5, len(labels) - 0.5)
    axis.set_xticks(range(len(labels)), labels)
    axis.tick_params(axis="x", length=0)
    axis.set_ylim(0, top)
    axis.set_ylabel("TPOT (ms)")
    return marked


def _stated(panel: pd.DataFrame, system: str) -> float | None:
    """The paper's average, None where it states none."""
    there = set(panel["system"])
    if sweeps.PAPER in there and system in (sweeps.MAIN, sweeps.PAPER):
        system = sweeps.MAIN if system == sweeps.PAPER else ""
    return paper.value("tpot_ms", model=panel["model"].iloc[0], memory=panel["memory"].iloc[0], system=system)


def _note(
    axis: Axes, x: float, y: float, text: str, colour: str, anchor: str, rotation: int = 0, lift: int = 1
) -> None:
    offset = {"xytext": (0, lift if anchor == "bottom" else -lift), "textcoords": "offset points"}
    axis.annotate(
        text,
        (x, y),
        ha="center",
        va=anchor,
        fontsize=5.8,
        rotation=rotation,
        color=colour,
        fontweight="bold" if colour == "white" else "normal",
        **offset,
    )


if __name__ == "__main__":
    from figures.io import main

    raise SystemExit(main(figure, NAME))
