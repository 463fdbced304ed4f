"""A table drawn as a figure: rules above and below, no boxes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from matplotlib.figure import Figure

from figures import style

ROW_IN = 0.19


def drawn(
    head: Sequence[str],
    body: Sequence[Sequence[str]],
    bold: Collection[tuple[int, int]] = (),
    *,
    left: int = 1,
) -> Figure:
    """head and body as text; bold: (line, column); the first `left` columns are left-aligned, repeated cells of the
    first one are shown once."""
    lines = len(body) + 1
    fig = Figure(figsize=(style.TEXT_WIDTH_IN, 0.55 + ROW_IN * lines), layout="constrained")
    axis = fig.subplots()
    axis.set_axis_off()
    widths = [max(len(str(row[c])) for row in [head, *body]) + 2.2 for c in range(len(head))]
    total = sum(widths)
    starts = [sum(widths[:c]) / total for c in range(len(head))]
    for number, row in enumerate([head, *body]):
        for column, cell in enumerate(row):
            if number > 1 and column == 0 and cell == body[number - 2][0]:
                continue
            to_left = column < left
            x = starts[column] if to_left else starts[column] + (widths[column] - 1) / total
            weight = "bold" if number == 0 or (number - 1, column) in bold else "normal"
            y = 1 - (number + 0.5) / lines
            axis.text(x, y, cell, ha="left" if to_left else "right", va="center", fontsize=7, fontweight=weight)
    for y, width in ((1.0, 1.0), (1 - 1 / lines, 0.6), (0.0, 1.0)):
        axis.plot([0, 1], [y, y], color="black", lw=width, clip_on=False)
    changes = [n for n in range(1, len(body)) if body[n][0] != body[n - 1][0]]
    for change in changes:
        y = 1 - (change + 1) / lines
        axis.plot([0, 1], [y, y], color="#888888", lw=0.5)
    axis.set_xlim(0, 1)
    axis.set_ylim(0, 1)
    return fig
