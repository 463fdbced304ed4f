"""The numbers that expressions of claims are made of."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from harness.claim_cells import Missing


def mean(values: Iterable[float]) -> float:
    return float(np.mean(_some(values)))


def largest(values: Iterable[float]) -> float:
    return max(_some(values))


def least(values: Iterable[float]) -> float:
    return min(_some(values))


def _some(values: Iterable[float]) -> list[float]:
    found = list(values)
    if not found:
        raise Missing("nothing measured that the statement speaks of")
    return found


def gmean(values: Iterable[float]) -> float:
    """Geometric mean."""
    return float(np.exp(mean(np.log(float(v)) for v in values)))


def expected(acceptance: float) -> float:
    """E[A] = a / (1 - a), the expected number of accepted draft tokens before the first rejection."""
    return acceptance / max(1 - acceptance, 1e-9)
