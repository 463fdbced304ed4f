"""`LayerPass` by definition: every slot is an object and every choice looks at all of them. What an expert is and when
its turn comes is read off the cache and the plan so far, not kept in queues. Slow, and easy to check.
"""

from __future__ import annotations

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
        self._source = {e: self._found(cache, e) for e in needs.rows}
        order = sorted(needs.rows, key=lambda e: self._place(cache, worth, e))
        self._done = frozenset(needs.done)
        self._value = {e: worth(e, needs.rows[e], cache.clock + 1 + i) for i, e in enumerate(order)}
        self._slot_of: dict[int, _Slot] = {}  # needed experts that are resident, loading or being copied
        self._slots = self._survey(cache, worth)
        self._own = [s for s in self._slots if not s.staging]
        self._staging = [s for s in self._slots if s.staging]
        self._keep = self._worth_keeping(len(cache.layer_slots(needs.layer)))
        self._order = order
        self._left = set(needs.rows) - self._done  # not computed yet
        self._copied: list[int] = []

    def walk(self) -> Iterator[Op]:
        """The whole list, made before the first op is looked at."""
        while self._left:
            self._fill()
            expert = self._next()
            if expert not in self._slot_of:
                self._make_room_for(expert)
            self._compute(expert)
        return iter(self._ops)

    def _found(self, cache: CacheView, expert: int) -> Source:
        """What the router's choice found in the cache."""
        slot = cache.lookup(ExpertKey(self._needs.layer, expert))
        if expert in self._needs.done:
            return Source.HIT
        if slot is None:
            return Source.LATE if expert in self._needs.late else Source.MISS
        return Source.LATE if cache.state(slot) is SlotState.LOADING else Source.HIT

    def _place(self, cache: CacheView, worth: Worth, expert: int) -> tuple[object, ...]:
        """Sorts experts by when they are computed if every load arrives in time: what is done, the resident, what is on
        its way as it arrives, the absent; the least valuable first, whose slots are the next to be overwritten."""
        if not self._hit_first:
            return (expert,)
        slot = cache.lookup(ExpertKey(self._needs.layer, expert))
        if expert in self._needs.done:
            return (0, expert)
        if slot is None:
            return (3, worth(expert, self._needs.rows[expert], 0), expert)
        if cache.state(slot) is SlotState.LOADING:
            return (2, self._needs.loading.index(expert))
        return (1, worth(expert, self._needs.rows[expert], cache.recency(slot)), expert)

    def _next(self) -> int:
        """Whose turn it is: with hit_first, what was there when the router spoke in the order of places, and then the
        copies one after another; else the least id."""
        if not self._hit_first:
            return min(self._left)
        there = [e for e in self._order if e in self._slot_of and e not in self._copied]
        return next(e for e in [*there, *self._copied] if e in self._left)

    def _missing(self) -> list[int]:
        """Those without a slot, in the order in which they ask for one."""
        return [e for e in self._order if e in self._left and e not in self._slot_of]

    def _outstanding(self) -> int:
        """Loads whose expert is not computed yet."""
        return sum(self._source[e] is not Source.HIT for e in self._left if e in self._slot_of)

    def _fill(self) -> None:
        """Whoever asks first and is given a slot has it, until no one is; without hit_first only the first may ask."""
        asking = self._missing()
        while asking:
            served = [(e, slot) for e in asking if (slot := self._choose(e)) is not None]
            if not served or (not self._hit_first and served[0][0] != asking[0]):
                return
            self._copy(*served[0])
            asking = self._missing()

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

    def _choose(self, expert: int) -> _Slot | None:
        """Slot for a missing expert now, or None when it is better to wait for a Release."""
        own, kept = self._own, expert in self._keep
        spare = [s for s in own if s.available and s.expert not in self._keep]
        if self._staging and not kept:
            staging = [s for s in self._staging if s.available]
            return min(staging or spare, key=lambda s: s.rank, default=None)
        if spare:
            return min(spare, key=lambda s: s.rank)
        due = [e for e in self._left if e in self._slot_of]
        due = due if self._hit_first else [min(self._left)]
        next_is_hit = bool(due) and self._source[self._next()] is Source.HIT
        awaited = any(not (s.available or s.arriving or s.expert in self._keep) for s in own)
        arriving = [s for s in own if s.arriving]
        if self._outstanding() >= self._lookahead or (next_is_hit and (awaited or arriving)):
            return None
        if awaited and kept:
            return None
        choice = arriving or [s for s in own if s.available]
        return min(choice, key=lambda s: s.rank, default=None)

    def _make_room_for(self, expert: int) -> None:
        """Without hit_first, its turn has come and all slots wait for higher ids: the highest is loaded
        again later.
        """
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
        self._source[expert] = Source.MISS

    def _copy(self, expert: int, slot: _Slot) -> None:
        self._ops.append(WaitSlotFree(slot.slot))
        self._ops.append(Copy(ExpertKey(self._needs.layer, expert), slot.slot))
        slot.expert, slot.value = expert, self._value[expert]
        slot.available = slot.arriving = False
        self._slot_of[expert] = slot
        self._copied.append(expert)

    def _compute(self, expert: int) -> None:
        slot, source = self._slot_of[expert], self._source[expert]
        self._ops.append(Gemm(ExpertKey(self._needs.layer, expert), slot.slot, source))
        if slot.staging and expert in self._keep:
            self._adopt(slot)
        self._ops.append(Release(slot.slot))
        slot.available = True
        self._left.remove(expert)
        if slot.staging:
            slot.expert, slot.value = None, ()
