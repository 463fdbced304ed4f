"""Memory budget: exact bytes, one pool, never more than a budget allows or a layer can use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specter_core.errors import UserError
from specter_core.memory.budget import MemoryBudget, fixed_slots, plan_slots

PARTS = {"shared": 2_600_000_000, "draft": 7_400_000_000, "kv": 100_000_000}


@given(
    free=st.integers(0, 5000),
    entry=st.integers(1, 50),
    layers=st.integers(1, 8),
    experts=st.integers(1, 10),
    uniform=st.booleans(),
    staging=st.integers(0, 4),
)
def test_slots_spend_the_budget_exactly(free, entry, layers, experts, uniform, staging):
    parts = {"shared": 700, "kv": 33}
    budget = free + 733
    if free // entry < layers:
        with pytest.raises(UserError):
            plan_slots(budget, parts, entry, layers, experts, uniform, staging)
        return
    plan = plan_slots(budget, parts, entry, layers, experts, uniform, staging)
    assert len(plan.slots_per_layer) == layers
    assert all(1 <= m <= experts for m in plan.slots_per_layer)
    assert plan.total == 733 + plan.slots * entry <= budget
    assert plan.parts["slots"] == plan.slots * entry
    everything = all(m == experts for m in plan.slots_per_layer)
    if uniform:
        assert plan.staging == 0 and len(set(plan.slots_per_layer)) == 1
        assert everything or plan.total + layers * entry > budget
    else:
        assert 0 <= plan.staging <= staging
        assert max(plan.slots_per_layer) - min(plan.slots_per_layer) <= 1
        assert list(plan.slots_per_layer) == sorted(plan.slots_per_layer, reverse=True)
        assert everything or plan.total + entry > budget
    assert not everything or plan.staging == 0 or not uniform


def test_one_slot_per_layer_comes_before_staging():
    plan = plan_slots(10 * 4 + 1, {}, 10, 4, 8, uniform=False, staging=2)
    assert (plan.slots_per_layer, plan.staging) == ((1, 1, 1, 1), 0)
    plan = plan_slots(10 * 7, {}, 10, 4, 8, uniform=False, staging=2)
    assert (plan.slots_per_layer, plan.staging) == ((2, 1, 1, 1), 2)


def test_everything_resident_needs_no_staging():
    plan = plan_slots(10**6, {}, 10, 4, 8, uniform=False)
    assert (plan.slots_per_layer, plan.staging) == ((8,) * 4, 0)


def test_too_small_a_budget_names_what_it_needs_in_one_line():
    with pytest.raises(UserError) as error:
        plan_slots(10_000_000_000, PARTS, 17_301_760, 26, 64, uniform=True)
    text = str(error.value)
    assert "\n" not in text
    for part in (
        "10.0 GB",
        "shared 2.6",
        "draft 7.4",
        "kv 0.1",
        "26 slots x 17.3 MB",
        "10.5 GB",
        "10.549846 GB",
    ):
        assert part in text, text
    needed = 10_549_845_760
    assert plan_slots(needed, PARTS, 17_301_760, 26, 64, uniform=True).slots_per_layer == (1,) * 26
    with pytest.raises(UserError):
        plan_slots(needed - 1, PARTS, 17_301_760, 26, 64, uniform=True)


def test_fixed_slots_count_their_bytes_and_refuse_less_than_one():
    plan = fixed_slots(3, 4, 8, 10, {"kv": 5}, staging=1)
    assert (plan.slots_per_layer, plan.staging, plan.total, plan.mean_slots) == ((3,) * 4, 1, 135, 3.0)
    assert fixed_slots(99, 2, 8, 10, {}).slots_per_layer == (8, 8)
    with pytest.raises(UserError, match="at least 1, got 0"):
        fixed_slots(0, 4, 8, 10, {})


def test_free_bytes_are_what_the_parts_leave():
    budget = MemoryBudget(24_000_000_000, PARTS)
    assert budget.free_bytes == 24_000_000_000 - 10_100_000_000
