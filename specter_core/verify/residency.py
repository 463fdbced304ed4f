"""Verification Expert Cache Residency Manager: one layer's op list (paper, "rolling load-compute"; DESIGN
4, "Verification").
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specter_core.memory.eviction import EvictionPolicy, count_then_recency
from specter_core.memory.expert_cache import CacheView, SlotState
from specter_core.types import ExpertKey
from specter_core.verify.ops import Copy, Gemm, Op, Release, Source, WaitSlotFree

LOOKAHEAD_COPIES = 2


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Op list of one layer pass. hits, late, misses: the needed experts by what they were when the router
    spoke, ascending.

    protects: slots of needed experts that are resident or loading; the executor protects them before the
    first op. Each needed expert has exactly one Gemm, followed by its Release.
    """

    layer: int
    ops: tuple[Op, ...]
    protects: tuple[int, ...]
    hits: tuple[int, ...]
    late: tuple[int, ...]
    misses: tuple[int, ...]


class ResidencyManager:
    """Plans layers; changes nothing (the executor does, op by op).

    hit_first: compute resident experts before those that are still to arrive; otherwise in ascending id.
    policy says what is worth keeping. lookahead: copies that should be under way or waiting for compute
    before a valuable expert's slot is given up for the next one; 2 keeps the link busy while one arrival is
    computed.
    """

    def __init__(
        self,
        cache: CacheView,
        *,
        hit_first: bool = True,
        policy: EvictionPolicy = count_then_recency,
        lookahead: int = LOOKAHEAD_COPIES,
    ) -> None:
        assert lookahead >= 1, lookahead
        self._cache = cache
        self._hit_first = hit_first
        self._policy = policy
        self._lookahead = lookahead

    def plan_layer(
        self,
        layer: int,
        needed: Sequence[int],
        counts: Mapping[int, int] | None = None,
        late: Sequence[int] = (),
    ) -> LayerPlan:
        """Plan the pass of `layer` over its `needed` experts (distinct, ascending).

        counts: rows routed to each (default 1). late: experts whose load was queued or issued when the
        router spoke, in order of arrival (`Prefetcher.before_layer`). The result depends on these and the
        cache's state alone, never on a clock. For token-wise order call it once per token, each time after
        the last plan has run.
        """
        assert list(needed) == sorted(set(needed)), f"needed experts must be distinct and ascending: {needed}"
        rows = {expert: 1 if counts is None else counts[expert] for expert in needed}
        return _LayerPass(
            self._cache, layer, rows, late, self._policy, self._hit_first, self._lookahead
        ).plan()


@dataclass(slots=True)
class _Slot:
    """A slot as the plan sees it at one point of the list."""

    slot: int
    staging: bool
    expert: int | None
    value: tuple[int, ...]
    available: bool  # may be overwritten now: empty, not needed, or released
    arriving: bool = False  # an unneeded load is moving into it

    @property
    def rank(self) -> tuple[bool, tuple[int, ...], int]:
        """Empty slots first, then the least valuable content."""
        return (self.expert is not None, self.value, self.slot)


class _LayerPass:
    """Walks through one layer in the order of computation and gives each missing expert a slot as early as
    is wise.
    """

    def __init__(
        self,
        cache: CacheView,
        layer: int,
        rows: Mapping[int, int],
        late: Sequence[int],
        policy: EvictionPolicy,
        hit_first: bool,
        lookahead: int,
    ) -> None:
        self._layer = layer
        self._lookahead = lookahead
        self._late = set(late)
        self._ops: list[Op] = []
        self._slot_of: dict[int, _Slot] = {}  # needed experts that are resident, loading or being copied
        self._source: dict[int, Source] = {}
        self._classify(cache, rows, late)
        self._order = self._compute_order(cache, rows, policy, hit_first)
        self._value = {e: policy(rows[e], cache.clock + 1 + i) for i, e in enumerate(self._order)}
        self._slots = self._survey(cache, policy)
        self._keep = self._worth_keeping(len(cache.layer_slots(layer)))
        self._pending = [e for e in self._order if e not in self._slot_of]
        self._outstanding = sum(self._source[e] is Source.LATE for e in self._slot_of)

    def plan(self) -> LayerPlan:
        for expert in self._order:
            self._place_pending(next_is_hit=self._is_hit(expert))
            if expert not in self._slot_of:
                self._make_room_for(expert)
            self._compute(expert)
        return LayerPlan(
            layer=self._layer,
            ops=tuple(self._ops),
            protects=tuple(self._protects),
            hits=tuple(sorted(self._hits)),
            late=tuple(sorted(self._lates)),
            misses=tuple(sorted(self._misses)),
        )

    def _classify(self, cache: CacheView, rows: Mapping[int, int], late: Sequence[int]) -> None:
        self._hits: list[int] = []
        self._misses: list[int] = []
        self._loading: list[int] = []
        self._found: dict[int, int] = {}  # needed expert -> slot
        for expert in rows:
            slot = cache.lookup(ExpertKey(self._layer, expert))
            if slot is None:
                self._misses.append(expert)
                continue
            self._found[expert] = slot
            (self._loading if cache.state(slot) is SlotState.LOADING else self._hits).append(expert)
        arrival = {expert: i for i, expert in enumerate(late)}
        self._loading.sort(key=lambda e: (arrival.get(e, len(arrival)), self._found[e]))
        requeued = [e for e in self._misses if e in self._late]
        self._absent = list(self._misses)
        self._misses = [e for e in self._misses if e not in self._late]
        self._lates = self._loading + requeued
        for expert in self._hits:
            self._source[expert] = Source.HIT
        for expert in self._lates:
            self._source[expert] = Source.LATE
        for expert in self._misses:
            self._source[expert] = Source.MISS

    def _compute_order(
        self, cache: CacheView, rows: Mapping[int, int], policy: EvictionPolicy, hit_first: bool
    ) -> list[int]:
        """Hits, then loads under way as they arrive, then copies; the least valuable first, for their slots
        are reused.
        """
        if not hit_first:
            return sorted(rows)
        hits = sorted(self._hits, key=lambda e: (policy(rows[e], cache.recency(self._found[e])), e))
        absent = sorted(self._absent, key=lambda e: (policy(rows[e], 0), e))
        return hits + self._loading + absent

    def _survey(self, cache: CacheView, policy: EvictionPolicy) -> list[_Slot]:
        layer_slots, staging_slots = cache.layer_slots(self._layer), cache.staging_slots
        slots = []
        self._protects: list[int] = []
        for number in [*layer_slots, *staging_slots]:
            key, state = cache.key(number), cache.state(number)
            needed = key is not None and key.layer == self._layer and key.expert in self._found
            expert = None if key is None or key.layer != self._layer else key.expert
            slot = _Slot(number, number in staging_slots, expert, (), available=not needed)
            if needed and expert is not None:
                slot.value = self._value[expert]
                self._slot_of[expert] = slot
                self._protects.append(number)
            elif key is not None:
                assert state is not SlotState.PROTECTED, f"slot {number} is protected by someone else"
                slot.value = policy(0, cache.recency(number))
                slot.arriving = state is SlotState.LOADING
                slot.available = not slot.arriving
            slots.append(slot)
        return slots

    def _worth_keeping(self, slots: int) -> set[int]:
        """The experts that the layer's own slots should hold afterwards."""
        idle = {s.expert: s.value for s in self._slots if s.expert is not None and not s.staging}
        worth = {**idle, **self._value}
        return set(sorted(worth, key=lambda e: worth[e], reverse=True)[:slots])

    def _is_hit(self, expert: int) -> bool:
        return expert in self._slot_of and self._source[expert] is Source.HIT

    def _place_pending(self, next_is_hit: bool) -> None:
        while self._pending:
            slot = self._choose(self._pending[0], next_is_hit)
            if slot is None:
                return
            self._copy(self._pending.pop(0), slot)

    def _choose(self, expert: int, next_is_hit: bool) -> _Slot | None:
        """Slot for a missing expert now, or None when it is better to wait for a Release."""
        own = [s for s in self._slots if not s.staging]
        staging = [s for s in self._slots if s.staging and s.available]
        spare = [s for s in own if s.available and s.expert not in self._keep]
        if expert not in self._keep and staging:
            return staging[0]
        if spare:
            return min(spare, key=lambda s: s.rank)
        if self._outstanding >= self._lookahead:
            return None
        awaited = [s for s in own if not s.available and s.expert not in self._keep]
        if awaited and next_is_hit:
            return None  # a slot that nobody will miss is free after the hits
        if staging:
            return staging[0]
        arriving = [s for s in own if s.arriving]
        if arriving:
            return min(arriving, key=lambda s: s.rank)
        return min((s for s in own if s.available), key=lambda s: s.rank, default=None)

    def _make_room_for(self, expert: int) -> None:
        """Its turn has come and every slot waits for a higher id (only without hit_first): that one is
        loaded again later.
        """
        assert self._pending[0] == expert, (expert, self._pending)
        free = [s for s in self._slots if s.available or s.arriving]
        slot = min(free, key=lambda s: s.rank, default=None)
        if slot is None:
            slot = max((s for s in self._slots if s.expert in self._slot_of), key=lambda s: s.expert or 0)
            assert slot.expert is not None and slot.expert > expert, (expert, slot)
            self._give_up(slot.expert, slot)
        self._copy(self._pending.pop(0), slot)

    def _give_up(self, expert: int, slot: _Slot) -> None:
        del self._slot_of[expert]
        if slot.slot in self._protects:
            self._protects.remove(slot.slot)
        self._outstanding -= self._source[expert] is not Source.HIT
        self._source[expert] = Source.MISS
        insort(self._pending, expert)

    def _copy(self, expert: int, slot: _Slot) -> None:
        self._ops.append(WaitSlotFree(slot.slot))
        self._ops.append(Copy(ExpertKey(self._layer, expert), slot.slot))
        slot.expert, slot.value = expert, self._value[expert]
        slot.available = slot.arriving = False
        self._slot_of[expert] = slot
        self._outstanding += 1

    def _compute(self, expert: int) -> None:
        slot, source = self._slot_of[expert], self._source[expert]
        self._ops.append(Gemm(ExpertKey(self._layer, expert), slot.slot, source))
        self._ops.append(Release(slot.slot))
        slot.available = True
        self._outstanding -= source is not Source.HIT
        if slot.staging:
            slot.expert, slot.value = None, ()
