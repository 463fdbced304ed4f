"""TPOT of every system against the memory budget (beyond the paper).

python -m figures.memory --records outputs/memory-run/records.csv --out outputs/memory-run/figures
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from figures import lines, style, sweeps

NAME = "memory"
FREE = ("memory", "budget_bytes")


def figure(rows: pd.DataFrame) -> Figure:
    """rows: records of systems at two or more budgets; budgets in GB (1e9), below 0.1 GB in MB."""
    with style.look():
        rows = sweeps.budgets(rows)
        unit, size = ("GB", 1e9) if rows["budget_bytes"].max() >= 1e8 else ("MB", 1e6)
        scaled = rows.assign(budget_bytes=rows["budget_bytes"] / size)
        fig = lines.grid(scaled, "budget_bytes", {"tpot_ms": "TPOT (ms)"}, f"device memory budget ({unit})", "linear")
        style.finish(fig, rows)
        return fig


if __name__ == "__main__":
    from figures.io import main

    main(figure, NAME, free=FREE)
