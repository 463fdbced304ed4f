"""Planning by need: no prefetch takes the place of an expert that the window will probably ask for itself.

The paper's planner (`PrefetchPlanner`) loads each layer's top-M experts by count, over residents with a lower one.
Where a window needs more distinct experts than there are slots, that trades one needed expert for another, which then
crosses the link again. Here counted residents stay, and the others go in the order of their chance to be needed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specter_core.memory.expert_cache import CacheView
from specter_core.prefetch.need_history import NeedHistory
from specter_core.prefetch.planner import Phase, PlannedLoad, PrefetchPlan, Timings
from specter_core.types import ExpertKey

WORTH_A_SLOT = 0.5
"""A resident whose chance to be needed is higher is not evicted for a prefetch (measured on recorded routing)."""


class NeedPlanner:
    """`Planner` that plans for every expert with a count > 0, as long as slots are to be had: empty ones, then those of
    residents without a count, the least likely first, up to a chance of `worth_a_slot`.

    Chunks are matched to the transfer time as in the paper, rounded down so that the link does not run dry, and go on
    to the last draft token.
    """

    def __init__(self, initial_chunk_tokens: int, history: NeedHistory, *, worth_a_slot: float = WORTH_A_SLOT) -> None:
        assert initial_chunk_tokens >= 1, initial_chunk_tokens
        self.initial_chunk_tokens = initial_chunk_tokens
        self.depth = 0
        self._history, self._worth_a_slot = history, worth_a_slot
        layers, experts = history.rate.shape
        self._keys = [[ExpertKey(layer, expert) for expert in range(experts)] for layer in range(layers)]

    def begin_window(self, depth: int) -> int:
        """See `PrefetchPlanner`."""
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
        """See `PrefetchPlanner`. A queued load stays, unless the expert in its slot has been counted by now."""
        counts = counters.numpy()
        rows: list[list[int]] = counters.tolist() if queued else []
        restored = {key: former for key in queued if (former := _counted_former(key, cache, rows)) is not None}
        kept = [key for key in queued if key not in restored]
        loads = self._loads(counts, cache, restored, drafted)
        order = [load.key for load in loads]
        if kept:
            order = sorted([*kept, *order], key=lambda key: (key[0], -rows[key[0]][key[1]], key[1]))
        chunk = int(len(order) * timings.transfer_ms_per_expert / timings.step_ms)
        next_boundary = min(self.depth, drafted + max(1, chunk))
        final = next_boundary >= self.depth
        return PrefetchPlan(
            loads=tuple(loads),
            cancelled=tuple(restored),
            kept=tuple(kept),
            order=tuple(order),
            next_boundary=next_boundary,
            phase=Phase.FINAL_CLEANUP if final else Phase.PREFETCH_OVERLAP,
        )

    def _loads(
        self, counts: NDArray[np.int32], cache: CacheView, restored: Mapping[ExpertKey, ExpertKey], drafted: int
    ) -> list[PlannedLoad]:
        """By layer, count and id. restored: loads that are taken back -> the experts that are back then."""
        chance = self._history.chance(self.depth + 1 - drafted)
        busy = {*cache.loading_slots, *cache.protected_slots, *cache.staging_slots}
        loads: list[PlannedLoad] = []
        for layer, counted in enumerate(counts):
            held = _held_after(layer, cache, restored)
            absent = [expert for expert in counted.nonzero()[0].tolist() if expert not in held]
            if not absent:
                continue
            row, keys = counted.tolist(), self._keys[layer]
            absent.sort(key=row.__getitem__, reverse=True)  # stable: equal counts by id
            places: list[tuple[int, ExpertKey | None]] = [(slot, None) for slot in cache.free_slots(layer)]
            if len(places) < len(absent):
                likely, slot_of = chance[layer].tolist(), cache.held(layer)
                victims = [
                    (likely[expert], expert)
                    for expert, slot in slot_of.items()
                    if not row[expert] and likely[expert] <= self._worth_a_slot and slot not in busy
                ]
                places += [(slot_of[expert], keys[expert]) for _, expert in sorted(victims)]
            loads += [PlannedLoad(keys[e], slot, victim) for e, (slot, victim) in zip(absent, places, strict=False)]
        return loads


def _counted_former(key: ExpertKey, cache: CacheView, counts: Sequence[Sequence[int]]) -> ExpertKey | None:
    """A counted expert that taking this load back would restore."""
    slot = cache.lookup(key)
    former = None if slot is None else cache.previous(slot)
    if former is None:
        return None
    layer, expert = former.key
    return former.key if counts[layer][expert] and expert not in cache.held(layer) else None


def _held_after(layer: int, cache: CacheView, restored: Mapping[ExpertKey, ExpertKey]) -> Collection[int]:
    """Experts of `layer` in a slot or on their way into one, once the loads have been taken back."""
    held = cache.held(layer)
    if not restored:
        return held
    gone = {key.expert for key in restored if key.layer == layer}
    return (held.keys() - gone) | {key.expert for key in restored.values() if key.layer == layer}
