"""The paper's own numbers (paper_reference.csv: those that its text states, and no others)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pandas as pd

PATH = Path(__file__).with_name("paper_reference.csv")
FAMILY = {
    "deepseek_v2_lite": "deepseek_v2_lite",
    "qwen15_moe": "qwen15_moe",
    "phi35_moe": "phi35_moe",
}


@cache
def numbers() -> pd.DataFrame:
    """Columns id, figure, model, memory, system, label, B, metric, value, unit, statement. Empty cells: not about
    one model (memory, …)."""
    return pd.read_csv(PATH, keep_default_na=False, dtype={"value": float})


def value(metric: str, **where: object) -> float | None:
    """The one number that meets all conditions, else None."""
    table = numbers()
    table = table[table["metric"] == metric]
    for column, wanted in where.items():
        table = table[table[column] == str(wanted)]
    return float(table["value"].iloc[0]) if len(table) == 1 else None
