"""KV storage: where a pass writes, what it never touches, what a boundary may do."""

from __future__ import annotations

import pytest
import torch

from specter_core.model.config import ModelConfig
from specter_core.model.rows import Rows
from specter_core.state.kv_cache import KV_BLOCK, KVCache
from tests.tiny_models import FAMILIES, tiny_config


def tiny_cache(family: str, batch: int = 3, capacity: int = 100) -> KVCache:
    raw = tiny_config(family).to_dict()
    raw["architectures"] = {"phimoe": ["PhiMoEForCausalLM"]}.get(family, [])
    return KVCache(ModelConfig.from_dict(raw), batch, capacity, "cpu", torch.float32)


def buffers(kv: KVCache) -> list[torch.Tensor]:
    return [*kv.keys, *kv.values, *kv.latents]


@pytest.mark.parametrize("family", FAMILIES)
def test_capacity_is_whole_blocks_and_bytes_are_those_of_the_buffers(family: str) -> None:
    kv = tiny_cache(family)
    assert kv.capacity == 2 * KV_BLOCK
    assert all(buffer.shape[:2] == (3, kv.capacity + 1) for buffer in buffers(kv))
    raw = tiny_config(family).to_dict()
    raw["architectures"] = {"phimoe": ["PhiMoEForCausalLM"]}.get(family, [])
    per_token = KVCache.bytes_per_token(ModelConfig.from_dict(raw), torch.float32)
    assert kv.bytes == 3 * (kv.capacity + 1) * per_token


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_writes_its_valid_rows_places_and_the_dump_entry_alone(family: str) -> None:
    kv = tiny_cache(family)
    buffer = buffers(kv)[0]
    rows = Rows.decode([5, 70, 127], 4, [4, 0, 1])
    entries = 1.0 + torch.arange(12.0).view(12, *[1] * (buffer.dim() - 2)).expand(12, *buffer.shape[2:])
    kv.write(buffer, rows, entries)
    expected = torch.zeros(3, kv.capacity)
    expected[0, 5:9] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    expected[2, 127] = 9.0
    assert torch.equal(buffer[:, : kv.capacity].flatten(2).amin(-1), expected)
    assert torch.equal(buffer[:, : kv.capacity].flatten(2).amax(-1), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_writes_into_the_cache_row_it_names(family: str) -> None:
    kv = tiny_cache(family)
    buffer = buffers(kv)[0]
    kv.write(buffer, Rows.prefill(2, 10, 6, 20), torch.ones(6, *buffer.shape[2:]))
    touched = buffer.flatten(2).any(-1).nonzero().tolist()
    assert touched == [[2, position] for position in range(10, 16)]


def test_boundaries_move_forward_alone_and_never_past_the_capacity() -> None:
    kv = tiny_cache("qwen2_moe")
    kv.advance(1, 7)
    kv.advance(1, 0)
    assert kv.boundaries == [0, 7, 0]
    for n in (-1, kv.capacity - 6):
        with pytest.raises(AssertionError):
            kv.advance(1, n)
    kv.reset(1)
    assert kv.boundaries == [0, 0, 0]


def test_a_row_behind_the_capacity_is_refused() -> None:
    kv = tiny_cache("qwen2_moe")
    with pytest.raises(AssertionError):
        kv.write(kv.keys[0], Rows.decode([kv.capacity], 1), torch.zeros(1, *kv.keys[0].shape[2:]))


def test_rows_know_positions_validity_and_context() -> None:
    rows = Rows.decode([3, 9], 3, [2, 3])
    assert rows.positions.tolist() == [[3, 4, 0], [9, 10, 11]]
    assert rows.valid.tolist() == [[True, True, False], [True, True, True]]
    assert rows.context.tolist() == [[4, 5, 0], [10, 11, 12]]
    assert (rows.count, rows.last) == (6, 11)
    prompt = Rows.prefill(4, 8, 2, 30)
    assert prompt.positions.tolist() == [[8, 9]] and prompt.context.tolist() == [[30, 30]]
    assert prompt.kv_start == 4 and Rows.decode([5], 2, [0]).last == -1
