"""The order of swaps as released: hits first, then a few swaps under way, the next one as an expert is consumed."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence

from specter_core.memory.expert_cache import ExpertCache
from specter_core.types import ExpertKey
from specter_core.verify.ops import Copy, Gemm, Op, Release, Source, WaitSlotFree
from specter_core.verify.residency import LayerPlan


class SwapResidency:
    """`Residency` of a per-layer LRU. spare: swaps under way at once, as many as there are spare buffers."""

    def __init__(self, cache: ExpertCache, spare: int) -> None:
        assert spare >= 1, spare
        self._cache = cache
        self._spare = spare

    def plan_layer(
        self, layer: int, needed: Sequence[int], counts: Mapping[int, int] | None = None, late: Sequence[int] = (),
        done: Collection[int] = (),
    ) -> LayerPlan:  # fmt: skip
        """needed: distinct, ascending. There is no prefetching, so nothing is late."""
        assert not late, late
        keys = [ExpertKey(layer, expert) for expert in needed]
        places = [(key, self._cache.lookup(key)) for key in keys]
        hits = [(key, slot) for key, slot in places if slot is not None]
        misses = deque(key for key, slot in places if slot is None)
        missing = tuple(key.expert for key in misses)
        ops: list[Op] = []
        waiting = [(key, slot) for key, slot in hits if key.expert not in done]
        for key, slot in waiting:
            ops += [Gemm(key, slot, Source.HIT), Release(slot)]
        victims = self._by_age(layer, [slot for _, slot in hits])
        moving: deque[tuple[ExpertKey, int]] = deque()
        for _ in range(min(self._spare, len(victims), len(misses))):
            self._swap(misses.popleft(), victims.popleft(), ops, moving)
        while moving:
            key, slot = moving.popleft()
            ops += [Gemm(key, slot, Source.MISS), Release(slot)]
            victims.append(slot)
            if misses:
                self._swap(misses.popleft(), victims.popleft(), ops, moving)
        protects = tuple(slot for _, slot in waiting)
        return LayerPlan(layer, tuple(ops), protects, tuple(key.expert for key, _ in hits), (), missing)

    def _by_age(self, layer: int, used: Sequence[int]) -> deque[int]:
        """Slots of the layer, empty ones first, then least recently used; those `used` now last, in order of use."""
        slots = [slot for slot in self._cache.layer_slots(layer) if slot not in used]
        slots.sort(key=lambda slot: (self._cache.key(slot) is not None, self._cache.recency(slot), slot))
        return deque([*slots, *used])

    def _swap(self, key: ExpertKey, slot: int, ops: list[Op], moving: deque[tuple[ExpertKey, int]]) -> None:
        ops += [WaitSlotFree(slot), Copy(key, slot)]
        moving.append((key, slot))
