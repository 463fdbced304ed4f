"""Planning by need: no prefetch takes the place of an expert that the window will probably ask for itself.

The paper's planner (`PrefetchPlanner`) loads each layer's top-M experts by count, over residents with a lower one.
Where a window needs more distinct experts than there are slots, that trades one needed expert for another, which then
crosses the link again. Here counted residents stay, and the others go in the order of their chance to be needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specter_core.memory.expert_cache import CacheView, SlotState
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
        self._slots: NDArray[np.int64] = np.full((layers, experts), -1)  # of complete experts; −1: none
        self._free: list[list[int]] = [[] for _ in range(layers)]  # empty slots
        self._versions = [-1] * layers

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
        self._survey(cache)
        restored = {key: former for key in queued if (former := self._counted_former(key, cache, counts)) is not None}
        cancelled = list(restored)
        kept = [key for key in queued if key not in restored]
        loads = self._loads(counts, cache, restored, drafted)
        order = sorted([*kept, *(load.key for load in loads)], key=lambda k: (k.layer, -int(counts[k]), k.expert))
        chunk = int(len(order) * timings.transfer_ms_per_expert / timings.step_ms)
        next_boundary = min(self.depth, drafted + max(1, chunk))
        final = next_boundary >= self.depth
        return PrefetchPlan(
            loads=tuple(loads),
            cancelled=tuple(cancelled),
            kept=tuple(kept),
            order=tuple(order),
            next_boundary=next_boundary,
            phase=Phase.FINAL_CLEANUP if final else Phase.PREFETCH_OVERLAP,
        )

    def _survey(self, cache: CacheView) -> None:
        """Bring `_slots` and `_free` up to date where the cache has changed."""
        for layer, row in enumerate(self._slots):
            if self._versions[layer] != cache.version(layer):
                self._versions[layer] = cache.version(layer)
                held = cache.resident_slots(layer)
                row.fill(-1)
                row[list(held)] = list(held.values())
                self._free[layer] = [s for s in cache.layer_slots(layer) if cache.state(s) is SlotState.EMPTY]

    @staticmethod
    def _counted_former(key: ExpertKey, cache: CacheView, counts: NDArray[np.int32]) -> ExpertKey | None:
        """A counted expert that taking this load back would restore."""
        slot = cache.lookup(key)
        former = None if slot is None else cache.previous(slot)
        if former is None or counts[former.key] == 0 or cache.lookup(former.key) is not None:
            return None
        return former.key

    def _loads(
        self, counts: NDArray[np.int32], cache: CacheView, restored: Mapping[ExpertKey, ExpertKey], drafted: int
    ) -> list[PlannedLoad]:
        """restored: loads that are taken back -> the experts that are back then."""
        back = set(restored.values())
        resident = self._slots >= 0
        counted = counts > 0
        chance = self._history.chance(self.depth + 1 - drafted)
        chance[counted | ~resident | (chance > self._worth_a_slot)] = np.inf
        victims, victim_count = chance.argsort(axis=1, kind="stable"), np.isfinite(chance).sum(axis=1)
        wanted = counted & ~resident
        ranking = np.where(wanted, -counts, 1).argsort(axis=1, kind="stable")
        loads: list[PlannedLoad] = []
        for layer in np.nonzero(wanted.any(axis=1))[0].tolist():
            places: list[tuple[int, ExpertKey | None]] = [(slot, None) for slot in self._free[layer]]
            for expert in victims[layer, : victim_count[layer]].tolist():
                slot = int(self._slots[layer, expert])
                if cache.state(slot) is SlotState.RESIDENT:
                    places.append((slot, ExpertKey(layer, expert)))
            if not places:
                continue
            keys = [ExpertKey(layer, e) for e in ranking[layer, : wanted[layer].sum()].tolist()]
            absent = [k for k in keys if k in restored or (cache.lookup(k) is None and k not in back)]
            loads += [PlannedLoad(k, slot, victim) for k, (slot, victim) in zip(absent, places, strict=False)]
        return loads
