"""Figure 8: iterations of the State Manager, drawn from a trace.

python -m figures.fig08_iteration --traces outputs/traces --out outputs/figures
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from figures import style, traces

NAME = "fig08_iteration"
SHOWN = 3


def figure(table: pd.DataFrame) -> Figure:
    """table: traces.events of a run. Three successive windows: K draft steps, one verification pass, what the window
    accepted and committed (otherData["windows"]), and the committed length, the KV boundary, that it ends with."""
    with style.look():
        return _draw(table)


def _draw(table: pd.DataFrame) -> Figure:
    found = traces.windows(table)
    first = max(0, min(traces.full_window(table) - 1, len(found) - SHOWN))
    shown = found.iloc[first : first + SHOWN]
    counts = table.attrs.get("windows", [])
    start, end = shown["start_ms"].iloc[0], shown["end_ms"].iloc[-1]
    own = traces.between(table, start, end)
    fig = Figure(figsize=(style.TEXT_WIDTH_IN, 2.5), layout="constrained")
    axis = fig.subplots()
    steps = traces.computed(own, "draft step")
    traces.bars(axis, steps, 2, traces.COLOURS["draft"])
    for step in steps.itertuples():
        if step.ms > 0.019 * (end - start):
            axis.text(
                step.start_ms + step.ms / 2, 2, f"$d_{{{int(step.token)}}}$", ha="center", va="center", fontsize=6
            )
    passes = own[own["name"] == "verify"]
    traces.bars(axis, passes, 1, traces.COLOURS["verify"])
    for verify in passes.itertuples():
        axis.text(
            verify.start_ms + verify.ms / 2,
            1,
            f"{int(verify.rows)} inputs",
            ha="center",
            va="center",
            fontsize=6.5,
            color="white",
        )
    before = table.attrs.get("committed_before", 1)  # prefill commits the first token
    committed = before + sum(w["committed"] for w in counts[:first])
    for number, window in zip(range(first, first + SHOWN), shown.itertuples(), strict=False):
        axis.axvline(window.end_ms - start, color="black", lw=0.9)
        if number < len(counts):
            c = counts[number]
            committed += c["committed"]
            kind = "bonus" if c["accepted"] == c["drafted"] else "corrected"
            text = f"accepts {c['accepted']} of {c['drafted']}\n+ 1 {kind} token\n{committed} tokens committed"
            axis.text((window.start_ms + window.end_ms) / 2 - start, 0, text, ha="center", va="center", fontsize=6.5)
    axis.set_yticks([2, 1, 0], ["draft", "verify", "commit"])
    axis.set_ylim(-0.6, 2.6)
    axis.set_xlim(0, (end - start) * 1.005)
    axis.set_xlabel("time (ms)")
    axis.grid(visible=False)
    fig.legend(
        [Rectangle((0, 0), 1, 1, fc=traces.COLOURS["draft"]), Rectangle((0, 0), 1, 1, fc=traces.COLOURS["verify"])],
        ["draft step (INT4 experts)", "target verification, one causal pass"],
        loc="outside upper center",
        ncols=2,
        frameon=False,
        handlelength=1.2,
    )
    last = traces.numbered(table, first + len(shown) - 1)
    which = f"windows {traces.numbered(table, first)} to {last}; tokens counted from the first generated one"
    style.stamp(fig, traces.caption(table, which), traces.on_cpu(table))
    return fig


if __name__ == "__main__":
    raise SystemExit(traces.main(figure, NAME))
