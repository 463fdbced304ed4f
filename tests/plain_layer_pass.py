"""`LayerPass` by definition: every slot is an object and every choice looks at all of them. Slow, and easy to check."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass

from specter_core.memory.expert_cache import CacheView, SlotState
from specter_core.types import ExpertKey
from specter_core.verify.layer_pass import Needs, Worth
from specter_core.verify.ops import Adopt, Copy, Gemm, Op, Release, Source, WaitSlotFree


@dataclass(slots=True)
class _Slot:
    """A slot as it is at one point of the op list."""

    slot: int
    staging: bool
    expert: int | None
    value: tuple[float, ...]
    available: bool  # may be overwritten now: empty, not needed, or released
    arriving: bool = False  # an unneeded load is moving into it

    @property
    def rank(self) -> tuple[bool, tuple[float, ...], int]:
        """Empty slots first, then the least valuable content."""
        return (self.expert is not None, self.value, self.slot)


class PlainLayerPass:
    """See `LayerPass`."""

    def __init__(self, cache: CacheView, needs: Needs, worth: Worth, hit_first: bool, lookahead: int) -> None:
        self.protects: list[int] = []
        self._needs = needs
        self._hit_first = hit_first
        self._lookahead = lookahead
        self._ops: list[Op] = []
        order = self._compute_order(cache, worth)
        self._done = frozenset(needs.done)
        self._value = {e: worth(e, needs.rows[e], cache.clock + 1 + i) for i, e in enumerate(order)}
        self._slot_of: dict[int, _Slot] = {}  # needed experts that are resident, loading or being copied
        self._source = self._sources()
        self._slots = self._survey(cache, worth)
        self._own = [s for s in self._slots if not s.staging]
        self._staging = [s for s in self._slots if s.staging]
        self._keep = self._worth_keeping(len(cache.layer_slots(needs.layer)))
        self._pending = [e for e in order if e in needs.absent]
        absent = frozenset(needs.absent) if hit_first else frozenset()
        self._queue = [e for e in order if e not in self._done and e not in absent]  # to compute, in this order
        self._outstanding = len(needs.loading)  # loads whose expert is not computed yet

    def walk(self) -> Iterator[Op]:
        """The ops, planned as they are asked for: the first copies are known long before the last. Call once."""
        while self._queue or self._pending:
            self._place_pending()
            if not self._hit_first and self._queue[0] not in self._slot_of:
                self._make_room_for(self._queue[0])
            self._compute(self._queue.pop(0))
            yield from self._ops
            self._ops.clear()

    def _sources(self) -> dict[int, Source]:
        needs = self._needs
        hits = dict.fromkeys(needs.hits, Source.HIT)
        absent = {e: Source.LATE if e in needs.late else Source.MISS for e in needs.absent}
        return {**hits, **dict.fromkeys(needs.loading, Source.LATE), **absent}

    def _compute_order(self, cache: CacheView, worth: Worth) -> list[int]:
        """Hits, then loads under way as they arrive, then the absent; least valuable first, for their slots
        go first.
        """
        needs = self._needs
        if not self._hit_first:
            return sorted(needs.rows)
        hits = [e for e in needs.hits if e in needs.slot_of]
        hits.sort(key=lambda e: (worth(e, needs.rows[e], cache.recency(needs.slot_of[e])), e))
        absent = sorted(needs.absent, key=lambda e: (worth(e, needs.rows[e], 0), e))
        return [*needs.done, *hits, *needs.loading, *absent]

    def _survey(self, cache: CacheView, worth: Worth) -> list[_Slot]:
        layer, slots = self._needs.layer, []
        for number in [*cache.layer_slots(layer), *cache.staging_slots]:
            key, state = cache.key(number), cache.state(number)
            expert = None if key is None or key.layer != layer else key.expert
            slot = _Slot(number, number in cache.staging_slots, expert, (), available=True)
            if expert is not None and expert in self._done:
                slot.value = self._value[expert]
            elif expert is not None and expert in self._needs.slot_of:
                slot.value, slot.available = self._value[expert], False
                self._slot_of[expert] = slot
                self.protects.append(number)
            elif key is not None:
                assert state is not SlotState.PROTECTED, f"slot {number} is protected by someone else"
                slot.value = worth(key.expert, 0, cache.recency(number))
                slot.arriving = state is SlotState.LOADING
                slot.available = not slot.arriving
            slots.append(slot)
        return slots

    def _worth_keeping(self, slots: int) -> frozenset[int]:
        unneeded = {s.expert: s.value for s in self._slots if s.expert is not None and not s.staging}
        worth = {**unneeded, **self._value}
        return frozenset(sorted(worth, key=lambda e: worth[e], reverse=True)[:slots])

    def _place_pending(self) -> None:
        """Give slots to missing experts as long as one can be placed; in ascending order without hit_first."""
        placed = True
        while placed and self._pending:
            placed = False
            refused: set[bool] = set()  # what holds for one expert (not) worth keeping holds for all of them
            for expert in self._pending if self._hit_first else self._pending[:1]:
                kept = expert in self._keep
                slot = None if kept in refused else self._choose(kept)
                if slot is not None:
                    self._copy(expert, slot)
                    placed = True
                    break
                refused.add(kept)
                if len(refused) == 2:
                    break

    def _choose(self, kept: bool) -> _Slot | None:
        """Slot for a missing expert (one worth keeping or not) now, or None when it is better to wait for a Release."""
        own = self._own
        spare = [s for s in own if s.available and s.expert not in self._keep]
        if self._staging and not kept:
            staging = [s for s in self._staging if s.available]
            return min(staging or spare, key=lambda s: s.rank, default=None)
        if spare:
            return min(spare, key=lambda s: s.rank)
        next_is_hit = bool(self._queue) and self._source[self._queue[0]] is Source.HIT
        awaited = any(not (s.available or s.arriving or s.expert in self._keep) for s in own)
        arriving = [s for s in own if s.arriving]
        if self._outstanding >= self._lookahead or (next_is_hit and (awaited or arriving)):
            return None
        if awaited and kept:
            return None
        choice = arriving or [s for s in own if s.available]
        return min(choice, key=lambda s: s.rank, default=None)

    def _make_room_for(self, expert: int) -> None:
        """Without hit_first, its turn has come and all slots wait for higher ids: the highest is loaded
        again later.
        """
        assert self._pending[0] == expert, (expert, self._pending)
        free = [s for s in self._slots if s.available or s.arriving]
        slot = min(free, key=lambda s: s.rank, default=None)
        if slot is None:
            slot = max((s for s in self._slots if s.expert in self._slot_of), key=lambda s: s.expert or 0)
            assert slot.expert is not None and slot.expert > expert, (expert, slot)
            self._give_up(slot.expert, slot)
        self._copy(expert, slot)

    def _adopt(self, staged: _Slot) -> None:
        """An expert worth keeping has come through a staging slot: that slot changes places with the least valuable."""
        spare = [s for s in self._own if s.available and s.expert not in self._keep]
        victim = min(spare, key=lambda s: s.rank, default=None)
        if victim is None:
            return
        self._ops.append(Adopt(staged.slot, victim.slot))
        staged.staging, victim.staging = False, True
        victim.expert, victim.value = None, ()
        self._own[self._own.index(victim)] = staged
        self._staging[self._staging.index(staged)] = victim

    def _give_up(self, expert: int, slot: _Slot) -> None:
        del self._slot_of[expert]
        self.protects.remove(slot.slot)
        self._outstanding -= self._source[expert] is not Source.HIT
        self._source[expert] = Source.MISS
        insort(self._pending, expert)

    def _copy(self, expert: int, slot: _Slot) -> None:
        self._ops.append(WaitSlotFree(slot.slot))
        self._ops.append(Copy(ExpertKey(self._needs.layer, expert), slot.slot))
        slot.expert, slot.value = expert, self._value[expert]
        slot.available = slot.arriving = False
        self._slot_of[expert] = slot
        self._pending.remove(expert)
        if self._hit_first:
            self._queue.append(expert)
        self._outstanding += 1

    def _compute(self, expert: int) -> None:
        slot, source = self._slot_of[expert], self._source[expert]
        self._ops.append(Gemm(ExpertKey(self._needs.layer, expert), slot.slot, source))
        if slot.staging and expert in self._keep:
            self._adopt(slot)
        self._ops.append(Release(slot.slot))
        slot.available = True
        self._outstanding -= source is not Source.HIT
        if slot.staging:
            slot.expert, slot.value = None, ()
