"""Requests whose TPOT stands apart. They are counted, never dropped."""

from __future__ import annotations

import numpy as np
import pandas as pd

CELL = ["system", "variant", "K"]
PROMPT = ["dataset", "prompt_id"]
LIMIT, LEAST = 3.5, 10
MAD_TO_SIGMA = 0.6745
FLOOR = 0.01
"""A spread of log TPOT below 1 % is noise of the clock; nothing stands apart from it."""


def flags(rows: pd.DataFrame) -> pd.Series:
    """One bool per row (index of rows), False where there is no time. rows: of one setting. Modified z-score above 3.5
    (Iglewicz and Hoaglin, 1993) of log TPOT within (system, variant, K): of its distance from the prompt's median where
    prompts have three repeats or more, else from the cell's median. False in cells of fewer than ten requests."""
    flagged = pd.Series(False, index=rows.index)
    ok = rows[(rows["status"] == "ok") & rows["tpot_ms"].gt(0)]
    for _, cell in ok.groupby(CELL, dropna=False):
        if len(cell) < LEAST:
            continue
        logs = pd.Series(np.log(cell["tpot_ms"].to_numpy(dtype=float)), index=cell.index)
        by_prompt = logs.groupby([cell[c] for c in PROMPT])
        repeated = by_prompt.size().min() >= 3
        away = logs - (by_prompt.transform("median") if repeated else logs.median())
        spread = max(float(away.abs().median()), FLOOR)
        flagged[cell.index] = (MAD_TO_SIGMA * away.abs() / spread) > LIMIT
    return flagged
