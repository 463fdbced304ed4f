"""Which slot content goes first. A policy maps an expert's (count, recency) to a value; the lowest value is
the victim.
"""

from __future__ import annotations

from collections.abc import Callable

EvictionPolicy = Callable[[int, int], tuple[int, ...]]


def lru(count: int, recency: int) -> tuple[int, ...]:
    """Least recently used first; counts are ignored (the paper's variant, per layer)."""
    del count
    return (recency,)


def count_then_recency(count: int, recency: int) -> tuple[int, ...]:
    """Fewest routed rows of this window first, then least recently used."""
    return (count, recency)


POLICIES: dict[str, EvictionPolicy] = {"lru": lru, "count_then_recency": count_then_recency}
