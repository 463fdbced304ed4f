"""One layer, walked through in the order of computation: which slot each missing expert gets, and when."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from specter_core.memory.expert_cache import CacheView
from specter_core.types import ExpertKey
from specter_core.verify.ops import Adopt, Copy, Gemm, Op, Release, Source, WaitSlotFree

Value: TypeAlias = tuple[float, ...]
Worth = Callable[[int, int, int], Value]
"""(expert, rows routed to it in this pass, recency) -> what keeping it is worth."""

Rank: TypeAlias = tuple[bool, Value, int]
"""(holds an expert of the layer, what that is worth, slot): empty slots come first, then the least valuable content."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Needed experts of a layer.

    rows: rows routed to each. hits: resident; loading: in order of arrival; absent: the rest. late: those
    whose load was under way when the router spoke (some may be absent again). slot_of: of loading and of hits that are
    to be computed. done: hits that are computed already.
    """

    layer: int
    rows: Mapping[int, int]
    hits: list[int]
    loading: list[int]
    absent: list[int]
    late: frozenset[int]
    slot_of: dict[int, int]
    done: tuple[int, ...] = ()


class LayerPass:
    """Rolling load-compute on paper.

    `keep` are the experts that the layer's own slots should hold afterwards. Missing ones among them go
    into slots that hold nothing worth keeping, at once where these are free. The others pass through the
    staging slots; without any, they take what is free, and a kept expert's slot only when the link would
    otherwise run dry.

    A needed expert that is resident, loading or being copied, and not computed yet, has its slot in `slot_of`. Other
    slots may be overwritten: the layer's own are `free` (slot -> expert) or `blank` (no expert of the layer in them),
    the rest `free_staging`; slots in `arriving` and `arriving_staging` once an unneeded load has moved in.
    """

    def __init__(self, cache: CacheView, needs: Needs, worth: Worth, hit_first: bool, lookahead: int) -> None:
        self._needs = needs
        self._hit_first = hit_first
        self._lookahead = lookahead
        self._ops: list[Op] = []
        order = self._compute_order(cache, worth)
        self._source = self._sources()
        self._slot_of = needs.slot_of.copy()
        self.protects = list(needs.slot_of.values())
        self._staging = set(cache.staging_slots)
        self._value: dict[int, Value] = {}
        self._keep: frozenset[int] = frozenset()
        self._free: dict[int, int] = {}
        self._blank: list[Rank] = []
        self._free_staging: list[Rank] = []
        self._arriving: list[Rank] = []
        self._arriving_staging: list[Rank] = []
        if needs.absent or not self._staging.isdisjoint(self.protects):  # else no slot is to be given to anyone
            now = cache.clock + 1
            self._value = {e: worth(e, needs.rows[e], now + i) for i, e in enumerate(order)}
            self._survey(cache, worth)
        absent = set(needs.absent)
        self._pending = [e for e in order if e in absent]
        wait = absent if hit_first else ()
        self._queue = [e for e in order if e in self._source and e not in wait]  # to compute, in this order
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
        """Of the experts that are to be computed."""
        needs = self._needs
        absent = {e: Source.LATE if e in needs.late else Source.MISS for e in needs.absent}
        return {**dict.fromkeys(needs.slot_of, Source.HIT), **dict.fromkeys(needs.loading, Source.LATE), **absent}

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

    def _survey(self, cache: CacheView, worth: Worth) -> None:
        """What is worth keeping, and which slots may be overwritten. Needed experts have their value already."""
        layer, value, staging, loading = self._needs.layer, self._value, self._staging, cache.loading_slots
        own = cache.layer_slots(layer)
        contenders = list(value)
        for expert, slot in cache.held(layer).items():
            if expert in self._slot_of:
                continue
            if expert not in value:
                value[expert] = worth(expert, 0, cache.recency(slot))
                if slot not in staging:
                    contenders.append(expert)
            if slot not in staging and slot not in loading:
                self._free[slot] = expert
        contenders.sort(key=value.__getitem__, reverse=True)
        self._keep = frozenset(contenders[: len(own)])
        others = {*own, *staging}.difference(self.protects)
        assert cache.protected_slots.isdisjoint(others), f"slots of layer {layer} are protected by someone else"
        for slot in others.difference(self._free):
            key = cache.key(slot)
            if key is None:
                rank: Rank = (False, (), slot)
            elif key.layer == layer:
                rank = (True, value[key.expert], slot)
            else:
                rank = (False, worth(key.expert, 0, cache.recency(slot)), slot)
            if slot in staging:
                (self._arriving_staging if slot in loading else self._free_staging).append(rank)
            else:
                (self._arriving if slot in loading else self._blank).append(rank)

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

    def _choose(self, kept: bool) -> int | None:
        """Slot for a missing expert (one worth keeping or not) now, or None when it is better to wait for a Release."""
        if self._staging and not kept:
            return _first(self._free_staging or self._spare())
        spare = self._spare()
        if spare:
            return _first(spare)
        next_is_hit = bool(self._queue) and self._source[self._queue[0]] is Source.HIT
        awaited = any(e not in self._keep and slot not in self._staging for e, slot in self._slot_of.items())
        if self._outstanding >= self._lookahead or (next_is_hit and (awaited or self._arriving)):
            return None
        if awaited and kept:
            return None
        return _first(self._arriving or self._settled())

    def _spare(self) -> list[Rank]:
        """The layer's own slots that may be overwritten and hold nothing worth keeping."""
        keep, value = self._keep, self._value
        return self._blank + [(True, value[e], slot) for slot, e in self._free.items() if e not in keep]

    def _settled(self) -> list[Rank]:
        """The layer's own slots that could be overwritten but hold what is worth keeping."""
        keep, value = self._keep, self._value
        return [(True, value[e], slot) for slot, e in self._free.items() if e in keep]

    def _make_room_for(self, expert: int) -> None:
        """Without hit_first, its turn has come and all slots wait for higher ids: the highest is loaded
        again later.
        """
        assert self._pending[0] == expert, (expert, self._pending)
        own = self._spare() + self._settled() + self._arriving
        slot = _first(own + self._free_staging + self._arriving_staging)
        if slot is None:
            highest = max(self._slot_of)
            assert highest > expert, (expert, highest)
            slot = self._give_up(highest)
        self._copy(expert, slot)

    def _adopt(self, staged: int) -> None:
        """An expert worth keeping has come through a staging slot: that slot changes places with the least valuable."""
        victim = _first(self._spare())
        if victim is None:
            return
        self._ops.append(Adopt(staged, victim))
        self._take(victim)
        self._staging.remove(staged)
        self._staging.add(victim)
        self._free_staging.append((False, (), victim))

    def _give_up(self, expert: int) -> int:
        slot = self._slot_of.pop(expert)
        self.protects.remove(slot)
        self._outstanding -= self._source[expert] is not Source.HIT
        self._source[expert] = Source.MISS
        insort(self._pending, expert)
        return slot

    def _copy(self, expert: int, slot: int) -> None:
        self._ops.append(WaitSlotFree(slot))
        self._ops.append(Copy(ExpertKey(self._needs.layer, expert), slot))
        self._take(slot)
        self._slot_of[expert] = slot
        self._pending.remove(expert)
        if self._hit_first:
            self._queue.append(expert)
        self._outstanding += 1

    def _take(self, slot: int) -> None:
        """The slot may not be overwritten any more."""
        if self._free.pop(slot, None) is None:
            for pool in (self._blank, self._free_staging, self._arriving, self._arriving_staging):
                pool[:] = [rank for rank in pool if rank[2] != slot]

    def _compute(self, expert: int) -> None:
        slot, source = self._slot_of.pop(expert), self._source[expert]
        self._ops.append(Gemm(ExpertKey(self._needs.layer, expert), slot, source))
        if slot in self._staging and expert in self._keep:
            self._adopt(slot)
        self._ops.append(Release(slot))
        self._outstanding -= source is not Source.HIT
        if slot in self._staging:
            self._free_staging.append((False, (), slot))
        else:
            self._free[slot] = expert


def _first(ranks: list[Rank]) -> int | None:
    """The slot to be overwritten first."""
    return min(ranks)[2] if ranks else None
