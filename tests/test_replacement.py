"""Replacement policies on routing traces: LRU and Belady against each other, brute force and a watched engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.replacement import belady_loads, lru_loads, needs
from harness.system import MemorySpec, ModelSpec
from harness.systems import specter
from specter_core.types import Request

MINI = Path(__file__).resolve().parents[1] / "reference" / "qwen2_moe_mini"
TRACES = st.lists(st.integers(0, 4), min_size=1, max_size=9)


def fewest(trace: list[int], size: int) -> int:
    """By trying every victim."""
    states = {frozenset(): 0}
    for expert in trace:
        following: dict[frozenset[int], int] = {}
        for held, loads in states.items():
            options = [(held, loads)] if expert in held else [
                (held - {victim} | {expert}, loads + 1) for victim in (held if len(held) == size else [-1])
            ]  # fmt: skip
            for new, cost in options:
                following[new] = min(cost, following.get(new, 99))
        states = following
    return min(states.values())


@given(TRACES, st.integers(1, 3))
def test_belady_is_the_fewest_loads_possible(trace, size):
    assert belady_loads([[[e]] for e in trace], [size]) == fewest(trace, size)


@given(st.lists(st.sets(st.integers(0, 7), max_size=5), min_size=1, max_size=12), st.integers(1, 8))
def test_lru_never_beats_belady_and_both_load_all_once_with_room_for_all(sets, size):
    passes = [[sorted(s)] for s in sets]
    distinct = len(set().union(*sets))
    assert distinct <= belady_loads(passes, [size]) <= lru_loads(passes, [size])
    assert lru_loads(passes, [8]) == belady_loads(passes, [8]) == distinct


def test_needs_are_distinct_and_without_padding():
    assert needs([(1, torch.tensor([[3, 1], [1, -1]])), (0, torch.tensor([[2, 2]]))], 2) == [[2], [1, 3]]


@pytest.mark.parametrize("depth", [0, 3])
def test_a_watched_engine_gives_the_same_tokens_and_consistent_counts(depth: int):
    torch.set_num_threads(1)
    model = ModelSpec("mini", "qwen2_moe", str(MINI), str(MINI / "draft"), "reference", "bfloat16", "")
    system = specter.create({"depth": depth})
    system.load(model, MemorySpec("test", None, 3, "native", None, max_sequence=64))
    request = Request("r", tuple(range(4, 16)), 12, ignore_eos=True)
    plain = system.generate([request])[0]
    system.watched = True
    watched = system.generate([request])[0]
    layers = len(system._engine.slots.slots_per_layer)
    system.close()
    found = watched.efficiency
    assert plain.tokens == watched.tokens and not plain.efficiency
    assert found["committed"] == len(plain.tokens) - 1
    assert found["belady"] <= found["lru"] <= found["needed"]
    assert 0 < found["bound_ms"] <= found["draft_ms"] + found["verify_ms"] + found["needed"]
    assert ("by_layer" in found) == bool(depth)
    if depth:
        assert len(found["by_layer"]) == layers and all(p >= r for p, r, _ in found["by_layer"])
        assert all(p >= r for p, r, _ in found["by_horizon"].values()) and found["by_horizon"]
