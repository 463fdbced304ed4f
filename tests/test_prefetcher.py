"""Prefetcher: windows driven at random keep cache, link and counters consistent."""

from __future__ import annotations

import random

import pytest
import torch
from control_plane import ManualLink, residents
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specter_core.memory.expert_cache import ExpertCache, SlotState
from specter_core.memory.expert_loader import ExpertLoader
from specter_core.memory.link import Priority, TransferState
from specter_core.prefetch.planner import Phase, PrefetchPlanner, Timings
from specter_core.prefetch.prefetcher import Prefetcher
from specter_core.types import ExpertKey
from specter_core.verify.ops import Adopt, Copy, Gemm, Release
from specter_core.verify.residency import ResidencyManager

LAYERS, EXPERTS, DEPTH = 3, 7, 6


class WindowMachine(RuleBasedStateMachine):
    """Draft, boundaries, verification layer by layer, next window; the link moves whenever it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: int | None = None  # next layer to verify; None while drafting
        self.drafted = 0
        self.started = False

    @precondition(lambda self: not self.started)
    @rule(
        slots=st.lists(st.integers(1, EXPERTS), min_size=LAYERS, max_size=LAYERS),
        staging=st.integers(0, 2),
        under_verify=st.booleans(),
        initial=st.integers(1, 3),
    )
    def build(self, slots, staging, under_verify, initial):
        self.cache = ExpertCache(slots, staging)
        self.link = ManualLink(1000)
        self.loader = ExpertLoader(self.cache, self.link)
        planner = PrefetchPlanner(initial)
        self.prefetcher = Prefetcher(planner, self.loader, under_verify=under_verify)
        self.residency = ResidencyManager(self.cache)
        self.started = True
        self.begin()

    def begin(self):
        self.layer, self.drafted = None, 0
        self.counters = torch.zeros(LAYERS, EXPERTS, dtype=torch.int32)
        before = len(self.link.submitted)
        boundary = self.prefetcher.begin_window(DEPTH)
        assert 1 <= boundary <= DEPTH and len(self.link.submitted) == before
        self.needed: set[ExpertKey] = set()

    @precondition(lambda self: self.started)
    @rule(pieces=st.integers(1, 5))
    def link_moves(self, pieces):
        for _ in range(pieces):
            self.link.step()

    @precondition(lambda self: self.started and self.layer is None and self.drafted < DEPTH)
    @rule(seed=st.integers(0, 10**6))
    def draft_a_token(self, seed):
        rng = random.Random(seed)
        self.drafted += 1
        for layer in range(LAYERS):
            for expert in rng.sample(range(EXPERTS), 2):
                self.counters[layer, expert] += 1
        at_boundary = self.drafted == self.prefetcher.next_boundary
        if at_boundary and self.prefetcher.wants_snapshot:
            plan = self.prefetcher.on_boundary(self.counters, self.drafted, Timings(1.0, 0.3))
            assert plan.phase is not Phase.COLD_START
            assert self.drafted < plan.next_boundary or self.drafted == DEPTH
            for layer, slots in enumerate(self.cache.slots_per_layer):
                assert sum(k.layer == layer for k in plan.order) <= slots

    @precondition(lambda self: self.started and self.layer is None and self.drafted == DEPTH)
    @rule()
    def end_of_draft(self):
        self.prefetcher.end_of_draft()
        assert self.prefetcher.under_verify or not self.loader.queued_keys()
        assert not self.prefetcher.wants_snapshot
        self.layer = 0

    @precondition(lambda self: self.started and self.layer is not None and self.layer < LAYERS)
    @rule(needed=st.sets(st.integers(0, EXPERTS - 1)), seed=st.integers(0, 1000))
    def verify_a_layer(self, needed, seed):
        layer, loader = self.layer, self.loader
        open_before = {t.key for t in self.link.submitted if t.state in (TransferState.QUEUED, TransferState.ISSUED)}
        late = self.prefetcher.before_layer(layer, sorted(needed))
        assert set(late) == {k.expert for k in open_before if k.layer == layer and k.expert in needed}
        for key in loader.queued_keys(layer):
            assert key.expert in needed, "a queued load that nobody needs is cancelled"
        assert all(
            t.priority is Priority.DEMAND
            for t in self.link.submitted
            if t.state is TransferState.QUEUED and t.key.layer == layer
        )
        plan = self.residency.plan_layer(layer, sorted(needed), None, late)
        assert set(plan.late) == set(late)
        self.run(plan, random.Random(seed))
        self.needed |= {ExpertKey(layer, e) for e in needed}
        self.layer = layer + 1

    def run(self, plan, rng):
        cache, loader = self.cache, self.loader
        computed = []
        for slot in plan.protects:
            cache.protect(slot)
        for op in plan.ops:
            if rng.random() < 0.3:
                self.link.step()
            match op:
                case Copy(key, slot):
                    if cache.state(slot) is SlotState.LOADING:
                        loader.wait(cache.key(slot))
                    loader.load(key, slot, Priority.DEMAND)
                    cache.protect(slot)
                case Gemm(key, slot, _):
                    if loader.is_open(key):
                        loader.wait(key)
                    assert cache.lookup(key) == slot
                    computed.append(key.expert)
                    cache.touch(key)
                    loader.mark_used(key)
                case Adopt(slot, victim):
                    cache.adopt(slot, plan.layer, victim)
                case Release(slot):
                    cache.release(slot)
                    if slot in cache.staging_slots:
                        cache.evict(slot)
        assert sorted(computed) == sorted(plan.hits + plan.late + plan.misses)

    @precondition(lambda self: self.started and self.layer == LAYERS)
    @rule()
    def next_window(self):
        assert not self.loader.queued_keys(), "nothing planned outlives its window"
        counters = self.prefetcher.end_window(self.needed)
        assert 0 <= counters.used <= counters.issued
        assert 0 <= counters.absent_planned <= counters.absent <= len(self.needed)
        self.begin()

    @invariant()
    def nothing_is_double(self):
        if not self.started:
            return
        self.cache.check_integrity()
        unfinished = [t for t in self.link.submitted if t.state in (TransferState.QUEUED, TransferState.ISSUED)]
        assert len({t.key for t in unfinished}) == len(unfinished), "an expert travels twice at once"
        assert len({t.slot for t in unfinished}) == len(unfinished)
        for transfer in unfinished:
            assert self.cache.lookup(transfer.key) == transfer.slot
            assert self.cache.state(transfer.slot) is SlotState.LOADING
        assert not any(self.cache.is_protected(s) for s in range(self.cache.slots))


WindowMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestWindowMachine = WindowMachine.TestCase


def world(residents: list[int], slots: int, under_verify: bool = True) -> tuple[Prefetcher, ManualLink]:
    cache = ExpertCache([slots])
    link = ManualLink(1000)
    loader = ExpertLoader(cache, link)
    for slot, expert in enumerate(residents):
        loader.load(ExpertKey(0, expert), slot, Priority.DEMAND)
    loader.drain()
    return Prefetcher(PrefetchPlanner(1), loader, under_verify=under_verify), link


def counts(**experts: int) -> torch.Tensor:
    row = [experts.get(f"e{e}", 0) for e in range(EXPERTS)]
    return torch.tensor([row], dtype=torch.int32)


def plan_window(prefetcher: Prefetcher, counters: torch.Tensor) -> None:
    prefetcher.begin_window(1)
    prefetcher.on_boundary(counters, 1, Timings(1.0, 1.0))
    prefetcher.end_of_draft()


def test_loads_end_with_drafting_in_the_papers_variant_and_victims_come_back():
    prefetcher, link = world([0, 1], 2, under_verify=False)
    plan_window(prefetcher, counts(e4=2, e5=1))
    cache = prefetcher.loader.cache
    assert sorted(residents(cache, 0)) == [ExpertKey(0, 0), ExpertKey(0, 1)]
    assert not prefetcher.loader.open_keys() and not link.step()


def test_an_issued_load_completes_although_drafting_has_ended():
    prefetcher, link = world([0, 1], 2, under_verify=False)
    prefetcher.begin_window(1)
    prefetcher.on_boundary(counts(e4=2, e5=1), 1, Timings(1.0, 1.0))
    link.step()
    prefetcher.end_of_draft()
    assert prefetcher.loader.open_keys() == [ExpertKey(0, 4)]
    link.drain()
    prefetcher.loader.reap()
    assert sorted(residents(prefetcher.loader.cache, 0)) == [ExpertKey(0, 1), ExpertKey(0, 4)]


def test_a_queued_load_becomes_a_demand_and_is_not_submitted_twice():
    prefetcher, link = world([0, 1], 2)
    plan_window(prefetcher, counts(e4=2, e5=1))
    submitted = len(link.submitted)
    assert prefetcher.before_layer(0, [4, 5]) == (4, 5)
    assert [t.priority for t in link.submitted[-2:]] == [Priority.DEMAND] * 2
    plan = ResidencyManager(prefetcher.loader.cache).plan_layer(0, [4, 5], None, (4, 5))
    assert not any(isinstance(op, Copy) for op in plan.ops)
    assert len(link.submitted) == submitted


def test_a_needed_load_does_not_overwrite_another_needed_expert():
    prefetcher, link = world([0], 1)
    plan_window(prefetcher, counts(e4=2))
    late = prefetcher.before_layer(0, [0, 4])
    assert late == (4,)
    plan = ResidencyManager(prefetcher.loader.cache).plan_layer(0, [0, 4], None, late)
    assert (plan.hits, plan.late, plan.misses) == ((0,), (4,), ())
    link.drain()
    assert link.counters.transfers == 1, "expert 0 is a hit: only its first load ever moved"


def test_a_later_plan_keeps_moves_and_drops_queued_loads():
    prefetcher, link = world([0, 1, 2], 3)
    prefetcher.begin_window(10)
    prefetcher.on_boundary(counts(e4=2, e5=1), 1, Timings(1.0, 0.1))
    first = {t.key.expert: t for t in link.submitted[-2:]}
    plan = prefetcher.on_boundary(counts(e4=3, e5=1, e0=2, e6=2), 2, Timings(1.0, 0.1))
    assert first[5].state is TransferState.CANCELLED
    assert {load.key.expert for load in plan.loads} | {k.expert for k in plan.kept} == {4, 6}
    assert prefetcher.loader.cache.lookup(ExpertKey(0, 0)) == 0, "a victim that is wanted again was never lost"
    link.drain()
    prefetcher.loader.reap()
    assert sorted(k.expert for k in residents(prefetcher.loader.cache, 0)) == [0, 4, 6]


def test_precision_and_recall_count_what_they_say():
    prefetcher, link = world([0, 1, 2], 3)
    prefetcher.begin_window(1)
    prefetcher.on_boundary(counts(e3=3, e4=2, e5=1), 1, Timings(1.0, 1.0))
    for _ in range(4):  # experts 3 and 4 arrive, 5 stays queued
        link.step()
    prefetcher.end_of_draft()
    prefetcher.before_layer(0, [3, 5, 6])
    served = {ExpertKey(0, 3), ExpertKey(0, 5)}
    assert prefetcher.end_window({ExpertKey(0, 6)}).used == 0, "only a rejected token needed expert 3"
    counters = prefetcher.end_window(served)
    assert (counters.issued, counters.used) == (2, 1)
    assert (counters.planned, counters.planned_used) == (3, 2), "expert 5 became a demand: a right prediction"
    assert (counters.absent, counters.absent_planned) == (3, 2)
    link.drain()
    assert prefetcher.end_window(served).promoted == 1


def test_an_expert_that_the_last_plan_dropped_was_not_predicted():
    prefetcher, _ = world([0, 1, 2], 3)
    prefetcher.begin_window(9)
    prefetcher.on_boundary(counts(e3=1), 1, Timings(1.0, 0.1))
    prefetcher.on_boundary(counts(e3=1, e4=2, e5=2, e6=2), 2, Timings(1.0, 0.1))
    prefetcher.end_of_draft()
    prefetcher.before_layer(0, [3, 4])
    counters = prefetcher.end_window(set())
    assert (counters.absent, counters.absent_planned) == (2, 1)


def test_loads_of_a_later_plan_travel_in_layer_order_with_the_kept_ones():
    cache, link = ExpertCache([2, 2]), ManualLink(1000)
    prefetcher = Prefetcher(PrefetchPlanner(1), ExpertLoader(cache, link))
    prefetcher.begin_window(9)
    counters = torch.zeros(2, EXPERTS, dtype=torch.int32)
    counters[1, 5] = 1
    prefetcher.on_boundary(counters, 1, Timings(1.0, 0.1))
    counters[0, 3], counters[1, 6] = 1, 2
    plan = prefetcher.on_boundary(counters, 2, Timings(1.0, 0.1))
    order = [ExpertKey(0, 3), ExpertKey(1, 6), ExpertKey(1, 5)]
    assert list(plan.order) == order and plan.kept == (ExpertKey(1, 5),)
    assert [t.key for t in link.queue.queued()] == order


@pytest.mark.parametrize("depth", [0, 1])
def test_a_window_without_a_boundary_counts_nothing(depth):
    prefetcher, _ = world([0], 1)
    assert prefetcher.begin_window(depth) == depth
    prefetcher.end_of_draft()
    prefetcher.before_layer(0, [0])
    counters = prefetcher.end_window(set())
    assert (counters.chunks, counters.issued, counters.absent) == (0, 0, 0)
