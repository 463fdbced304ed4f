"""Figure 12: token-wise against cache-aware expert-wise verification of one MoE layer, drawn from two traces.

python -m figures.fig12_verification --traces outputs/traces --out outputs/figures
"""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from figures import style, traces

NAME = "fig12_verification"
ORDERS = ("expertwise", "tokenwise")


def figure(expertwise: pd.DataFrame, tokenwise: pd.DataFrame) -> Figure:
    """traces.events of the same request verified in both orders. Above, the same layer of the same window: each box on
    the compute line is one call of the experts (a token's, or the whole window's), below it the loads. Titles give the
    layer's time and loads, and those of whole passes: medians over the windows."""
    with style.look():
        return _draw({"tokenwise": tokenwise, "expertwise": expertwise})


def layer_events(table: pd.DataFrame, window: int, layer: int) -> pd.DataFrame:
    """Expert calls, waiting (which a GPU's trace shows apart) and loads of a layer in a window's verification, times
    from the layer's first call."""
    found = traces.windows(table).iloc[window]
    own = table[(table["start_ms"] >= found["verify_ms"]) & (table["start_ms"] < found["end_ms"])]
    compute = own[own["track"] == "compute"]
    calls = compute[compute["name"].isin([f"experts {layer}", f"stall {layer}"])].sort_values("start_ms")
    start, end = calls["start_ms"].iloc[0], (calls["start_ms"] + calls["ms"]).max()
    loads = own[(own["track"] == "link") & (own["start_ms"] + own["ms"] > start) & (own["start_ms"] < end)]
    both = pd.concat([calls, loads[loads["layer"] == layer]])
    return both.assign(start_ms=both["start_ms"] - start)


def pass_ms(table: pd.DataFrame) -> float:
    """Median time of a verification pass of full depth, in ms."""
    found = traces.windows(table)
    full = found[found["steps"] == found["steps"].max()]
    return float((full["end_ms"] - full["verify_ms"]).median())


def _draw(tables: dict[str, pd.DataFrame]) -> Figure:
    window = traces.full_window(tables["expertwise"])
    window = min(window, len(traces.windows(tables["tokenwise"])) - 1)
    layers = tables["expertwise"]["layer"].dropna().unique()
    layer = int(sorted(layers)[len(layers) // 2])
    fig = Figure(figsize=(style.TEXT_WIDTH_IN, 3.3), layout="constrained")
    axes = fig.subplots(2, 1, sharex=True)
    titles = {"tokenwise": "token-wise", "expertwise": "expert-wise, hits first (Specter)"}
    for axis, (order, table) in zip(axes, tables.items(), strict=True):
        _panel(axis, layer_events(table, window, layer), f"{titles[order]}", pass_ms(table))
    axes[-1].set_xlabel("time from the layer's first expert call (ms)")
    apart = any(len(traces.computed(table, "stall")) for table in tables.values())
    marks = {
        "expert computation" if apart else "expert computation and waiting": traces.COLOURS["verify"],
        "predicted load": traces.COLOURS["prefetch"],
        "demanded load": traces.COLOURS["demand"],
    }
    if apart:
        marks["waiting for an expert"] = traces.COLOURS["stall"]
    handles = [Rectangle((0, 0), 1, 1, fc=c) for c in marks.values()]
    fig.legend(handles, list(marks), loc="outside upper center", ncols=len(marks), frameon=False, handlelength=1.1)
    table = tables["expertwise"]
    which = f"window {traces.numbered(table, window)}, MoE layer {layer}; loads of other layers not shown"
    style.stamp(fig, traces.caption(table, which), traces.on_cpu(table))
    return fig


def _panel(axis: Axes, own: pd.DataFrame, title: str, whole_ms: float) -> None:
    calls, loads = own[own["track"] != "link"], own[own["track"] == "link"]
    waiting = calls["name"].str.startswith("stall")
    traces.bars(axis, calls[~waiting], 1, traces.COLOURS["verify"])
    traces.bars(axis, calls[waiting], 1, traces.COLOURS["stall"])
    for priority in ("prefetch", "demand"):
        traces.bars(axis, loads[loads["priority"] == priority], 0, traces.COLOURS[priority])
    layer_ms = (calls["start_ms"] + calls["ms"]).max()
    text = f"{title}: layer {layer_ms:.3g} ms, {len(loads)} loads; whole pass {whole_ms:.3g} ms (median)"
    axis.set_title(text, loc="left")
    axis.set_yticks([1, 0], ["compute", "link (H2D)"])
    axis.set_ylim(-0.5, 1.5)
    axis.grid(visible=False)
    axis.grid(visible=True, axis="x")
    axis.set_xlim(left=min(0.0, float(loads["start_ms"].min()) if len(loads) else 0.0))


if __name__ == "__main__":
    raise SystemExit(traces.main(figure, NAME, ORDERS))
