"""TPOT and time to first token against the prefix length.

python -m figures.prefix --records outputs/prefix-run/records.csv --out outputs/prefix-run/figures
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from figures import lines, style, sweeps

NAME = "prefix"
FREE = ("prefix_len",)
METRICS = {"tpot_ms": "TPOT (ms)", "ttft_ms": "TTFT (ms)"}


def figure(rows: pd.DataFrame) -> Figure:
    """rows: records of systems at three or more prefix lengths."""
    with style.look():
        rows = sweeps.prefix(rows)
        fig = lines.grid(rows, "prefix_len", METRICS, "prefix (tokens)")
        style.finish(fig, rows)
        return fig


if __name__ == "__main__":
    from figures.io import main

    raise SystemExit(main(figure, NAME, free=FREE))
