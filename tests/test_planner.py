"""Prefetch Planner: a pure function whose plans never ask for more than the cache can hold."""

from __future__ import annotations

import pytest
import torch
from control_plane import ManualLink, residents
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_worlds import EXPERTS, loaded_world, random_counters

from specter_core.memory.expert_cache import ExpertCache, SlotState
from specter_core.memory.expert_loader import ExpertLoader
from specter_core.prefetch.planner import Phase, PrefetchPlan, PrefetchPlanner, Timings, top_experts
from specter_core.prefetch.prefetcher import Prefetcher
from specter_core.types import ExpertKey

worlds = st.tuples(st.lists(st.integers(1, EXPERTS), min_size=1, max_size=4), st.integers(0, 2), st.integers(0, 10**6))


def plan_of(loader: ExpertLoader, counters: torch.Tensor, depth: int = 16, drafted: int = 4) -> PrefetchPlan:
    planner = PrefetchPlanner(4)
    planner.begin_window(depth)
    return planner.plan(counters, loader.cache, loader.queued_keys(), Timings(1.0, 0.5), drafted)


def snapshot(loader: ExpertLoader) -> list[object]:
    cache = loader.cache
    return [(cache.key(s), cache.state(s), cache.recency(s), cache.previous(s)) for s in range(cache.slots)]


@settings(deadline=None, max_examples=300)
@given(world=worlds, seed=st.integers(0, 10**6))
def test_a_plan_never_exceeds_the_slots_and_takes_only_what_nobody_wants(world, seed):
    slots_per_layer, staging, world_seed = world
    loader, _ = loaded_world(slots_per_layer, staging, world_seed)
    cache, counters = loader.cache, random_counters(len(slots_per_layer), seed)
    queued = loader.queued_keys()
    before = snapshot(loader)
    plan = plan_of(loader, counters)
    assert plan == plan_of(loader, counters), "same arguments, same plan"
    assert snapshot(loader) == before, "planning changes nothing"

    top = {
        ExpertKey(layer, expert)
        for layer, slots in enumerate(slots_per_layer)
        for expert in sorted(range(EXPERTS), key=lambda e, at=layer: (-int(counters[at, e]), e))[:slots]
        if counters[layer, expert] > 0
    }
    loaded = [load.key for load in plan.loads]
    assert set(plan.order) == set(loaded) | set(plan.kept) and len(set(plan.order)) == len(plan.order)
    assert set(plan.order) <= top
    assert set(plan.kept) | set(plan.cancelled) == set(queued) and not set(plan.kept) & set(plan.cancelled)
    assert not set(plan.kept) & set(loaded), "kept loads are not resubmitted"
    assert len({load.slot for load in plan.loads}) == len(plan.loads)
    rank = [(k.layer, -int(counters[k.layer, k.expert]), k.expert) for k in plan.order]
    assert rank == sorted(rank), "layer order, then count, then id"
    for load in plan.loads:
        assert load.slot in cache.layer_slots(load.key.layer)
        assert cache.lookup(load.key) is None or load.key in plan.cancelled
        assert not cache.is_protected(load.slot)
        assert cache.state(load.slot) is not SlotState.LOADING or cache.key(load.slot) in plan.cancelled
        assert load.victim not in top
    for layer, slots in enumerate(slots_per_layer):
        planned = sum(k.layer == layer for k in plan.order)
        held = sum(k in top and k not in queued for k in map(cache.key, cache.layer_slots(layer)) if k)
        assert planned + held <= slots


@settings(deadline=None, max_examples=200)
@given(world=worlds, seed=st.integers(0, 10**6))
def test_victims_are_the_least_valuable_residents(world, seed):
    slots_per_layer, staging, world_seed = world
    loader, link = loaded_world(slots_per_layer, staging, world_seed)
    link.drain()
    loader.reap()
    cache, counters = loader.cache, random_counters(len(slots_per_layer), seed)
    plan = plan_of(loader, counters)
    for layer in range(len(slots_per_layer)):
        mine = [load for load in plan.loads if load.key.layer == layer]
        top = set(top_experts(counters[layer].tolist(), slots_per_layer[layer]))
        taken = {load.slot for load in mine}
        value = {
            s: (int(counters[layer, key.expert]), cache.recency(s))
            for s in cache.layer_slots(layer)
            if (key := cache.key(s)) is not None and not cache.is_protected(s) and key.expert not in top
        }
        victims = [value[s] for s in taken if s in value]
        spared = [v for s, v in value.items() if s not in taken]
        assert not victims or not spared or max(victims) < min(spared)
        if victims:
            assert not set(cache.free_slots(layer)) - taken, "empty slots are used first"


@settings(deadline=None, max_examples=200)
@given(world=worlds, seeds=st.lists(st.integers(0, 10**6), min_size=1, max_size=4), steps=st.integers(0, 6))
def test_applied_plans_leave_the_top_experts_in_the_cache(world, seeds, steps):
    slots_per_layer, staging, world_seed = world
    loader, link = loaded_world(slots_per_layer, staging, world_seed)
    cache = loader.cache
    for slot in range(cache.slots):
        while cache.is_protected(slot):
            cache.release(slot)
    link.drain()
    loader.reap()
    prefetcher = Prefetcher(PrefetchPlanner(1), loader)
    prefetcher.begin_window(100)
    counters = torch.zeros(len(slots_per_layer), EXPERTS, dtype=torch.int32)
    for drafted, seed in enumerate(seeds):
        counters += random_counters(len(slots_per_layer), seed)
        prefetcher.phase = Phase.PREFETCH_OVERLAP if drafted else Phase.COLD_START
        prefetcher.on_boundary(counters, drafted + 1, Timings(1.0, 0.1))
        cache.check_integrity()
        for _ in range(steps if drafted + 1 < len(seeds) else 0):
            link.step()
    issued_before = [t.key for t in link.submitted]
    loader.drain()
    cache.check_integrity()
    for layer, slots in enumerate(slots_per_layer):
        top = {ExpertKey(layer, e) for e in top_experts(counters[layer].tolist(), slots)}
        missing = top - set(residents(cache, layer))
        if steps == 0:
            assert not missing
        unwanted = [k for k in residents(cache, layer) if k not in top and k in issued_before]
        assert len(missing) <= len(unwanted), "only a slot that was already being filled can be in the way"


def drive_window(step_ms: float, transfer_ms: float, depth: int, slots: int) -> list[tuple[int, Phase]]:
    """Boundaries and phases of a window in which each draft token brings one new expert per layer."""
    layers = 3
    loader = ExpertLoader(ExpertCache([slots] * layers), ManualLink(1024))
    prefetcher = Prefetcher(PrefetchPlanner(2), loader)
    boundary = prefetcher.begin_window(depth)
    assert prefetcher.phase is Phase.COLD_START and not loader.queued_keys()
    passed = []
    while prefetcher.wants_snapshot:
        counters = torch.zeros(layers, EXPERTS, dtype=torch.int32)
        for token in range(boundary):
            counters[:, token % EXPERTS] += 1
        prefetcher.on_boundary(counters, boundary, Timings(step_ms, transfer_ms))
        loader.drain()
        passed.append((boundary, prefetcher.phase))
        boundary = prefetcher.next_boundary
    assert boundary == depth
    return passed


def test_a_slow_draft_has_at_least_two_adaptive_chunks():
    passed = drive_window(step_ms=5.0, transfer_ms=1.0, depth=16, slots=8)
    assert [phase for _, phase in passed].count(Phase.PREFETCH_OVERLAP) >= 2
    assert passed[-1][1] is Phase.FINAL_CLEANUP
    assert [b for b, _ in passed] == sorted({b for b, _ in passed})


def test_a_fast_draft_runs_out_of_tokens_in_one_chunk():
    assert drive_window(step_ms=0.1, transfer_ms=5.0, depth=16, slots=8) == [(2, Phase.FINAL_CLEANUP)]


def test_cleanup_starts_when_the_batch_covers_the_remaining_slots():
    assert drive_window(step_ms=5.0, transfer_ms=1.0, depth=16, slots=2) == [(2, Phase.FINAL_CLEANUP)]


@settings(deadline=None)
@given(
    step_ms=st.floats(0.01, 50),
    transfer_ms=st.floats(0, 50),
    depth=st.integers(1, 32),
    initial=st.integers(1, 8),
    seed=st.integers(0, 1000),
)
def test_chunk_length_matches_the_transfer_time(step_ms, transfer_ms, depth, initial, seed):
    counters = random_counters(2, seed)
    planner = PrefetchPlanner(initial)
    drafted = planner.begin_window(depth)
    assert drafted == min(initial, depth)
    plan = planner.plan(counters, ExpertCache([4, 4]), (), Timings(step_ms, transfer_ms), drafted)
    assert drafted <= plan.next_boundary <= depth
    if plan.phase is Phase.PREFETCH_OVERLAP:
        matched = round(len(plan.loads) * transfer_ms / step_ms)
        assert plan.next_boundary - drafted == max(1, matched)
        assert plan.next_boundary < depth
    else:
        assert plan.next_boundary == depth


def test_only_counted_experts_are_planned_and_ties_go_to_the_lower_id():
    assert top_experts([0, 2, 3, 2, 0, 3], 3) == [2, 5, 1]
    assert top_experts([0, 0, 1], 3) == [2]


@pytest.mark.parametrize("under_verify", [False, True])
def test_cleanup_takes_no_further_snapshot_while_drafting(under_verify):
    loader = ExpertLoader(ExpertCache([2]), ManualLink(1024))
    prefetcher = Prefetcher(PrefetchPlanner(2), loader, under_verify=under_verify)
    prefetcher.begin_window(4)
    counters = torch.ones(1, EXPERTS, dtype=torch.int32)
    prefetcher.on_boundary(counters, 2, Timings(1.0, 1.0))
    assert not prefetcher.wants_snapshot
    with pytest.raises(AssertionError):
        prefetcher.on_boundary(counters, 3, Timings(1.0, 1.0))
    if under_verify:
        prefetcher.on_boundary(counters, 4, Timings(1.0, 1.0))
    else:
        with pytest.raises(AssertionError):
            prefetcher.on_boundary(counters, 4, Timings(1.0, 1.0))
