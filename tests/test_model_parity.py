"""The decoder against the transformers class of each family, in float32 on seeded random checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from specter_core.model.argmax import argmax_lowest
from specter_core.model.checkpoint import Checkpoint
from specter_core.model.decoder import Decoder
from specter_core.model.rows import Rows
from specter_core.state.kv_cache import KVCache
from tests.plain_model import PlainRoutedExperts, plain_forward, read_experts
from tests.tiny_models import FAMILIES, load_reference, tiny_checkpoint

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2 all MoE, plain rope, 12 experts": (
        "deepseek_v2",
        {
            "hidden": 64,
            "heads": 2,
            "experts": 12,
            "top_k": 4,
            "vocab": 131,
            "first_k_dense_replace": 0,
            "n_shared_experts": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "deepseek_v2 low-rank queries, biases, groups, scaling": (
        "deepseek_v2",
        {
            "heads": 8,
            "q_lora_rank": 48,
            "attention_bias": True,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe grouped heads, normalised": (
        "qwen2_moe",
        {"hidden": 192, "heads": 6, "kv_heads": 2, "experts": 10, "top_k": 4, "norm_topk_prob": True},
    ),
    "qwen2_moe some dense layers, tied": (
        "qwen2_moe",
        {"layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3], "tie_word_embeddings": True},
    ),
    "phimoe": ("phimoe", {"original_positions": 1024}),
    "phimoe one KV head, no biases": (
        "phimoe",
        {
            "original_positions": 1024,
            "heads": 8,
            "kv_heads": 1,
            "attention_bias": False,
            "lm_head_bias": False,
        },
    ),
    "phimoe wide jitter": (
        "phimoe",
        {"original_positions": 1024, "hidden": 192, "heads": 6, "experts": 5, "router_jitter_noise": 0.3},
    ),
}


class Ours:
    """A decoder with all experts resident and a KV cache of three rows."""

    def __init__(self, folder: Path) -> None:
        self.decoder = Decoder.load(folder, compute_dtype=torch.float32)
        with Checkpoint(folder) as checkpoint:
            self._experts = PlainRoutedExperts(read_experts(checkpoint, self.decoder.config).__getitem__)
        self.kv = KVCache(self.decoder.config, 3, 320, "cpu", torch.float32)

    def run(self, tokens: torch.Tensor, rows: Rows) -> torch.Tensor:
        """tokens [B, T] -> logits [B, T, V]."""
        with torch.no_grad():
            x = plain_forward(self.decoder, self._experts, tokens, self.kv, rows)
            return self.decoder.logits(x).view(rows.batch, rows.steps, -1)


def reference_logits(model: transformers.PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens.unsqueeze(0), use_cache=False).logits[0]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: tiny_checkpoint(family, folder, seed=n, **shape)
        for n, (name, (family, shape)) in enumerate(SHAPES.items())
    }


@pytest.mark.parametrize("name", SHAPES)
def test_prefill_and_steps_and_ragged_verification_match_transformers(name: str, checkpoints: dict[str, Path]) -> None:
    ours, model = Ours(checkpoints[name]), load_reference(checkpoints[name])
    vocab = ours.decoder.config.vocab_size
    lengths = (90, 33, 150)  # 90 and 150 lie beyond the original rope length of the yarn models
    texts = [torch.randint(0, vocab, (n + 20,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    expected = [reference_logits(model, text) for text in texts]
    for row, (length, text) in enumerate(zip(lengths, texts, strict=True)):
        for start in range(0, length, 64):  # prefill in chunks
            count = min(64, length - start)
            rows = Rows.prefill(row, start, count, length)
            logits = ours.run(text[None, start : start + count], rows)[0]
            assert relative_error(logits, expected[row][start : start + count]) < 1e-4
        ours.kv.advance(row, length)
    for _ in range(3):  # one token per row
        at = list(ours.kv.boundaries)
        tokens = torch.stack([text[n : n + 1] for text, n in zip(texts, at, strict=True)])
        logits = ours.run(tokens, Rows.decode(at, 1))
        for row in range(3):
            assert relative_error(logits[row, 0], expected[row][at[row]]) < 1e-4
            ours.kv.advance(row, 1)
    at, counts = list(ours.kv.boundaries), (17, 0, 5)  # verification: full, finished, short
    tokens = torch.stack([text[n : n + 17] for text, n in zip(texts, at, strict=True)])
    logits = ours.run(tokens, Rows.decode(at, 17, counts))
    for row, count in enumerate(counts):
        for step in range(count):
            assert relative_error(logits[row, step], expected[row][at[row] + step]) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_those_of_transformers_for_64_steps(family: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(family, tmp_path, seed=3, original_positions=1024)
    ours, model = Ours(folder), load_reference(folder)
    prompt = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        output = model(prompt, use_cache=True)
        cache, expected = output.past_key_values, [int(output.logits[0, -1].argmax())]
        for _ in range(63):
            output = model(torch.tensor([[expected[-1]]]), past_key_values=cache, use_cache=True)
            expected.append(int(output.logits[0, -1].argmax()))
    logits = ours.run(prompt, Rows.prefill(0, 0, 40, 40))[0, -1:]
    found = [int(argmax_lowest(logits))]
    for step in range(63):
        found.append(int(argmax_lowest(ours.run(torch.tensor([[found[-1]]]), Rows.decode([40 + step], 1))[0])))
    assert found == expected
    assert len(set(found)) > 16, "the tiny model's text must vary, or equality shows little"


def follow_longest_position(model: transformers.PreTrainedModel) -> None:
    """Let transformers' PhiMoE take the long factors beyond the original length, chosen by the call's
    longest position. As of 5.17 its forward asks for the factors without a length and so always gets the
    short ones.
    """
    rotary = model.model.rotary_emb
    plain_init, plain_forward_ = rotary.rope_init_fn, rotary.forward

    def forward(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        longest = int(position_ids.max()) + 1
        rotary.rope_init_fn = lambda config: plain_init(config, seq_len=longest)
        return plain_forward_(x, position_ids=position_ids)

    rotary.forward = forward


def test_longrope_prefill_takes_its_factors_from_the_prompt_length(tmp_path: Path) -> None:
    folder = tiny_checkpoint("phimoe", tmp_path, original_positions=64)
    ours, model = Ours(folder), load_reference(folder)
    follow_longest_position(model)
    text = torch.randint(0, 256, (100,), generator=torch.Generator().manual_seed(0))
    for row, length in enumerate((64, 65, 100)):
        expected = reference_logits(model, text[:length])
        first = ours.run(text[None, :32], Rows.prefill(row, 0, 32, length))[0]
        rest = ours.run(text[None, 32:length], Rows.prefill(row, 32, length - 32, length))[0]
        assert relative_error(torch.cat([first, rest]), expected) < 1e-4


def test_longrope_rows_choose_by_their_own_position_and_cached_keys_stay(tmp_path: Path) -> None:
    folder = tiny_checkpoint("phimoe", tmp_path, original_positions=64)
    ours, model = Ours(folder), load_reference(folder)
    follow_longest_position(model)
    text = torch.randint(0, 256, (80,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():  # transformers step by step: each call's longest position is the row's own
        output = model(text[None, :50], use_cache=True)
        expected = []
        for n in range(50, 80):
            output = model(text[None, n : n + 1], past_key_values=output.past_key_values, use_cache=True)
            expected.append(output.logits[0, 0])
    ours.run(text[None, :50], Rows.prefill(0, 0, 50, 50))
    steps = [ours.run(text[None, n : n + 1], Rows.decode([n], 1))[0, 0] for n in range(50, 80)]
    for found, wanted in zip(steps, expected, strict=True):
        assert relative_error(found, wanted) < 1e-4
    ours.run(text[None, :50], Rows.prefill(1, 0, 50, 50))
    ours.kv.keys[0][0] = torch.nan  # another row's entries must not matter
    tokens = torch.stack([text[50:80], text[50:80]])
    together = ours.run(tokens, Rows.decode([50, 50], 30, [0, 30]))[1]
    assert torch.equal(together, torch.stack(steps)), "a verification pass across the original length"


def test_longrope_scale_switches_beyond_the_original_length_like_transformers(tmp_path: Path) -> None:
    factors = [1.0 + 0.5 * i for i in range(16)]
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": factors,
        "long_factor": factors,
        "short_mscale": 1.0,
        "long_mscale": 1.4,
        "original_max_position_embeddings": 64,
    }
    folder = tiny_checkpoint("phimoe", tmp_path, rope_parameters=rope)
    ours, model = Ours(folder), load_reference(folder)
    text = torch.randint(0, 256, (100,), generator=torch.Generator().manual_seed(5))
    logits = ours.run(text[None], Rows.prefill(0, 0, 100, 100))[0]
    assert relative_error(logits, reference_logits(model, text)) < 1e-4
