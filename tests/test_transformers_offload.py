"""The Transformers baseline: the model's own tokens, under the budget, over the paced link."""

from __future__ import annotations

import pytest
import torch
from tiny_models import FAMILIES, load_reference, tiny_checkpoint

from baselines.transformers_offload.layer_offload import PacedLayers
from baselines.transformers_offload.placement import place
from baselines.transformers_offload.system import create, expert_modules
from harness.system import MemorySpec, ModelSpec
from specter_core.errors import UserError
from specter_core.types import Request

PROMPT = tuple(range(5, 21))
EXPERT_BYTES = 3 * 128 * 128 * 2


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {family: tiny_checkpoint(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


def loaded(folder, budget: int | None, rate: float | None = None, batch: int = 1, **options):
    system = create({"depth": 0, **options})
    spec = ModelSpec("tiny", "deepseek_v2", str(folder), None, "reference", "bfloat16", "cafe")
    system.load(spec, MemorySpec("tight", budget, None, "scaled", rate, batch=batch, max_sequence=64))
    return system


def fixed_bytes(folder) -> int:
    return loaded(folder, None).placement.fixed_bytes


def greedy(folder, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Plain argmax decoding with the library's own resident model."""
    model = load_reference(folder)
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(count):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return tuple(ids[0, len(prompt) :].tolist())


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_the_resident_model_whatever_is_offloaded(folders, family):
    folder = folders[family]
    expected = greedy(folder, PROMPT, 12)
    one_layer = fixed_bytes(folder) + 8 * EXPERT_BYTES
    for budget in (None, one_layer, one_layer + 8 * EXPERT_BYTES):
        record = loaded(folder, budget).generate([Request("p", PROMPT, 12, ignore_eos=True)])[0]
        assert record.tokens == expected


def test_every_offloaded_layer_crosses_the_link_once_per_pass(folders):
    folder = folders["qwen2_moe"]
    system = loaded(folder, fixed_bytes(folder) + 2 * 8 * EXPERT_BYTES)
    assert (system.placement.resident, system.placement.offloaded) == (1, 2)
    record = system.generate([Request("p", PROMPT, 5, ignore_eos=True)])[0]
    assert record.h2d_bytes == 5 * 2 * 8 * EXPERT_BYTES, "prefill and four steps"
    assert 4 * 2 * 3 * EXPERT_BYTES <= record.h2d_bytes_used < record.h2d_bytes
    again = system.generate([Request("p", PROMPT, 5, ignore_eos=True)])[0]
    assert (again.h2d_bytes, again.tokens) == (record.h2d_bytes, record.tokens)


def test_the_bytes_accounted_for_stay_within_the_budget(folders):
    folder = folders["qwen2_moe"]
    budget = fixed_bytes(folder) + int(2.7 * 8 * EXPERT_BYTES)
    system = loaded(folder, budget)
    record = system.generate([Request("p", PROMPT, 2, ignore_eos=True)])[0]
    assert record.peak_device_bytes <= budget
    assert loaded(folder, None).generate([Request("p", PROMPT, 2, ignore_eos=True)])[0].h2d_bytes == 0


def test_a_budget_below_one_layer_is_refused_with_both_numbers(folders):
    with pytest.raises(UserError, match=r"budget 0.0001 GB cannot hold one layer's experts.*raise the budget"):
        loaded(folders["qwen2_moe"], 100_000)


def test_an_offloaded_layer_computes_from_what_has_arrived_and_nothing_else(folders):
    model = load_reference(folders["qwen2_moe"])
    module = expert_modules(model)[0]
    x, ids, weights = torch.randn(2, 128), torch.tensor([[0, 1, 2], [2, 3, 4]]), torch.full((2, 3), 0.3)
    expected = module(x, ids, weights)
    layers = PacedLayers([module], torch.bfloat16, None)
    for tensor in (*layers._arrived.values(), *layers._computed.values()):
        tensor.fill_(float("nan"))
    assert torch.equal(module(x, ids, weights), expected)
    assert layers.counters.bytes == 8 * EXPERT_BYTES
    assert layers.counters.bytes_used == 5 * EXPERT_BYTES


def test_the_link_rate_paces_every_byte(folders):
    now, slept = [0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += round(seconds * 1e9) + 1

    module = expert_modules(load_reference(folders["qwen2_moe"]))[0]
    layers = PacedLayers([module], torch.bfloat16, 1e6, clock_ns=lambda: now[0], sleep_s=sleep)
    module(torch.randn(1, 128), torch.tensor([[0, 1, 2]]), torch.ones(1, 3))
    assert sum(slept) == pytest.approx(8 * EXPERT_BYTES / 1e6, rel=1e-3)
    assert layers.counters.stall_ns == pytest.approx(8 * EXPERT_BYTES * 1e3, rel=1e-3)


def test_ragged_batches_give_each_row_its_own_tokens(folders):
    folder = folders["qwen2_moe"]
    prompts = [PROMPT, PROMPT[:7], PROMPT[3:12]]
    requests = [Request(str(i), p, 6 - i, ignore_eos=True) for i, p in enumerate(prompts)]
    records = loaded(folder, None, batch=3).generate(requests)
    assert [r.tokens for r in records] == [greedy(folder, p, 6 - i) for i, p in enumerate(prompts)]


def test_the_end_of_sequence_counts_only_when_it_is_asked_for(folders):
    folder = folders["qwen2_moe"]
    system = loaded(folder, None)
    free = system.generate([Request("p", PROMPT, 10, ignore_eos=True)])[0].tokens
    system.model.config.eos_token_id = free[3]
    first = free.index(free[3]) + 1
    assert system.generate([Request("p", PROMPT, 10, ignore_eos=False)])[0].tokens == free[:first]
    assert system.generate([Request("p", PROMPT, 10, ignore_eos=True)])[0].tokens == free


def test_placement_spends_the_budget_on_whole_layers_less_one_buffer():
    assert place(1000, 100, 100, 4).resident == 4
    assert place(480, 100, 100, 4).resident == 2
    assert place(200, 100, 100, 4).resident == 0
    assert all(place(b, 100, 100, 4).total_bytes <= b for b in range(200, 700, 7))


def test_unknown_options_are_named():
    with pytest.raises(UserError, match="variant 'fast' is unknown; known: offload, resident"):
        create({"variant": "fast"})
    with pytest.raises(UserError, match="no option 'dpeth'"):
        create({"dpeth": 3})
