"""Figure 9: one window's compute and link, with the planner's three phases, drawn from a trace.

python -m figures.fig09_timeline --traces outputs/traces --out outputs/figures
"""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from figures import style, traces

NAME = "fig09_timeline"
PHASES = {"Cold Start": "#eeeeee", "Prefetch Overlap": "#dfeef8", "Final Cleanup": "#fdf1d9"}


class PhaseSpan(NamedTuple):
    """A phase of drafting; times in ms within the window."""

    phase: str
    start_ms: float
    end_ms: float


def phases(own: pd.DataFrame, draft_end_ms: float) -> list[PhaseSpan]:
    """Cold Start ends with the first plan. A chunk that ends with a further plan while drafting goes on is Prefetch
    Overlap, since Final Cleanup takes no snapshot before its last token; what follows the last such plan is Final
    Cleanup. own: events of the window."""
    plans = own[own["name"] == "plan"]
    during = [p.start_ms for p in plans.itertuples() if p.start_ms < draft_end_ms]
    if not during:
        return [PhaseSpan("Cold Start", 0.0, draft_end_ms)]
    spans = [PhaseSpan("Cold Start", 0.0, during[0])]
    if len(during) > 1:
        spans.append(PhaseSpan("Prefetch Overlap", during[0], during[-1]))
    return [*spans, PhaseSpan("Final Cleanup", during[-1], draft_end_ms)]


def figure(table: pd.DataFrame) -> Figure:
    """table: traces.events. The window of median length: draft steps, plans, verification's layers and their waiting on
    the compute side; every transfer, predicted or demanded, on the link."""
    with style.look():
        return _draw(table)


def _draw(table: pd.DataFrame) -> Figure:
    number = traces.full_window(table)
    window = traces.windows(table).iloc[number]
    length = window["end_ms"] - window["start_ms"]
    own = traces.between(table, window["start_ms"], window["end_ms"])
    draft_end = window["draft_end_ms"] - window["start_ms"]
    fig = Figure(figsize=(style.TEXT_WIDTH_IN, 2.6), layout="constrained")
    axis = fig.subplots()
    _bands(axis, phases(own, draft_end), window["verify_ms"] - window["start_ms"], length)
    kinds = {"draft step": "draft", "attention": "attention", "experts": "verify", "stall": "stall"}
    for kind, colour in kinds.items():
        traces.bars(axis, traces.computed(own, kind), 2, traces.COLOURS[colour])
    for plan in own[own["name"] == "plan"].itertuples():
        axis.plot([plan.start_ms] * 2, [0.5, 2.45], color="black", lw=1)
    link = own[own["track"] == "link"]
    for line, priority in ((1, "prefetch"), (1, "demand")):
        traces.bars(axis, link[link["priority"] == priority], line, traces.COLOURS[priority])
    axis.set_yticks([2, 1], ["compute", "link (H2D)"])
    axis.set_ylim(0.45, 2.95)
    axis.set_xlim(0, length)
    axis.set_xlabel("time within the window (ms)")
    axis.grid(visible=False)
    _legend(fig, stalls=len(traces.computed(own, "stall")) > 0)
    style.stamp(fig, traces.caption(table, f"window {traces.numbered(table, number)}"), traces.on_cpu(table))
    return fig


def _bands(axis: Axes, spans: list[PhaseSpan], verify_ms: float, length: float) -> None:
    for span in [*spans, PhaseSpan("Verification", verify_ms, length)]:
        colour = PHASES.get(span.phase, "white")
        axis.axvspan(span.start_ms, span.end_ms, color=colour, zorder=0)
        if span.end_ms - span.start_ms > 0.07 * length:
            name = span.phase.replace(" ", "\n") if span.end_ms - span.start_ms < 0.14 * length else span.phase
            axis.text((span.start_ms + span.end_ms) / 2, 2.66, name, ha="center", va="center", fontsize=6.8)


def _legend(fig: Figure, stalls: bool) -> None:
    marks = {
        "draft step": traces.COLOURS["draft"],
        "plan (boundary)": traces.COLOURS["plan"],
        "attention and router": traces.COLOURS["attention"],
        "experts of a layer": traces.COLOURS["verify"],
        "predicted load": traces.COLOURS["prefetch"],
        "demanded load": traces.COLOURS["demand"],
    }
    if stalls:
        marks["waiting for an expert"] = traces.COLOURS["stall"]
    handles = [Rectangle((0, 0), 1, 1, fc=c) for c in marks.values()]
    columns = 6 if len(marks) == 6 else 4
    fig.legend(
        handles, list(marks), loc="outside upper center", ncols=columns, frameon=False, handlelength=1.1, fontsize=7
    )


if __name__ == "__main__":
    raise SystemExit(traces.main(figure, NAME))
