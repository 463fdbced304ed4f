"""Expert cache: no sequence of legal steps breaks an invariant, and illegal ones are refused."""

from __future__ import annotations

import pytest
from control_plane import residents
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specter_core.memory.eviction import count_then_recency, lru
from specter_core.memory.expert_cache import ExpertCache, SlotState
from specter_core.types import ExpertKey

SLOTS_PER_LAYER = (1, 3, 2)
STAGING = 2
EXPERTS = 5
TOTAL = sum(SLOTS_PER_LAYER) + STAGING

keys = st.builds(ExpertKey, st.integers(0, len(SLOTS_PER_LAYER) - 1), st.integers(0, EXPERTS - 1))
slots = st.integers(0, TOTAL - 1)


class CacheMachine(RuleBasedStateMachine):
    """Compares the cache with a dictionary slot -> [key, loading, protections, former key]."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = ExpertCache(SLOTS_PER_LAYER, STAGING)
        self.model: dict[int, list] = {}

    def held(self) -> set[ExpertKey]:
        return {entry[0] for entry in self.model.values()}

    @rule(key=keys, slot=slots)
    def load(self, key, slot):
        own = slot in self.cache.layer_slots(key.layer) or slot >= sum(SLOTS_PER_LAYER)
        entry = self.model.get(slot)
        legal = own and key not in self.held() and (entry is None or (not entry[1] and entry[2] == 0))
        assert self.cache.can_load(key, slot) == legal
        if not legal:
            with pytest.raises(AssertionError):
                self.cache.begin_load(key, slot)
            return
        self.cache.begin_load(key, slot)
        self.model[slot] = [key, True, 0, entry[0] if entry else None]

    @rule(slot=slots)
    def finish(self, slot):
        entry = self.model.get(slot)
        if entry is None or not entry[1]:
            with pytest.raises(AssertionError):
                self.cache.finish_load(slot)
            return
        self.cache.finish_load(slot)
        entry[1], entry[3] = False, None

    @rule(slot=slots, restore=st.booleans())
    def abort(self, slot, restore):
        entry = self.model.get(slot)
        if entry is None or not entry[1] or entry[2]:
            with pytest.raises(AssertionError):
                self.cache.abort_load(slot, restore=restore)
            return
        self.cache.abort_load(slot, restore=restore)
        del self.model[slot]
        if restore and entry[3] is not None and entry[3] not in self.held():
            self.model[slot] = [entry[3], False, 0, None]

    @rule(slot=slots)
    def protect(self, slot):
        if slot in self.model:
            self.cache.protect(slot)
            self.model[slot][2] += 1

    @rule(slot=slots)
    def release(self, slot):
        if slot in self.model and self.model[slot][2]:
            self.cache.release(slot)
            self.model[slot][2] -= 1
        else:
            with pytest.raises(AssertionError):
                self.cache.release(slot)

    @rule(slot=slots)
    def evict(self, slot):
        entry = self.model.get(slot)
        if entry is None or entry[1] or entry[2]:
            with pytest.raises(AssertionError):
                self.cache.evict(slot)
            return
        assert self.cache.evict(slot) == entry[0]
        del self.model[slot]

    @rule(key=keys)
    def touch(self, key):
        slot = self.cache.lookup(key)
        if slot is not None:
            self.cache.touch(key)
            others = [self.cache.recency(s) for s in range(TOTAL) if s != slot]
            assert self.cache.recency(slot) > max(others)

    @precondition(lambda self: not any(e[1] or e[2] for e in self.model.values()))
    @rule()
    def clear(self):
        self.cache.clear()
        self.model.clear()

    @invariant()
    def matches_the_model(self):
        self.cache.check_integrity()
        for slot in range(TOTAL):
            entry = self.model.get(slot)
            assert self.cache.key(slot) == (entry[0] if entry else None)
            if entry is None:
                assert self.cache.state(slot) is SlotState.EMPTY
            elif entry[1]:
                assert self.cache.state(slot) is SlotState.LOADING
            else:
                assert self.cache.state(slot) is (SlotState.PROTECTED if entry[2] else SlotState.RESIDENT)
        for layer in range(len(SLOTS_PER_LAYER)):
            own = self.cache.layer_slots(layer)
            assert self.cache.free_slots(layer) == [s for s in own if s not in self.model]
            assert residents(self.cache, layer) == [
                self.model[s][0] for s in own if s in self.model and not self.model[s][1]
            ]
        assert {k: self.cache.lookup(k) for k in self.held()} == {e[0]: s for s, e in self.model.items()}


CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase


def test_slots_of_layers_are_contiguous_and_disjoint_and_staging_comes_last():
    cache = ExpertCache(SLOTS_PER_LAYER, STAGING)
    ranges = [cache.layer_slots(layer) for layer in range(3)] + [cache.staging_slots]
    assert [slot for r in ranges for slot in r] == list(range(TOTAL))
    assert [len(r) for r in ranges] == [*SLOTS_PER_LAYER, STAGING]


def test_restored_expert_keeps_its_recency():
    cache = ExpertCache([2])
    for expert in (0, 1):
        cache.begin_load(ExpertKey(0, expert), expert)
        cache.finish_load(expert)
    before = cache.recency(0)
    cache.begin_load(ExpertKey(0, 4), 0)
    cache.abort_load(0)
    assert cache.key(0) == ExpertKey(0, 0)
    assert cache.recency(0) == before


def test_lru_ignores_counts_and_the_default_policy_does_not():
    assert lru(9, 1) < lru(0, 2)
    assert count_then_recency(9, 1) > count_then_recency(0, 2)
    assert count_then_recency(1, 1) < count_then_recency(1, 2)
