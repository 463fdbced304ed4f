"""The order of loads of the improved variant: a miss goes over the least recently used expert that is not needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence

from specter_core.memory.expert_cache import ExpertCache
from specter_core.types import ExpertKey
from specter_core.verify.ops import Copy, Gemm, Op, Release, Source, WaitSlotFree
from specter_core.verify.residency import LayerPlan

_Place = tuple[ExpertKey, int]  # expert and its slot


class LruResidency:
    """`Residency` of a per-layer LRU: all loads that have a place are asked for at once, hits are computed meanwhile,
    then the loads as they arrive. Where a layer needs more experts than it has slots, the rest follows into slots whose
    expert has been computed. Written for one token at a time: nothing is weighed, so planning takes next to no time.
    """

    def __init__(self, cache: ExpertCache) -> None:
        self._cache = cache

    def plan_layer(
        self,
        layer: int,
        needed: Sequence[int],
        counts: Mapping[int, int] | None = None,
        late: Sequence[int] = (),
        done: Collection[int] = (),
    ) -> LayerPlan:
        """needed: distinct, ascending. late: on their way into spare buffers (speculative loading). done: hits that are
        computed already; their slots go last."""
        ready, hits, coming, misses = self._classify(layer, needed, late, done)
        missing = tuple(key.expert for key in misses)
        used = {slot for _, slot in (*ready, *hits, *coming)}
        free = deque(self._by_age(layer, used) if misses else ())
        ops: list[Op] = []
        moving: deque[tuple[ExpertKey, int, Source]] = deque((key, slot, Source.LATE) for key, slot in coming)

        def place() -> None:
            while misses and free:
                key, slot = misses.popleft(), free.popleft()
                ops.extend((WaitSlotFree(slot), Copy(key, slot)))
                moving.append((key, slot, Source.MISS))

        place()
        free.extend(slot for _, slot in ready)
        for key, slot in hits:
            ops += [Gemm(key, slot, Source.HIT), Release(slot)]
            free.append(slot)
        place()
        while moving:
            key, slot, source = moving.popleft()
            ops += [Gemm(key, slot, source), Release(slot)]
            free.append(slot)
            place()
        protects = tuple(slot for _, slot in (*hits, *coming))
        found = tuple(sorted(key.expert for key, _ in (*ready, *hits)))
        return LayerPlan(layer, tuple(ops), protects, found, tuple(key.expert for key, _ in coming), missing)

    def _classify(
        self, layer: int, needed: Sequence[int], late: Sequence[int], done: Collection[int]
    ) -> tuple[list[_Place], list[_Place], list[_Place], deque[ExpertKey]]:
        """(computed already, to be computed, on their way, absent)."""
        ready: list[_Place] = []
        hits: list[_Place] = []
        coming: list[_Place] = []
        misses: deque[ExpertKey] = deque()
        for expert in needed:
            key = ExpertKey(layer, expert)
            slot = self._cache.lookup(key)
            if slot is None:
                misses.append(key)
            elif expert in done:
                ready.append((key, slot))
            else:
                (coming if expert in late else hits).append((key, slot))
        return ready, hits, coming, misses

    def _by_age(self, layer: int, used: set[int]) -> list[int]:
        """The layer's slots that are not needed now: empty ones first, then least recently used."""
        cache = self._cache
        slots = [slot for slot in cache.layer_slots(layer) if slot not in used]
        slots.sort(key=lambda slot: (cache.key(slot) is not None, cache.recency(slot), slot))
        return slots
