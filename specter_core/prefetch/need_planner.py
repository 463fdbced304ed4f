"""Planning by need: no prefetch takes the place of an expert that the window will probably ask for itself.

The paper's planner (`PrefetchPlanner`) loads each layer's top-M experts by count, over residents with a lower one.
Where a window needs more distinct experts than there are slots, that trades one needed expert for another, which then
crosses the link again. Here counted residents stay, and the others go in the order of their chance to be needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

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
        restored = {key: former for key in queued if (former := _counted_former(key, cache, counts)) is not None}
        kept = [key for key in queued if key not in restored]
        loads = self._loads(counts, cache, restored, drafted)
        order = [load.key for load in loads]
        if kept:
            rank = _rank(counts)
            order = sorted([*kept, *order], key=lambda key: rank[key[0]][key[1]])
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
        slots, held = cache.contents, np.zeros(counts.shape, bool)
        filled = slots.expert >= 0
        held[slots.layer[filled], slots.expert[filled]] = True
        for key, former in restored.items():
            held[key], held[former] = False, True
        layers, absent = ((counts > 0) & ~held).nonzero()
        by_count = np.lexsort((-counts[layers, absent], layers))  # equal counts by id
        wanted = _by_layer(layers, absent[by_count], len(counts))
        victims = self._victims(counts, cache, drafted)
        roomy = set(slots.owner[~filled].tolist())  # layers with an empty slot
        loads: list[PlannedLoad] = []
        for layer, experts in enumerate(wanted):
            if experts and (victims[layer] or layer in roomy):
                keys, empty = self._keys[layer], cache.free_slots(layer) if layer in roomy else ()
                loads += [PlannedLoad(keys[e], slot, None) for e, slot in zip(experts, empty, strict=False)]
                rest = zip(experts[len(empty) :], victims[layer], strict=False)
                loads += [PlannedLoad(keys[e], slot, cache.key(slot)) for e, slot in rest]
        return loads

    def _victims(self, counts: NDArray[np.int32], cache: CacheView, drafted: int) -> list[list[int]]:
        """Slots by layer whose experts may go, the least likely first."""
        slots = cache.contents
        idle = (slots.expert >= 0) & (slots.owner >= 0)
        idle[[*cache.loading_slots, *cache.protected_slots]] = False
        chance = self._history.chance(self.depth + 1 - drafted)
        may_go = (counts == 0) & (chance <= self._worth_a_slot)
        idle &= may_go[slots.layer, slots.expert]  # whatever −1 finds: empty slots are not idle
        found = idle.nonzero()[0]
        layers, experts = slots.layer[found], slots.expert[found]
        order = np.lexsort((experts, chance[layers, experts], layers))
        return _by_layer(layers[order], found[order], len(counts))


def _by_layer(layers: NDArray[np.integer], values: NDArray[np.integer], count: int) -> list[list[int]]:
    """values, cut where their ascending layers change."""
    bounds = np.searchsorted(layers, np.arange(count + 1)).tolist()
    found = values.tolist()
    return [found[a:b] for a, b in pairwise(bounds)]


def _rank(counts: NDArray[np.int32]) -> list[list[int]]:
    """Numbers [L, E] that ascend by layer, count (the highest first) and id."""
    layers, experts = counts.shape
    behind = np.arange(layers)[:, None] * (int(counts.max()) + 1) - counts
    rank: list[list[int]] = (behind * experts + np.arange(experts)).tolist()
    return rank


def _counted_former(key: ExpertKey, cache: CacheView, counts: NDArray[np.int32]) -> ExpertKey | None:
    """A counted expert that taking this load back would restore."""
    slot = cache.lookup(key)
    former = None if slot is None else cache.previous(slot)
    if former is None or not counts[former.key] or cache.lookup(former.key) is not None:
        return None
    return former.key
