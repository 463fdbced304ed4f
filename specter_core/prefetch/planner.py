"""Layer-Aware Prefetch Planner (paper, Fig. 9): counters in, ordered loads out. Host code."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from torch import Tensor

from specter_core.memory.eviction import EvictionPolicy, count_then_recency
from specter_core.memory.expert_cache import CacheView, SlotState
from specter_core.types import ExpertKey


class Phase(Enum):
    """COLD_START: one initial chunk, nothing submitted. PREFETCH_OVERLAP: adaptive chunks, a batch each.
    FINAL_CLEANUP:
    the last batch overlaps with the rest of drafting; no snapshot is taken any more."""

    COLD_START = "cold_start"
    PREFETCH_OVERLAP = "prefetch_overlap"
    FINAL_CLEANUP = "final_cleanup"


class Timings(NamedTuple):
    """Measured costs: one draft step, one expert over the link."""

    step_ms: float
    transfer_ms_per_expert: float


class PlannedLoad(NamedTuple):
    """Load `key` into `slot`; `victim` is the resident expert that goes (None: the slot is empty)."""

    key: ExpertKey
    slot: int
    victim: ExpertKey | None


@dataclass(frozen=True, slots=True)
class PrefetchPlan:
    """What replaces the not yet issued part of the last plan.

    loads: to be submitted, in layer order and inside a layer by (count desc, id asc). cancelled: queued
    loads to take back first (one that reappears in `loads` moves to another slot). kept: queued loads that
    stay as they are. order: kept and new ones together, as they should travel.
    """

    loads: tuple[PlannedLoad, ...]
    cancelled: tuple[ExpertKey, ...]
    kept: tuple[ExpertKey, ...]
    order: tuple[ExpertKey, ...]
    next_boundary: int
    phase: Phase


@dataclass(slots=True)
class _LayerPlan:
    loads: list[PlannedLoad] = field(default_factory=list)
    cancelled: list[ExpertKey] = field(default_factory=list)
    kept: list[ExpertKey] = field(default_factory=list)
    order: list[ExpertKey] = field(default_factory=list)
    remaining: int = 0


class Planner(Protocol):
    """When the ELB is read and what is then loaded; `PrefetchPlanner` is Specter's."""

    depth: int

    def begin_window(self, depth: int) -> int: ...
    def plan(
        self, counters: Tensor, cache: CacheView, queued: Sequence[ExpertKey], timings: Timings, drafted: int
    ) -> PrefetchPlan: ...


class PrefetchPlanner:
    """Plans from its arguments alone; the only thing it remembers is the window's depth. policy: which resident
    expert outside the plan goes first."""

    def __init__(self, initial_chunk_tokens: int, policy: EvictionPolicy = count_then_recency) -> None:
        assert initial_chunk_tokens >= 1, initial_chunk_tokens
        self._policy = policy
        self.initial_chunk_tokens = initial_chunk_tokens
        self.depth = 0

    def begin_window(self, depth: int) -> int:
        """Start a window of `depth` draft tokens (K ≥ 0); returns b_1, the end of the initial chunk."""
        assert depth >= 0, depth
        self.depth = depth
        return min(self.initial_chunk_tokens, depth)

    def plan(
        self,
        counters: Tensor,
        cache: CacheView,
        queued: Sequence[ExpertKey],
        timings: Timings,
        drafted: int,
    ) -> PrefetchPlan:
        """Plan at a boundary, `drafted` tokens into the window.

        counters: int32 [L, E] on the CPU. queued: loads of the last plan that were not issued yet. A slot
        that a queued load would fill counts as still holding its present expert.
        """
        assert counters.shape[0] == len(cache.slots_per_layer), (counters.shape, cache.slots_per_layer)
        pending = frozenset(queued)
        counts = enumerate(counters.tolist())
        layers = [_plan_layer(layer, row, cache, pending, self._policy) for layer, row in counts]
        order = tuple(key for plan in layers for key in plan.order)
        remaining = sum(plan.remaining for plan in layers)
        next_boundary = drafted + self._chunk_tokens(len(order), timings, drafted)
        final = len(order) >= remaining or next_boundary >= self.depth
        return PrefetchPlan(
            loads=tuple(load for plan in layers for load in plan.loads),
            cancelled=tuple(key for plan in layers for key in plan.cancelled),
            kept=tuple(key for plan in layers for key in plan.kept),
            order=order,
            next_boundary=self.depth if final else next_boundary,
            phase=Phase.FINAL_CLEANUP if final else Phase.PREFETCH_OVERLAP,
        )

    def _chunk_tokens(self, batch: int, timings: Timings, drafted: int) -> int:
        """Draft tokens whose computation takes as long as the transfer of `batch` experts; ≥ 1, ≤ what is
        left.
        """
        assert timings.step_ms > 0 and timings.transfer_ms_per_expert >= 0, timings
        matched = round(batch * timings.transfer_ms_per_expert / timings.step_ms)
        return min(max(1, matched), max(0, self.depth - drafted))


def top_experts(counts: Sequence[int], slots: int) -> list[int]:
    """The at most `slots` experts with the highest count > 0, ties to the lower id."""
    drafted = [expert for expert, count in enumerate(counts) if count > 0]
    return sorted(drafted, key=lambda expert: (-counts[expert], expert))[:slots]


def _plan_layer(
    layer: int, counts: list[int], cache: CacheView, queued: Collection[ExpertKey], policy: EvictionPolicy
) -> _LayerPlan:
    slots = cache.layer_slots(layer)
    ranking = top_experts(counts, len(slots))
    wanted = {ExpertKey(layer, expert) for expert in ranking}
    plan = _LayerPlan()
    held: set[ExpertKey] = set()  # wanted experts that are resident or issued
    free: list[int] = []
    victims: list[tuple[tuple[int, ...], int, ExpertKey]] = []  # (value, slot, expert)

    for slot in slots:
        content, recency = cache.key(slot), cache.recency(slot)
        evictable = cache.state(slot) is SlotState.RESIDENT
        if content is not None and content in queued:
            former = cache.previous(slot)
            restorable = former is not None and cache.lookup(former.key) is None
            if content in wanted and not (restorable and former is not None and former.key in wanted):
                plan.kept.append(content)
                continue
            plan.cancelled.append(content)
            content, recency = (former.key, former.recency) if restorable and former is not None else (None, 0)
            evictable = True
        if content is None:
            free.append(slot)
        elif content in wanted:
            held.add(content)
        elif evictable:
            victims.append((policy(counts[content.expert], recency), slot, content))

    plan.remaining = len(slots) - len(held)
    places = [(slot, None) for slot in free] + [(slot, key) for _, slot, key in sorted(victims)]
    kept = set(plan.kept)
    for expert in ranking:
        key = ExpertKey(layer, expert)
        if key in kept:
            plan.order.append(key)
        elif key not in held and places:
            slot, victim = places.pop(0)
            plan.loads.append(PlannedLoad(key, slot, victim))
            plan.order.append(key)
    return plan
