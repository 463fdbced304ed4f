"""Mixtral-Offloading on the engine's parts: exact output, per-layer LRU, speculative loads outside the LRU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from control_plane import residents
from hypothesis import given
from hypothesis import strategies as st

from baselines.mixtral_offloading.lru_residency import LruResidency
from baselines.mixtral_offloading.swap_link import SwapLink
from baselines.mixtral_offloading.swap_residency import SwapResidency
from baselines.mixtral_offloading.system import SPARE_BUFFERS, MixtralOffloading, create
from harness.system import MemorySpec, ModelSpec
from harness.systems import specter
from specter_core.errors import UserError
from specter_core.memory.expert_cache import ExpertCache
from specter_core.types import ExpertKey, Request
from specter_core.verify.expert_ffn import expert_ffn
from specter_core.verify.ops import Copy, Gemm, Release, Source
from specter_core.verify.residency import LayerPlan
from tests.tiny_models import tiny_checkpoint

REQUESTS = [Request(f"r{i}", tuple(range(4 + i, 20 + i)), 16, ignore_eos=True) for i in range(2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_checkpoint("qwen2_moe", tmp_path_factory.mktemp("tiny"), seed=5, layers=3, experts=8)


def spec(folder: Path) -> ModelSpec:
    return ModelSpec("tiny", "qwen2_moe", str(folder), None, "reference", "bfloat16", "hash")


def memory(slots: int | None, budget: int | None = None) -> MemorySpec:
    return MemorySpec("test", budget, slots, "scaled", 2e9, batch=2, max_sequence=64)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[tuple[int, ...]]:
    reference = specter.create({"variant": "reference", "depth": 0})
    reference.load(spec(folder), memory(1))
    tokens = [reference.generate([r])[0].tokens for r in REQUESTS]
    reference.close()
    return tokens


@pytest.fixture
def same_cache(folder: Path) -> Iterator[MixtralOffloading]:
    system = create({"capacity": "same_cache"})
    system.load(spec(folder), memory(2))
    yield system
    system.close()


def test_output_is_the_targets(same_cache: MixtralOffloading, expected: list[tuple[int, ...]]) -> None:
    assert [same_cache.generate([r])[0].tokens for r in REQUESTS] == expected
    assert [r.tokens for r in same_cache.generate(REQUESTS)] == expected


def test_same_cache_has_specters_slots_and_the_spare_buffers_on_top(same_cache: MixtralOffloading) -> None:
    engine = same_cache._engine
    assert engine is not None
    assert engine.slots.slots_per_layer == (2, 2, 2) and engine.slots.staging == SPARE_BUFFERS


def test_speculative_loads_are_used_and_join_the_lru(same_cache: MixtralOffloading) -> None:
    engine = same_cache._engine
    assert engine is not None
    adopted: list[int] = []
    original = engine.experts.cache.adopt

    def spy(slot: int, layer: int, victim: int) -> None:
        original(slot, layer, victim)
        adopted.append(layer)
        assert slot in engine.experts.cache.layer_slots(layer) and victim in engine.experts.cache.staging_slots

    engine.experts.cache.adopt = spy  # type: ignore[method-assign]
    same_cache.generate(REQUESTS[:1])
    engine.experts.cache.check_integrity()
    assert adopted and 0 not in adopted  # nothing looks ahead to the first layer
    assert len(engine.experts.cache.staging_slots) == SPARE_BUFFERS


def test_same_memory_spends_the_drafts_share_on_slots(folder: Path, expected: list[tuple[int, ...]]) -> None:
    roomy = create({"capacity": "same_memory"})
    roomy.load(spec(folder), memory(2, budget=3_900_000))
    assert roomy._engine is not None
    assert roomy._engine.slots.total <= 3_900_000
    assert roomy._engine.slots.mean_slots > 2
    assert roomy.generate(REQUESTS[:1])[0].tokens == expected[0]
    roomy.close()


@pytest.mark.parametrize(("options", "text"), [({"variant": "x"}, "variant 'x'"), ({"capacity": "y"}, "capacity 'y'")])
def test_unknown_options_name_the_known_ones(options: dict[str, str], text: str) -> None:
    with pytest.raises(UserError, match=rf"{text}.*known"):
        create(options)


def test_same_memory_without_a_budget_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="needs a budget"):
        create({"capacity": "same_memory"}).load(spec(folder), memory(2))


@pytest.fixture
def as_released(folder: Path) -> Iterator[MixtralOffloading]:
    system = create({"capacity": "same_cache", "variant": "as_released"})
    system.load(spec(folder), memory(3))
    yield system
    system.close()


def test_as_released_output_is_the_targets(as_released: MixtralOffloading, expected: list[tuple[int, ...]]) -> None:
    assert [as_released.generate([r])[0].tokens for r in REQUESTS] == expected
    found = as_released.generate(REQUESTS)
    assert [r.tokens for r in found] == expected and found[0].variant == "as_released"


def test_as_released_writes_every_victim_back_and_counts_its_bytes(as_released: MixtralOffloading) -> None:
    engine = as_released._engine
    assert engine is not None
    victims: list[bool] = []
    original = engine.experts.cache.begin_load

    def spy(key: ExpertKey, slot: int) -> None:
        original(key, slot)
        victims.append(engine.experts.cache.previous(slot) is not None)

    engine.experts.cache.begin_load = spy  # type: ignore[method-assign]
    record = as_released.generate(REQUESTS[:1])[0]
    entry_bytes = engine.experts.loader.link.entry_bytes
    assert record.h2d_bytes == len(victims) * entry_bytes and record.d2h_bytes == sum(victims) * entry_bytes
    assert victims.count(False) == 3 * 3, "only the first loads find an empty slot"
    assert record.d2h_bytes > 0 and record.stall_ms["miss"] > 0


def test_improved_writes_nothing_back(same_cache: MixtralOffloading) -> None:
    assert same_cache.generate(REQUESTS[:1])[0].d2h_bytes == 0


def test_nothing_is_computed_beside_a_copy_and_both_directions_are_paced(
    as_released: MixtralOffloading, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = as_released._engine
    assert engine is not None
    link = engine.experts.loader.link
    assert isinstance(link, SwapLink)
    idle: list[bool] = []

    def spy(*operands: torch.Tensor) -> torch.Tensor:
        idle.append(link._link.idle())
        return expert_ffn(*operands)

    monkeypatch.setattr(engine.experts.executor, "_expert_ffn", spy)
    start_ns = time.perf_counter_ns()
    record = as_released.generate(REQUESTS[:1])[0]
    elapsed_s = (time.perf_counter_ns() - start_ns) / 1e9
    assert idle and all(idle)
    assert record.h2d_bytes is not None and record.d2h_bytes is not None
    assert elapsed_s >= 0.9 * (record.h2d_bytes + record.d2h_bytes) / 2e9


@pytest.mark.parametrize("needed", [[0, 1], [0, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7]])
@pytest.mark.parametrize("spare", [1, 2, 4])
def test_hits_come_first_and_at_most_the_spare_buffers_swaps_are_under_way(needed: list[int], spare: int) -> None:
    cache = ExpertCache((3,))
    for slot, expert in enumerate((2, 5, 1)):
        cache.begin_load(ExpertKey(0, expert), slot)
        cache.finish_load(slot)
    plan = SwapResidency(cache, spare).plan_layer(0, needed)
    hits = [e for e in needed if e in (1, 2, 5)]
    computed = [op.key.expert for op in plan.ops if isinstance(op, Gemm)]
    assert computed == hits + [e for e in needed if e not in hits]
    assert list(plan.hits) == hits and list(plan.misses) == computed[len(hits) :]
    moving = 0
    for op in plan.ops:
        moving += isinstance(op, Copy)
        assert moving <= min(spare, 3)
        moving -= isinstance(op, Gemm) and op.source is Source.MISS
    copies = [op.slot for op in plan.ops if isinstance(op, Copy)]
    unneeded = [slot for slot, expert in enumerate((2, 5, 1)) if expert not in needed]
    assert copies[: len(unneeded)] == unneeded[: len(copies)], "least recently used first, hits of this layer last"


def played(cache: ExpertCache, plan: LayerPlan) -> int:
    """Carries a plan out on the cache alone, as an executor does; the number of loads."""
    loads = 0
    for slot in plan.protects:
        cache.protect(slot)
    for op in plan.ops:
        match op:
            case Copy(key, slot):
                assert not cache.is_protected(slot)
                cache.begin_load(key, slot)
                cache.protect(slot)
                loads += 1
            case Gemm(key, slot, source):
                if source is not Source.HIT:
                    cache.finish_load(slot)
                assert cache.lookup(key) == slot
                cache.touch(key)
            case Release(slot):
                cache.release(slot)
    cache.check_integrity()
    return loads


@given(st.lists(st.sets(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=12), st.integers(1, 8))
def test_the_improved_order_loads_each_missing_expert_once_over_the_oldest_unneeded(sets, slots):
    cache = ExpertCache((slots,))
    residency = LruResidency(cache)
    for needed in (sorted(s) for s in sets):
        ages = {k.expert: cache.recency(s) for s in cache.layer_slots(0) if (k := cache.key(s)) is not None}
        done = [e for e in needed if e in ages][::2]
        for expert in done:
            cache.touch(ExpertKey(0, expert))
        plan = residency.plan_layer(0, needed, None, (), done)
        computed = [op.key.expert for op in plan.ops if isinstance(op, Gemm)]
        assert sorted([*computed, *done]) == needed
        assert played(cache, plan) == len(plan.misses) == len(set(needed) - set(ages))
        held = {k.expert for k in residents(cache, 0)}
        gone = set(ages) - held
        kept = (set(ages) & held) - set(needed)
        if len(needed) <= slots:
            assert set(needed) <= held
            assert not gone or not kept or max(ages[e] for e in gone) < min(ages[e] for e in kept)
