"""Residency Manager: op lists keep the cache's promises for every cache state."""

from __future__ import annotations

import random

import pytest
from control_plane import ManualLink, residents
from hypothesis import given, settings
from hypothesis import strategies as st
from residency_worlds import EXPERTS, World, cases, plan_for, run_plan, world_of

from specter_core.memory.eviction import EvictionPolicy, count_then_recency, lru
from specter_core.memory.expert_cache import ExpertCache
from specter_core.memory.expert_loader import ExpertLoader
from specter_core.memory.link import Priority
from specter_core.prefetch.need_history import NeedHistory
from specter_core.types import ExpertKey
from specter_core.verify.ops import Adopt, Copy, Gemm, Release, Source, WaitSlotFree
from specter_core.verify.residency import ResidencyManager


@settings(max_examples=600, deadline=None)
@given(case=cases, delays=st.integers(0, 10**6))
def test_every_needed_expert_is_computed_once_whatever_the_link_does(case, delays):
    world = world_of(case["slots"], case["staging"], case["seed"])
    plan = plan_for(world, case)
    computed = run_plan(plan, world, random.Random(delays))
    assert sorted(computed) == sorted(case["needed"])
    if not case["hit_first"]:
        assert computed == sorted(computed)
    assert sorted(plan.hits + plan.late + plan.misses) == sorted(case["needed"])
    if case["hit_first"]:
        copies = [op.key.expert for op in plan.ops if isinstance(op, Copy)]
        assert sorted(copies) == sorted(plan.misses), "each miss is loaded once, nothing else is"


@settings(max_examples=200, deadline=None)
@given(case=cases, first=st.integers(0, 10**6), second=st.integers(0, 10**6))
def test_op_lists_are_equal_under_random_delays(case, first, second):
    """Windows of demand loads over two layers: what the link does in between changes no list."""
    lists = []
    for delays in (first, second):
        rng, world = random.Random(delays), world_of(case["slots"], case["staging"], case["seed"])
        world.loader.drain()
        manager = ResidencyManager(world.cache, hit_first=case["hit_first"], policy=case["policy"])
        routing, ops = random.Random(case["seed"]), []
        for window in range(3):
            for layer in range(2):
                needed = {e: routing.randint(1, 3) for e in routing.sample(range(EXPERTS), routing.randint(1, 6))}
                needed = case["needed"] if window == layer == 0 else needed
                world.loader.reap()
                plan = manager.plan_layer(layer, sorted(needed), needed)
                ops.append(plan)
                run_plan(plan, world, rng)
        lists.append(ops)
    assert lists[0] == lists[1]


@settings(max_examples=200, deadline=None)
@given(case=cases)
def test_planning_changes_nothing_and_repeats_itself(case):
    world = world_of(case["slots"], case["staging"], case["seed"])
    cache = world.cache
    before = [(cache.key(s), cache.state(s), cache.recency(s)) for s in range(cache.slots)]
    assert plan_for(world, case) == plan_for(world, case)
    assert before == [(cache.key(s), cache.state(s), cache.recency(s)) for s in range(cache.slots)]


def settled(case) -> World:
    world = world_of(case["slots"], case["staging"], case["seed"])
    world.loader.drain()
    return world


@settings(max_examples=600, deadline=None)
@given(case=cases, staging=st.integers(1, 3), delays=st.integers(0, 1000))
def test_with_staging_the_cache_ends_with_the_experts_of_the_most_rows(case, staging, delays):
    case = {**case, "staging": staging, "hit_first": True, "policy": count_then_recency}
    world = world_of(case["slots"], staging, case["seed"])
    present = map(world.cache.key, world.cache.layer_slots(0))
    rows = {key.expert: 0 for key in present if key is not None} | case["needed"]
    run_plan(plan_for(world, case), world, random.Random(delays))
    world.loader.drain()
    left = sorted((rows[key.expert] for key in residents(world.cache, 0)), reverse=True)
    assert left == sorted(rows.values(), reverse=True)[: case["slots"]]


@settings(max_examples=300, deadline=None)
@given(case=cases, delays=st.integers(0, 1000))
def test_lru_leaves_the_experts_computed_last(case, delays):
    case = {**case, "staging": 0, "hit_first": True, "policy": lru}
    world = settled(case)
    used = {key.expert: world.cache.recency(world.cache.lookup(key)) for key in residents(world.cache, 0)}
    computed = run_plan(plan_for(world, case), world, random.Random(delays))
    used |= {expert: 10**6 + i for i, expert in enumerate(computed)}
    expected = sorted(used, key=used.__getitem__, reverse=True)[: case["slots"]]
    assert sorted(key.expert for key in residents(world.cache, 0)) == sorted(expected)


@settings(max_examples=200, deadline=None)
@given(case=cases)
def test_hits_come_first_and_free_slots_are_filled_before_any_computation(case):
    case = {**case, "hit_first": True}
    world = settled(case)
    plan = plan_for(world, case)
    sources = [op.source for op in plan.ops if isinstance(op, Gemm)]
    assert sources == sorted(sources, key=[Source.HIT, Source.LATE, Source.MISS].index)
    first_gemm = next((i for i, op in enumerate(plan.ops) if isinstance(op, Gemm)), len(plan.ops))
    early = sum(isinstance(op, Copy) for op in plan.ops[:first_gemm])
    own = case["slots"] - len(plan.hits)
    assert early >= min(len(plan.misses), own), "a slot nobody needs waits for nothing"


def resident_world(slots: int, experts: list[int], staging: int = 0) -> World:
    cache = ExpertCache([slots], staging)
    link = ManualLink(1024)
    loader = ExpertLoader(cache, link)
    for slot, expert in enumerate(experts):
        loader.load(ExpertKey(0, expert), slot, Priority.DEMAND)
    loader.drain()
    return World(cache, link, loader)


def test_a_single_slot_rolls_through_all_needed_experts():
    world = resident_world(1, [2])
    plan = ResidencyManager(world.cache).plan_layer(0, [1, 2, 5])
    key = [ExpertKey(0, e) for e in range(6)]
    assert plan.ops == (
        *(Gemm(key[2], 0, Source.HIT), Release(0)),
        *(WaitSlotFree(0), Copy(key[1], 0), Gemm(key[1], 0, Source.MISS), Release(0)),
        *(WaitSlotFree(0), Copy(key[5], 0), Gemm(key[5], 0, Source.MISS), Release(0)),
    )
    assert (plan.hits, plan.late, plan.misses) == ((2,), (), (1, 5))
    assert run_plan(plan, world, random.Random(0)) == [2, 1, 5]


def test_copies_into_spare_slots_start_before_the_hits_are_computed():
    world = resident_world(4, [0, 1, 2, 3])
    plan = ResidencyManager(world.cache).plan_layer(0, [0, 1, 5, 6])
    copies = [op for op in plan.ops if isinstance(op, Copy)]
    assert [type(op) for op in plan.ops[:5]] == [WaitSlotFree, Copy, WaitSlotFree, Copy, Gemm]
    assert {op.slot for op in copies} == {2, 3}


def test_without_staging_cheap_misses_cost_only_as_many_valuable_experts_as_the_link_needs():
    world = resident_world(4, [0, 1, 2, 3])
    needed = {0: 9, 1: 8, 2: 7, 3: 6, 4: 1, 5: 1, 6: 1, 7: 1}
    for lookahead, kept in ((1, {0, 1, 2}), (2, {0, 1})):
        world = resident_world(4, [0, 1, 2, 3])
        plan = ResidencyManager(world.cache, lookahead=lookahead).plan_layer(0, sorted(needed), needed)
        run_plan(plan, world, random.Random(0))
        assert {k.expert for k in residents(world.cache, 0)} & {0, 1, 2, 3} == kept


def test_hits_are_computed_before_waiting_for_a_load_that_nobody_needs():
    world = resident_world(2, [0])
    world.loader.load(ExpertKey(0, 7), 1, Priority.PREFETCH)
    world.link.step()
    plan = ResidencyManager(world.cache).plan_layer(0, [0, 3])
    assert [type(op) for op in plan.ops] == [Gemm, Release, WaitSlotFree, Copy, Gemm, Release]
    assert world.cache.key(plan.ops[3].slot) == ExpertKey(0, 7), "the hit is worth keeping, the other is not"


def test_an_issued_prefetch_that_nobody_needs_is_waited_for_and_then_evicted():
    world = resident_world(1, [])
    world.loader.load(ExpertKey(0, 7), 0, Priority.PREFETCH)
    world.link.step()
    plan = ResidencyManager(world.cache).plan_layer(0, [3])
    assert run_plan(plan, world, random.Random(1)) == [3]
    assert residents(world.cache, 0) == [ExpertKey(0, 3)]
    assert [t.key.expert for t in world.link.submitted] == [7, 3]


def test_an_expert_that_finds_no_staging_slot_does_not_hold_back_one_worth_keeping():
    world = world_of(slots=1, staging=1, seed=0)
    cache, loader = world.cache, world.loader
    loader.drain()
    cache.clear()
    loader.load(ExpertKey(0, 7), 0, Priority.PREFETCH)
    world.link.step()
    plan = ResidencyManager(cache).plan_layer(0, [1, 2, 3], {1: 1, 2: 2, 3: 3})
    staging = cache.staging_slots[0]
    assert [(op.key.expert, op.slot) for op in plan.ops if isinstance(op, Copy)] == [(1, staging), (3, 0), (2, staging)]
    kinds = [(type(op), op.key.expert) for op in plan.ops if isinstance(op, Copy | Gemm)]
    assert kinds[:3] == [(Copy, 1), (Copy, 3), (Gemm, 1)]


def test_experts_that_are_all_loading_are_late_and_loaded_once():
    world = resident_world(3, [])
    for slot, expert in enumerate((4, 0, 6)):
        world.loader.load(ExpertKey(0, expert), slot, Priority.PREFETCH)
    world.link.step()
    late = [k.expert for k in world.loader.open_keys(0)]
    plan = ResidencyManager(world.cache).plan_layer(0, [0, 4, 6], None, late)
    assert (plan.hits, plan.late, plan.misses) == ((), (0, 4, 6), ())
    assert run_plan(plan, world, random.Random(2)) == [4, 0, 6], "in order of arrival"
    assert len(world.link.submitted) == 3


def test_without_hit_first_a_single_slot_still_computes_in_ascending_order():
    world = resident_world(1, [5])
    plan = ResidencyManager(world.cache, hit_first=False).plan_layer(0, [3, 5])
    assert plan.hits == (5,)
    assert run_plan(plan, world, random.Random(0)) == [3, 5]
    assert [t.key.expert for t in world.link.submitted] == [5, 3, 5], "the hit had to be loaded again"


@settings(max_examples=100, deadline=None)
@given(case=cases, tokens=st.lists(st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=3), max_size=5))
def test_token_after_token_in_one_layer_pass(case, tokens):
    world = world_of(case["slots"], case["staging"], case["seed"])
    rng = random.Random(case["seed"])
    for experts in tokens:
        token = {**case, "needed": dict.fromkeys(sorted(experts), 1)}
        assert sorted(run_plan(plan_for(world, token), world, rng)) == sorted(experts)


def test_policies_are_interchangeable_functions():
    policy: EvictionPolicy = lru
    world = resident_world(2, [0, 1])
    plan = ResidencyManager(world.cache, policy=policy).plan_layer(0, [1, 4], {1: 9, 4: 1})
    run_plan(plan, world, random.Random(0))
    assert residents(world.cache, 0) == [ExpertKey(0, 4), ExpertKey(0, 1)]


@pytest.mark.parametrize("needed", [[2, 1], [1, 1]])
def test_needed_experts_must_be_distinct_and_ascending(needed):
    with pytest.raises(AssertionError):
        ResidencyManager(ExpertCache([2])).plan_layer(0, needed)


@settings(max_examples=300, deadline=None)
@given(case=cases, history=st.booleans(), delays=st.integers(0, 10**6))
def test_hits_that_are_computed_already_need_no_op_and_may_be_overwritten(case, history, delays):
    world, needed, rng = settled(case), case["needed"], random.Random(delays)
    cache, rates = world.cache, NeedHistory(2, EXPERTS, 2)
    rates.observe(0, needed)
    held = [key.expert for key in residents(cache, 0)]
    done = [e for e in needed if e in held and rng.random() < 0.7]
    manager = ResidencyManager(cache, hit_first=case["hit_first"], history=rates if history else None)
    plan = manager.plan_layer(0, sorted(needed), needed, (), done)
    computed = run_plan(plan, world, rng)
    assert sorted(computed) == sorted(set(needed) - set(done))
    assert sorted(plan.hits) == sorted(e for e in needed if e in held)
    assert not {op.slot for op in plan.ops if isinstance(op, Gemm) and op.key.expert in done}


def test_a_staged_expert_worth_keeping_changes_places_with_the_least_valuable():
    cache, link = ExpertCache([2], staging=1), ManualLink(1024)
    world = World(cache, link, ExpertLoader(cache, link))
    for expert, slot in ((0, 0), (1, 1), (2, 2)):
        world.loader.load(ExpertKey(0, expert), slot, Priority.PREFETCH)
    world.loader.drain()
    plan = ResidencyManager(cache).plan_layer(0, [0, 2], {0: 1, 2: 5})
    assert Adopt(slot=2, victim=1) in plan.ops
    assert run_plan(plan, world, random.Random(0)) == [0, 2]
    assert {key.expert for key in residents(cache, 0)} == {0, 2} and list(cache.staging_slots) == [1]
    plan = ResidencyManager(cache).plan_layer(0, [0, 2], {0: 1, 2: 5})
    assert not any(isinstance(op, Adopt) for op in plan.ops)
