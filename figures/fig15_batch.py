"""Figure 15: TPOT and aggregate throughput against the batch size B, mean of the datasets.

python -m figures.fig15_batch --records outputs/batch-run/records.csv --out outputs/batch-run/figures
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from figures import lines, style, sweeps

NAME = "fig15_batch"
FREE = ("B",)
METRICS = {"tpot_ms": "TPOT (ms)", "throughput": "throughput (tokens/s)"}


def figure(rows: pd.DataFrame) -> Figure:
    """rows: records of several systems at several B. Each point is the average over datasets with its standard
    error."""
    with style.look():
        rows = sweeps.batch(rows)
        fig = lines.grid(rows, "B", METRICS, "batch size B (requests)")
        style.finish(fig, rows)
        return fig


if __name__ == "__main__":
    from figures.io import main

    main(figure, NAME, free=FREE)
