"""Planning and keeping by need: no prefetch trades one needed expert for another."""

from __future__ import annotations

import random

import pytest
import torch
from control_plane import ManualLink, residents
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_worlds import EXPERTS, loaded_world, random_counters

from specter_core.memory.expert_cache import ExpertCache, SlotState
from specter_core.memory.expert_loader import ExpertLoader
from specter_core.memory.link import Priority
from specter_core.prefetch.need_history import NeedHistory
from specter_core.prefetch.need_planner import NeedPlanner
from specter_core.prefetch.planner import Phase, PlannedLoad, PrefetchPlan, Timings
from specter_core.prefetch.prefetcher import Prefetcher
from specter_core.types import ExpertKey

TOP_K = 2


def history_of(layers: int, seed: int) -> NeedHistory:
    rng, history = random.Random(seed), NeedHistory(layers, EXPERTS, TOP_K)
    for _ in range(rng.randrange(4)):
        for layer in range(layers):
            history.observe(layer, {e: rng.randint(1, 9) for e in sorted(rng.sample(range(EXPERTS), 4))})
    return history


def plan_of(planner: NeedPlanner, loader: ExpertLoader, counters: torch.Tensor, drafted: int = 4) -> PrefetchPlan:
    planner.begin_window(16)
    return planner.plan(counters, loader.cache, loader.queued_keys(), Timings(1.0, 0.5), drafted)


worlds = st.tuples(st.lists(st.integers(1, EXPERTS), min_size=1, max_size=4), st.integers(0, 2), st.integers(0, 10**6))


@settings(deadline=None, max_examples=300)
@given(world=worlds, seed=st.integers(0, 10**6))
def test_no_counted_or_likely_expert_is_evicted_for_a_prefetch(world, seed):
    slots_per_layer, staging, world_seed = world
    loader, _ = loaded_world(slots_per_layer, staging, world_seed)
    cache, counters = loader.cache, random_counters(len(slots_per_layer), seed)
    history = history_of(len(slots_per_layer), seed)
    queued = loader.queued_keys()
    before = [(cache.key(s), cache.state(s), cache.recency(s)) for s in range(cache.slots)]
    planner = NeedPlanner(2, history)
    plan = plan_of(planner, loader, counters)
    assert plan == plan_of(NeedPlanner(2, history), loader, counters), "same arguments, same plan"
    assert before == [(cache.key(s), cache.state(s), cache.recency(s)) for s in range(cache.slots)]
    chance = history.chance(16 + 1 - 4)
    for load in plan.loads:
        assert counters[load.key] > 0, "only counted experts are planned"
        assert cache.lookup(load.key) is None or load.key in plan.cancelled
        assert load.slot in cache.layer_slots(load.key.layer) and not cache.is_protected(load.slot)
        if load.victim is None:
            assert cache.state(load.slot) is SlotState.EMPTY
        else:
            assert cache.key(load.slot) == load.victim and cache.state(load.slot) is SlotState.RESIDENT
            assert counters[load.victim] == 0 and chance[load.victim] <= 0.5
    assert len({load.slot for load in plan.loads}) == len(plan.loads)
    assert set(plan.kept) | set(plan.cancelled) == set(queued) and not set(plan.kept) & set(plan.cancelled)
    for key in plan.cancelled:
        slot = cache.lookup(key)
        former = None if slot is None else cache.previous(slot)
        assert former is not None and counters[former.key] > 0, "only to give a counted expert its slot back"
    rank = [(k.layer, -int(counters[k]), k.expert) for k in plan.order]
    assert rank == sorted(rank) and set(plan.order) == {load.key for load in plan.loads} | set(plan.kept)


def plain_plan(
    counters: torch.Tensor, loader: ExpertLoader, history: NeedHistory, tokens: int
) -> tuple[list[PlannedLoad], list[ExpertKey], list[ExpertKey]]:
    """Loads, cancelled loads and order as `NeedPlanner` describes them, one slot after the other."""
    cache, counts, chance = loader.cache, counters.tolist(), history.chance(tokens)
    present = {key for slot in range(cache.slots) if (key := cache.key(slot)) is not None}
    cancelled, kept = [], []
    for queued in loader.queued_keys():
        former = cache.previous(cache.lookup(queued))
        if former is not None and counters[former.key] > 0 and former.key not in present:
            cancelled.append(queued)
            present = present - {queued} | {former.key}
        else:
            kept.append(queued)
    loads = []
    for layer, row in enumerate(counts):
        wanted = [ExpertKey(layer, e) for e in range(EXPERTS) if row[e] > 0 and ExpertKey(layer, e) not in present]
        wanted.sort(key=lambda key: -counts[key.layer][key.expert])
        own = cache.layer_slots(layer)
        places = [(slot, None) for slot in own if cache.state(slot) is SlotState.EMPTY]
        idle = [(slot, cache.key(slot)) for slot in own if cache.state(slot) is SlotState.RESIDENT]
        idle = [(slot, key) for slot, key in idle if row[key.expert] == 0 and chance[key] <= 0.5]
        places += sorted(idle, key=lambda place: (chance[place[1]], place[1].expert))
        loads += [PlannedLoad(key, slot, victim) for key, (slot, victim) in zip(wanted, places, strict=False)]
    order = sorted(
        [*kept, *(load.key for load in loads)], key=lambda k: (k.layer, -counts[k.layer][k.expert], k.expert)
    )
    return loads, cancelled, order


@settings(deadline=None, max_examples=300)
@given(world=worlds, seed=st.integers(0, 10**6), drafted=st.integers(0, 16))
def test_a_plan_is_what_a_walk_over_the_slots_finds(world, seed, drafted):
    slots_per_layer, staging, world_seed = world
    loader, _ = loaded_world(slots_per_layer, staging, world_seed)
    counters = random_counters(len(slots_per_layer), seed)
    history = history_of(len(slots_per_layer), seed)
    plan = plan_of(NeedPlanner(2, history), loader, counters, drafted)
    loads, cancelled, order = plain_plan(counters, loader, history, 16 + 1 - drafted)
    assert (list(plan.loads), list(plan.cancelled), list(plan.order)) == (loads, cancelled, order)
    assert plan.next_boundary == min(16, drafted + max(1, int(len(order) * 0.5)))


@settings(deadline=None, max_examples=100)
@given(world=worlds, seeds=st.lists(st.integers(0, 10**6), min_size=1, max_size=4), steps=st.integers(0, 6))
def test_plans_of_a_window_use_every_slot_that_nothing_likely_holds(world, seeds, steps):
    slots_per_layer, staging, world_seed = world
    loader, link = loaded_world(slots_per_layer, staging, world_seed)
    cache, layers = loader.cache, len(slots_per_layer)
    for slot in range(cache.slots):
        while cache.is_protected(slot):
            cache.release(slot)
    link.drain()
    loader.reap()
    history = NeedHistory(layers, EXPERTS, TOP_K)
    history.rate[:] = 0.0  # nothing is likely without a count
    prefetcher = Prefetcher(NeedPlanner(1, history), loader, stage_ahead=True)
    prefetcher.begin_window(100)
    counters = torch.zeros(layers, EXPERTS, dtype=torch.int32)
    for drafted, seed in enumerate(seeds):
        counters += random_counters(layers, seed)
        prefetcher.phase = Phase.PREFETCH_OVERLAP if drafted else Phase.COLD_START
        prefetcher.on_boundary(counters, drafted + 1, Timings(1.0, 0.1))
        cache.check_integrity()
        for _ in range(steps):
            link.step()
    loader.drain()
    for layer in range(layers):
        held = {k.expert for k in residents(cache, layer)} | {
            k.expert for s in cache.staging_slots if (k := cache.key(s)) is not None and k.layer == layer
        }
        counted = {e for e in range(EXPERTS) if counters[layer, e] > 0}
        uncounted = [k for k in residents(cache, layer) if k.expert not in counted]
        assert counted <= held or not uncounted


def test_history_follows_what_was_needed_and_forgets_by_token():
    history = NeedHistory(1, 4, 1, decay_per_token=0.5)
    assert history.rate[0].tolist() == [0.25] * 4
    history.observe(0, {2: 1})
    assert history.rate[0].tolist() == [0.125, 0.125, 0.625, 0.125]
    history.observe(0, {0: 1, 1: 1})  # two tokens
    assert history.rate[0].tolist() == pytest.approx([0.40625, 0.40625, 0.15625, 0.03125])
    assert history.rate[0].sum() == pytest.approx(1.0)
    assert history.chance(2)[0, 0] == pytest.approx(1 - (1 - 0.40625) ** 2)
    assert not history.chance(0).any()


def test_staging_slots_take_what_the_next_layer_will_miss():
    cache, link = ExpertCache([1, 1], staging=2), ManualLink(1024)
    loader = ExpertLoader(cache, link)
    for layer in range(2):
        loader.load(ExpertKey(layer, 0), cache.layer_slots(layer)[0], Priority.DEMAND)
    loader.drain()
    prefetcher = Prefetcher(NeedPlanner(1, NeedHistory(2, EXPERTS, 1)), loader, stage_ahead=True)
    prefetcher.begin_window(1)
    counters = torch.zeros(2, EXPERTS, dtype=torch.int32)
    counters[:, :4] = torch.tensor([5, 3, 1, 2])
    prefetcher.on_boundary(counters, 1, Timings(1.0, 1.0))
    prefetcher.end_of_draft()
    assert loader.queued_keys() == [ExpertKey(0, 2), ExpertKey(0, 3)], "the least counted first"
    prefetcher.prepare_layer(0)
    assert prefetcher.before_layer(0, [0, 3]) == (3,)
    assert loader.queued_keys() == [ExpertKey(0, 3)], "what is not needed gives its slot back"
    loader.drain()
    prefetcher.prepare_layer(1)
    assert {cache.key(s) for s in cache.staging_slots} == {ExpertKey(1, 2), ExpertKey(1, 3)}
    assert residents(cache, 0) == [ExpertKey(0, 0)] and residents(cache, 1) == [ExpertKey(1, 0)]
    cache.check_integrity()
