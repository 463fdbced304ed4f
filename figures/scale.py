"""Where an axis of times ends, and how its numbers are written."""

from __future__ import annotations

import pandas as pd


def ceiling(table: pd.DataFrame) -> float:
    """Top of the axis in ms. Systems (at most half of them) whose bars all exceed three times everyone else's are cut
    off, their values are written into their bars, so that the others can be told apart."""
    tallest = (table["mean"] + table["error"].fillna(0)).groupby("system").max().sort_values()
    if tallest.empty:
        return 1.0
    shortest = table["mean"].groupby("system").min()[tallest.index]
    for kept in range((len(tallest) + 1) // 2, len(tallest)):
        below = tallest.iloc[kept - 1]
        if shortest.iloc[kept:].min() > 3 * below:
            return float(1.5 * below * 1.2)
    return float(tallest.iloc[-1] * 1.2)


def shown(value: float) -> str:
    """Three digits, zeros among them, and no exponent."""
    return f"{value:#.3g}".rstrip(".") if value < 999.5 else f"{value:.0f}"
