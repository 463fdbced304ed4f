"""Mixtral-Offloading on the engine's parts: exact output, per-layer LRU, speculative loads outside the LRU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from baselines.mixtral_offloading.system import SPARE_BUFFERS, MixtralOffloading, create
from harness.system import MemorySpec, ModelSpec
from harness.systems import specter
from specter_core.errors import UserError
from specter_core.types import Request
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
