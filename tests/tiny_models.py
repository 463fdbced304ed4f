"""Seeded random checkpoints of each family, written by transformers' own save_pretrained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

FAMILIES = ("deepseek_v2", "qwen2_moe", "phimoe")


def tiny_config(
    family: str,
    *,
    layers: int = 3,
    hidden: int = 128,
    experts: int = 8,
    top_k: int | None = None,
    expert_width: int = 128,
    vocab: int = 256,
    heads: int = 4,
    kv_heads: int | None = None,
    max_positions: int = 2048,
    original_positions: int = 64,
    **overrides: Any,
) -> transformers.PretrainedConfig:
    """A small config with the family's own peculiarities on (yarn, sigmoid-gated shared expert, longrope, …).

    overrides go into the transformers config as they are.
    """
    common: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": max_positions,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    if family == "deepseek_v2":
        common |= {
            "num_key_value_heads": heads,
            "intermediate_size": 2 * hidden,
            "moe_intermediate_size": expert_width,
            "n_routed_experts": experts,
            "num_experts_per_tok": top_k or 3,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 64,
            "q_lora_rank": None,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": max_positions / original_positions,
                "original_max_position_embeddings": original_positions,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
            },
        }
        return transformers.DeepseekV2Config(**(common | overrides))
    if family == "qwen2_moe":
        common |= {
            "num_key_value_heads": kv_heads or heads,
            "intermediate_size": 2 * hidden,
            "moe_intermediate_size": expert_width,
            "shared_expert_intermediate_size": 2 * expert_width,
            "num_experts": experts,
            "num_experts_per_tok": top_k or 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        }
        return transformers.Qwen2MoeConfig(**(common | overrides))
    if family == "phimoe":
        assert top_k in (None, 2), "PhiMoE always routes to two experts"
        half = hidden // heads // 2
        common |= {
            "num_key_value_heads": kv_heads or max(1, heads // 2),
            "intermediate_size": expert_width,
            "num_local_experts": experts,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "lm_head_bias": True,
            "router_jitter_noise": 0.01,
            "input_jitter_noise": 0.01,
            "sliding_window": None,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0 + 0.02 * i for i in range(half)],
                "long_factor": [1.0 + 1.5 * i for i in range(half)],
                "short_mscale": 1.1,
                "long_mscale": 1.243,
                "original_max_position_embeddings": original_positions,
            },
        }
        return transformers.PhimoeConfig(**(common | overrides))
    raise ValueError(family)


def tiny_model(config: transformers.PretrainedConfig, *, seed: int = 0) -> transformers.PreTrainedModel:
    """A float32 model whose tokens vary and whose routing is diverse: weights larger than the usual init."""
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                parameter.copy_(0.1 * noise)
            elif "norm" in name:
                parameter.copy_(1.0 + 0.2 * noise)
            elif "embed_tokens" in name:
                parameter.copy_(noise)
            elif "gate.weight" in name or "router.weight" in name:
                parameter.copy_(noise * (1.5 * parameter.shape[-1] ** -0.5))
            else:
                parameter.copy_(noise * (1.2 * parameter.shape[-1] ** -0.5))
    return model.eval()


def tiny_checkpoint(
    family: str,
    tmp_path: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    shard_size: str = "1GB",
    **shape: Any,
) -> Path:
    """Write a seeded random checkpoint of a family in Hugging Face format and return its folder.

    shape: the keywords of `tiny_config` (layers, hidden, experts, top_k, expert_width, vocab, …). A small
    shard_size such as "200KB" gives several shards.
    """
    folder = tmp_path / f"{family}-{seed}-{len(list(tmp_path.iterdir())) if tmp_path.exists() else 0}"
    model = tiny_model(tiny_config(family, **shape), seed=seed).to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder, max_shard_size=shard_size)
    return folder


def load_reference(folder: Path) -> transformers.PreTrainedModel:
    """The transformers model of a checkpoint, in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    return model.eval()


def interpreter_checkpoint(family: str, folder: Path) -> Path:
    """As small as the device's kernels allow, in float32: what their interpreter can run an engine on."""
    return tiny_checkpoint(
        family, folder, layers=1 + (family == "deepseek_v2"), hidden=128, experts=4, expert_width=128, heads=2,
        vocab=64, top_k=2, original_positions=32, dtype=torch.float32,
    )  # fmt: skip
