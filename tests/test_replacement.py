"""Replacement policies on routing traces: LRU and Belady against each other, brute force and a watched engine."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness import efficiency
from harness.replacement import belady_loads, lru_loads, needs
from harness.report_tables import time_by_part
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


def test_nested_experts_are_counted_in_their_own_bytes():
    torch.set_num_threads(1)
    model = ModelSpec("mini", "qwen2_moe", str(MINI), str(MINI / "draft"), "reference", "bfloat16", "")
    request, found = Request("r", tuple(range(4, 16)), 12, ignore_eos=True), {}
    for encoding in ("plain", "nested"):
        system = specter.create({"depth": 3, "encoding": encoding})
        system.load(model, MemorySpec("test", None, 3, "native", None, max_sequence=64))
        system.watched = True
        record = system.generate([request])[0]
        system.close()
        cell = efficiency.cells([line(encoding=encoding, **dict(record.efficiency))])[0]
        assert cell["encoding"] == encoding and cell["belady_loads"] <= cell["lru_loads"] <= cell["needed_loads"]
        assert cell["moved_mb"] == pytest.approx(cell["moved_loads"] * cell["expert_mb"])
        assert cell["moved_loads"] * cell["committed"] == pytest.approx(round(record.efficiency["moved"]))
        found[encoding] = record.tokens, cell["expert_mb"]
    assert found["plain"][0] == found["nested"][0]
    assert 0.5 < found["nested"][1] / found["plain"][1] < 0.7


def line(**changes):
    base = {
        "model": "m", "weights": "synthetic", "memory": "low", "link": "native", "device": "cuda", "B": 1,
        "prefix_len": 16, "system": "specter", "variant": "default", "encoding": "plain", "K": 4, "config_hash": "a",
        "dataset": "c4", "prompt_id": "p", "repeat": 0, "new_tokens": 11, "tpot_ms": 10.0, "energy_j": 22.0,
        "windows": 3, "committed": 10, "slots": 3.0, "entry_bytes": 1, "rate_bytes_per_s": 1.0, "draft_ms": 30.0,
        "verify_ms": 60.0, "decode_ms": 100.0, "router_wait_ms": 20.0, "link_busy_ms": 50.0,
        "stall_ms": {"miss": 10.0, "late": 5.0}, "bound_ms": 80.0, "moved": 40.0, "needed": 60, "absent": 30,
        "misses": 9, "late": 6, "lru": 50, "belady": 30, "by_layer": [[4, 2, 8]], "by_horizon": {"2": [5, 5, 10]},
    }  # fmt: skip
    return base | changes


def test_the_parts_of_a_tokens_time_add_up_to_it():
    cell = efficiency.cells([line(), line(prompt_id="q")])[0]
    names = ("draft_ms", "router_ms", "demand_ms", "prefetch_ms", "slot_ms", "launch_ms", "between_ms")
    assert sum(cell[n] for n in names) == pytest.approx(cell["tpot_ms"]) == 10.0
    assert cell["bound_share"] == 0.8 and cell["moved_over_lru"] == 0.8 and cell["j_per_token"] == 2.0
    assert (cell["precision"], cell["recall"], cell["requests"]) == (0.5, 0.25, 2)


def test_tables_are_written_per_cell_layer_and_horizon_and_a_torn_line_is_left_out(tmp_path):
    path = tmp_path / efficiency.FILE
    for prompt in ("p", "q", "q"):
        row = line(prompt_id=prompt)
        efficiency.append(path, row, {k: v for k, v in row.items() if k not in (*efficiency.KEYS, *efficiency.NAMES)})
    with path.open("a") as file:
        file.write('{"model": "m", "wei')
    assert len(efficiency.read(path)) == 2
    assert [p.name for p in efficiency.write(tmp_path)] == [
        "efficiency.csv", "prefetch_by_layer.csv", "prefetch_by_horizon.csv",
    ]  # fmt: skip
    horizon = pd.read_csv(tmp_path / "prefetch_by_horizon.csv")
    assert horizon[["drafted", "planned", "precision", "recall"]].to_numpy().tolist() == [[2.0, 10.0, 1.0, 0.5]]
    shown = time_by_part(tmp_path)
    assert shown is not None
    assert shown.body[0][:6] == ["m", "low", "synthetic, native, cuda", "1", "specter (default)", "4"]
    assert time_by_part(tmp_path / "none") is None


def test_a_system_that_chooses_its_depth_is_one_cell_and_a_depth_sweep_is_several():
    own = [line(prompt_id=p, K=k) for p, k in (("a", 4), ("b", 8), ("c", 6))]
    assert [(c["K"], c["requests"]) for c in efficiency.cells(own)] == [(6, 3)]
    swept = [line(prompt_id=p, K=k) for p in "ab" for k in (4, 8)]
    assert [(c["K"], c["requests"]) for c in efficiency.cells(swept)] == [(4, 2), (8, 2)]
