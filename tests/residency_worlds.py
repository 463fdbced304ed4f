"""Caches in any state, and layer plans run on them: what the tests of the Residency Manager share."""

from __future__ import annotations

import random
from dataclasses import dataclass

from control_plane import ManualLink
from hypothesis import strategies as st

from specter_core.memory.eviction import count_then_recency, lru
from specter_core.memory.expert_cache import ExpertCache, SlotState
from specter_core.memory.expert_loader import ExpertLoader
from specter_core.memory.link import Priority
from specter_core.types import ExpertKey
from specter_core.verify.ops import Adopt, Copy, Gemm, Release, Source, WaitSlotFree
from specter_core.verify.residency import LayerPlan, ResidencyManager

EXPERTS = 8


@dataclass
class World:
    cache: ExpertCache
    link: ManualLink
    loader: ExpertLoader


def world_of(slots: int, staging: int, seed: int, layers: int = 2) -> World:
    """A cache in a random state: empty, resident and loading slots (queued, issued and half-way)."""
    rng = random.Random(seed)
    cache = ExpertCache([slots] * layers, staging)
    link = ManualLink(1024)
    loader = ExpertLoader(cache, link)
    for layer in range(layers):
        experts = rng.sample(range(EXPERTS), k=min(slots, EXPERTS))
        for slot, expert in zip(cache.layer_slots(layer), experts, strict=False):
            if rng.random() < 0.8:
                loader.load(ExpertKey(layer, expert), slot, Priority.DEMAND)
    loader.drain()
    for layer in range(layers):
        absent = [e for e in range(EXPERTS) if cache.lookup(ExpertKey(layer, e)) is None]
        for slot in cache.layer_slots(layer):
            if absent and rng.random() < 0.4:
                key = ExpertKey(layer, absent.pop(rng.randrange(len(absent))))
                loader.load(key, slot, Priority.PREFETCH)
    for _ in range(rng.randrange(4)):
        link.step()
    cache.check_integrity()
    return World(cache, link, loader)


def run_plan(plan: LayerPlan, world: World, rng: random.Random) -> list[int]:
    """Run the list with a link that moves at random moments; returns the experts in order of computation."""
    cache, loader = world.cache, world.loader
    computed = []
    for slot in plan.protects:
        cache.protect(slot)
    for op in plan.ops:
        for _ in range(rng.randrange(3)):
            world.link.step()
        if rng.random() < 0.3:
            loader.reap()
        match op:
            case WaitSlotFree(slot):
                assert not cache.is_protected(slot)
                key = cache.key(slot)
                if key is not None and cache.state(slot) is SlotState.LOADING:
                    loader.wait(key)
            case Copy(key, slot):
                assert not cache.is_protected(slot), "a protected slot would be evicted"
                loader.load(key, slot, Priority.DEMAND)
                cache.protect(slot)
            case Gemm(key, slot, source):
                if source is Source.HIT:
                    assert cache.state(slot) is SlotState.PROTECTED
                elif loader.is_open(key):
                    loader.wait(key)
                assert cache.lookup(key) == slot and cache.is_protected(slot)
                cache.touch(key)
                computed.append(key.expert)
            case Adopt(slot, victim):
                cache.adopt(slot, plan.layer, victim)
            case Release(slot):
                cache.release(slot)
                if slot in cache.staging_slots:
                    cache.evict(slot)
        cache.check_integrity()
    assert not any(cache.is_protected(slot) for slot in range(cache.slots))
    assert all(cache.key(slot) is None for slot in cache.staging_slots)
    return computed


cases = st.fixed_dictionaries(
    {
        "slots": st.integers(1, EXPERTS),
        "staging": st.integers(0, 3),
        "seed": st.integers(0, 10**6),
        "needed": st.dictionaries(st.integers(0, EXPERTS - 1), st.integers(1, 5)),
        "hit_first": st.booleans(),
        "policy": st.sampled_from([lru, count_then_recency]),
        "lookahead": st.integers(1, 3),
    }
)


def plan_for(world, case) -> LayerPlan:
    manager = ResidencyManager(
        world.cache,
        hit_first=case["hit_first"],
        policy=case["policy"],
        lookahead=case["lookahead"],
    )
    needed = case["needed"]
    late = [k.expert for k in world.loader.open_keys(0) if k.expert in needed]
    return manager.plan_layer(0, sorted(needed), needed, late)
