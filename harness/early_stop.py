"""When more repeats of a cell would tell nothing new: `stop_early=true`."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

import numpy as np
from scipy.stats import t

LEAST_REPEATS = 3
WIDTH = 0.05
CONFIDENCE = 0.95


def settled(rows: Iterable[Mapping[str, str]], hashes: Collection[str]) -> bool:
    """Whether the cell of these config hashes has its mean TPOT: the 95 % interval (Student's t over the means of its
    repeats, of which there are three or more) is narrower than 5 % of it. rows: of records.csv, as text. A repeat with
    a failed request, or with other prompts than the first one, settles nothing."""
    repeats: dict[int, dict[tuple[str, str], float]] = {}
    for row in rows:
        if row["config_hash"] in hashes:
            if row["status"] != "ok" or not row["tpot_ms"]:
                return False
            repeats.setdefault(int(row["repeat"]), {})[row["config_hash"], row["prompt_id"]] = float(row["tpot_ms"])
    if len(repeats) < LEAST_REPEATS or len({frozenset(r) for r in repeats.values()}) > 1:
        return False
    return width([float(np.mean(list(r.values()))) for r in repeats.values()]) < WIDTH


def width(means: Collection[float]) -> float:
    """Width of the 95 % interval of the mean over the mean."""
    values = np.asarray(list(means))
    half = t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    return float(2 * half / values.mean())
