"""Carries the planner's decisions to cache and link, and counts how good they were."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specter_core.memory.expert_loader import ExpertLoader
from specter_core.memory.link import Priority, Transfer
from specter_core.prefetch.planner import Phase, Planner, PrefetchPlan, Timings
from specter_core.types import ExpertKey


@dataclass(frozen=True, slots=True)
class PrefetchCounters:
    """One window. precision = planned_used / planned, recall = absent_planned / absent.

    planned: loads of the last plan that knew of them. planned_used: those whose expert served a committed token,
    however it came: a planned load that was dropped because the target's router did not ask for it was a wrong
    prediction, one that became a demand a right one, one that only rejected tokens needed was made in vain. issued:
    planned loads that went onto the link as prefetches (not cancelled while queued, not asked for first); used: those
    of them that served a committed token. absent: experts the target needed that were neither resident nor loading at
    b_1; absent_planned: those of them in the last plan that knew of them.
    """

    chunks: int
    planned: int
    planned_used: int
    issued: int
    used: int
    promoted: int
    cancelled: int
    absent: int
    absent_planned: int


class Prefetcher:
    """Drives one window: begin_window, on_boundary…, end_of_draft, prepare_layer and before_layer for each
    layer, end_window.

    under_verify: planned loads go on underneath verification; otherwise they end with drafting (paper). stage_ahead:
    staging slots that are free take predicted experts of the next layer to be verified, for which its own slots have no
    room, so that the link is busy while a layer begins.
    """

    def __init__(
        self, planner: Planner, loader: ExpertLoader, *, under_verify: bool = True, stage_ahead: bool = False
    ) -> None:
        self.planner = planner
        self.loader = loader
        self.under_verify = under_verify
        self.stage_ahead = stage_ahead
        self._counts: NDArray[np.int32] | None = None  # [L, E] of the last plan, while its window lasts
        self.phase = Phase.FINAL_CLEANUP
        self.next_boundary = 0
        self._start_window()

    def begin_window(self, depth: int) -> int:
        """Start a window of `depth` draft tokens; returns b_1. No load is submitted before it."""
        self._start_window()
        self.phase = Phase.COLD_START
        self.next_boundary = self.planner.begin_window(depth)
        return self.next_boundary

    def shorten_window(self, depth: int) -> None:
        """The draft has stopped after `depth` tokens: a plan made for these is the last one."""
        self.planner.depth = depth

    @property
    def wants_snapshot(self) -> bool:
        """Whether the ELB is to be read at `next_boundary`."""
        return self.phase is not Phase.FINAL_CLEANUP

    def on_boundary(self, counters: Tensor, drafted: int, timings: Timings) -> PrefetchPlan:
        """Plan from counters int32 [L, E] (CPU) and submit; afterwards `phase` and `next_boundary` are the
        plan's. Final Cleanup takes no further snapshot, except after the last draft token where loads go on
        under verification.
        """
        last = self.under_verify and drafted == self.planner.depth
        assert self.wants_snapshot or last, f"no snapshot in {self.phase} after {drafted} tokens"
        self.loader.reap()
        if self.phase is Phase.COLD_START:
            self._held_at_b1 = self._held()
        plan = self.planner.plan(counters, self.loader.cache, self.loader.queued_keys(), timings, drafted)
        self._apply(plan)
        self._counts = counters.numpy()
        self._stage(0)
        self._chunks += 1
        self.phase, self.next_boundary = plan.phase, plan.next_boundary
        return plan

    def end_of_draft(self) -> None:
        """Drafting is over. Unless loads go on under verification, what is still queued is cancelled;
        issued ones finish.
        """
        self.phase = Phase.FINAL_CLEANUP
        if not self.under_verify:
            for key in self.loader.queued_keys():
                if self.loader.cancel(key):
                    self._cancelled += 1
                    self._planned.discard(key)
        self.loader.reap()

    def before_layer(self, layer: int, needed: Collection[int]) -> tuple[int, ...]:
        """The target's router of `layer` has spoken: `needed` are its distinct experts.

        Returns the late ones (needed, load queued or issued at this moment) in the order in which they will
        arrive. Needed loads become demands; queued loads of this layer that are not needed are cancelled,
        which brings back the experts they were to replace. A needed load that would overwrite another
        needed expert gives that one's slot back and is left to the Residency Manager: it has no transfer
        any more, but still is late.
        """
        self.loader.reap()
        self._needed.append((layer, tuple(needed)))
        opened = self.loader.open_keys(layer)
        if not opened:
            return ()
        late = tuple(key.expert for key in opened if key.expert in needed)
        for key in self.loader.queued_keys(layer):
            if key.expert not in needed or self._former(key) in needed:
                self._cancelled += self.loader.cancel(key)
        for expert in late:
            key = ExpertKey(layer, expert)
            if self.loader.is_open(key):
                self.loader.promote(key)
        return late

    def prepare_layer(self, layer: int) -> None:
        """Everything of the layers before is on its way: what this one will miss may use the staging slots."""
        self._stage(layer)

    def end_window(self, useful: Collection[tuple[int, int]]) -> PrefetchCounters:
        """Close the window's account. useful: (layer, expert) that a committed token's input was routed to."""
        self._counts = None
        issued = [t for t in self._submitted if t.issued_as is Priority.PREFETCH]
        held = self._held_at_b1
        absent = [(layer, e) for layer, needed in self._needed for e in set(needed).difference(held[layer])]
        return PrefetchCounters(
            chunks=self._chunks,
            planned=len(self._planned),
            planned_used=sum(key in useful for key in self._planned),
            issued=len(issued),
            used=sum(t.key in useful for t in issued),
            promoted=sum(t.issued_as is Priority.DEMAND for t in self._submitted),
            cancelled=self._cancelled,
            absent=len(absent),
            absent_planned=len(self._planned.intersection(absent)),
        )

    def _start_window(self) -> None:
        self._submitted: list[Transfer] = []
        self._planned: set[ExpertKey] = set()
        self._counts = None
        self._held_at_b1 = self._held()
        self._needed: list[tuple[int, tuple[int, ...]]] = []  # by layer, as the routers spoke
        self._chunks = 0
        self._cancelled = 0

    def _apply(self, plan: PrefetchPlan) -> None:
        """Cancel, evict, submit. A load issued since the plan was made stays, and what the plan wanted in
        its slot is dropped.
        """
        for key in plan.cancelled:
            self._cancelled += self.loader.cancel(key)
        self._planned.difference_update(plan.cancelled)
        cache = self.loader.cache
        loads = [(load.key, load.slot) for load in plan.loads if cache.can_load(load.key, load.slot)]
        self._submitted += self.loader.load_all(loads, Priority.PREFETCH)
        self._planned.update(key for key, _ in loads)
        if plan.kept:
            self.loader.reorder(plan.order)

    def _stage(self, layer: int) -> None:
        """Free staging slots take counted experts of `layer` that are nowhere, the least counted first: these would
        pass through such a slot anyway.
        """
        if not self.stage_ahead or self._counts is None or layer >= self._counts.shape[0]:
            return
        free = self._free_staging(layer)
        if not free:
            return
        counts, held = self._counts[layer], self.loader.cache.held(layer)
        absent = [expert for expert in counts.nonzero()[0].tolist() if expert not in held]
        if not absent:
            return
        absent.sort(key=counts.tolist().__getitem__)  # stable: equal counts by id
        for slot, expert in zip(free, absent, strict=False):
            key = ExpertKey(layer, expert)
            self._submitted.append(self.loader.load(key, slot, Priority.PREFETCH))
            self._planned.add(key)

    def _free_staging(self, layer: int) -> list[int]:
        """Empty staging slots, once those are that hold an expert of another layer for which nobody has asked."""
        cache = self.loader.cache
        loading, in_use, free = cache.loading_slots, cache.protected_slots, []
        for slot in cache.staging_slots:
            key = cache.key(slot)
            if key is not None and key.layer != layer and slot not in loading and slot not in in_use:
                cache.evict(slot)
                key = None
            if key is None:
                free.append(slot)
        return free

    def _former(self, key: ExpertKey) -> int | None:
        """The expert of the same layer that cancelling the load of `key` would bring back."""
        cache = self.loader.cache
        slot = cache.lookup(key)
        former = None if slot is None else cache.previous(slot)
        if former is None or former.key.layer != key.layer or cache.lookup(former.key) is not None:
            return None
        return former.key.expert

    def _held(self) -> list[dict[int, int]]:
        """expert -> slot of those in a slot or on their way into one, by layer."""
        cache = self.loader.cache
        return [dict(cache.held(layer)) for layer in range(len(cache.slots_per_layer))]
