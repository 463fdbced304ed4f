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
    deep = max(cell.count("\n") for cell in head)  # extra lines of the head
    lines = len(body) + 1 + deep
    fig = Figure(figsize=(style.TEXT_WIDTH_IN, 0.55 + ROW_IN * lines), layout="constrained")
    axis = fig.subplots()
    axis.set_axis_off()
    widths = [
        max(len(part) for row in [head, *body] for part in str(row[c]).split("\n")) + 2.5 for c in range(len(head))
    ]
    total = sum(widths)
    starts = [sum(widths[:c]) / total for c in range(len(head))]
    for number, row in enumerate([head, *body]):
        for column, cell in enumerate(row):
            if number > 1 and column == 0 and cell == body[number - 2][0]:
                continue
            to_left = column < left
            x = starts[column] if to_left else starts[column] + (widths[column] - 1) / total
            weight = "bold" if number == 0 or (number - 1, column) in bold else "normal"
            y = 1 - (number + 0.5 + (deep if number else deep / 2)) / lines
            axis.text(x, y, cell, ha="left" if to_left else "right", va="center", fontsize=7, fontweight=weight)
    for y, width in ((1.0, 1.0), (1 - (1 + deep) / lines, 0.6), (0.0, 1.0)):
        axis.plot([0, 1], [y, y], color="black", lw=width, clip_on=False)
    names = [row[0] for row in body]
    groups = len(set(names)) < len(names)  # rules only between groups of lines
    changes = [n for n in range(1, len(body)) if groups and names[n] != names[n - 1]]
    for change in changes:
        y = 1 - (change + 1 + deep) / lines
        axis.plot([0, 1], [y, y], color="#888888", lw=0.5)
    axis.set_xlim(0, 1)
    axis.set_ylim(0, 1)
    return fig
