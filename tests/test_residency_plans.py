"""Layer plans are those of the plain planner that looks at every slot, for every cache state."""

from __future__ import annotations

import random
from unittest.mock import patch

from control_plane import residents
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_layer_pass import PlainLayerPass
from residency_worlds import EXPERTS, cases, world_of

from specter_core.memory.link import Priority
from specter_core.prefetch.need_history import NeedHistory
from specter_core.types import ExpertKey
from specter_core.verify import residency
from specter_core.verify.residency import ResidencyManager


@settings(max_examples=800, deadline=None)
@given(case=cases, arrived=st.booleans(), history=st.booleans(), staged=st.integers(0, 2), steps=st.integers(0, 3))
def test_plans_are_those_of_the_plain_layer_pass(case, arrived, history, staged, steps):
    """Whatever the cache holds: loads under way, experts that are computed already, staged ones of any layer."""
    world, rng, needed = (
        world_of(case["slots"], case["staging"], case["seed"]),
        random.Random(case["seed"]),
        case["needed"],
    )
    cache, loader = world.cache, world.loader
    if arrived:
        loader.drain()
    for slot in cache.staging_slots[:staged]:
        key = ExpertKey(rng.randrange(2), rng.randrange(EXPERTS))
        if cache.can_load(key, slot):
            loader.load(key, slot, Priority.PREFETCH)
    for _ in range(steps):
        world.link.step()
    loader.reap()
    rates = NeedHistory(2, EXPERTS, 2)
    for counts in (needed, {rng.randrange(EXPERTS): 2}):
        rates.observe(0, counts)
    done = [k.expert for k in residents(cache, 0) if k.expert in needed and rng.random() < 0.5]
    manager = ResidencyManager(
        cache, hit_first=case["hit_first"], policy=case["policy"], lookahead=case["lookahead"],
        history=rates if history else None,
    )  # fmt: skip
    late = [k.expert for k in loader.open_keys(0) if k.expert in needed]
    late += [e for e in needed if cache.lookup(ExpertKey(0, e)) is None and rng.random() < 0.2]
    plan = manager.plan_layer(0, sorted(needed), needed, late, done)
    with patch.object(residency, "LayerPass", PlainLayerPass):
        plain = manager.plan_layer(0, sorted(needed), needed, late, done)
    assert list(plan.ops) == list(plain.ops)
    assert sorted(plan.protects) == sorted(plain.protects)
    assert (plan.hits, plan.late, plan.misses) == (plain.hits, plain.late, plain.misses)
