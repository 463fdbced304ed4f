"""Prefetching by the draft's routing frequencies, at fixed fractions of the draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from specter_core.memory.eviction import lru
from specter_core.memory.expert_cache import CacheView
from specter_core.prefetch.planner import Phase, PrefetchPlan, PrefetchPlanner, Timings
from specter_core.types import ExpertKey

FRACTIONS = (0.2, 0.6)


class FrequencyPrefetch:
    """`Planner` that reads the draft's routing counts after 0.2 K and 0.6 K tokens and loads each layer's M most
    frequent experts, over its least recently used ones. Nothing adapts to compute or transfer time.
    """

    def __init__(self, fractions: Sequence[float] = FRACTIONS) -> None:
        self._fractions = tuple(fractions)
        self._top = PrefetchPlanner(1, policy=lru)
        self._stops: list[int] = []
        self.depth = 0

    def begin_window(self, depth: int) -> int:
        """Returns the first stop; K itself (where nothing is planned) when K is too small for one."""
        self.depth = depth
        self._top.begin_window(depth)
        self._stops = stops(depth, self._fractions)
        return self._stops[0] if self._stops else depth

    def plan(
        self, counters: Tensor, cache: CacheView, queued: Sequence[ExpertKey], timings: Timings, drafted: int
    ) -> PrefetchPlan:
        """The loads of the stop that was reached; after the last one comes Final Cleanup."""
        plan = self._top.plan(counters, cache, queued, timings, drafted)
        self._stops.pop(0)
        if self._stops:
            return replace(plan, next_boundary=self._stops[0], phase=Phase.PREFETCH_OVERLAP)
        return replace(plan, next_boundary=self.depth, phase=Phase.FINAL_CLEANUP)


def stops(depth: int, fractions: Sequence[float] = FRACTIONS) -> list[int]:
    """Draft tokens after which the counts are read: fraction · K, rounded, at least 1 and below K; distinct."""
    return sorted({t for f in fractions if 1 <= (t := max(1, round(f * depth))) < depth})
