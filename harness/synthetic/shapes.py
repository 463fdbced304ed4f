"""Hugging Face configs of the three full-size models, and small ones of the same construction for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specter_core.errors import UserError

_YARN = {
    "rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
    "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip


def _longrope(half: int) -> dict[str, Any]:
    """The published lists of factors belong to the checkpoint; these rise from 1 in the same way."""
    return {
        "rope_type": "longrope",
        "short_factor": [1.0 + 1.8 * i / (half - 1) for i in range(half)],
        "long_factor": [64.0 ** (i / (half - 1)) for i in range(half)],
        "short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122, "original_max_position_embeddings": 4096,
    }  # fmt: skip


CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2_lite": {
        "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 2048,
        "num_hidden_layers": 27, "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_attention_heads": 16,
        "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408, "n_shared_experts": 2, "intermediate_size": 10944, "n_group": 1, "topk_group": 1,
        "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0,
        "vocab_size": 102400, "bos_token_id": 100000, "eos_token_id": 100001, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 163840, "rope_theta": 10000.0, "rope_scaling": _YARN, "hidden_act": "silu",
        "attention_bias": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    },
    "qwen15_moe": {
        "model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"], "hidden_size": 2048,
        "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 60,
        "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
        "intermediate_size": 5632, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": False,
        "vocab_size": 151936, "bos_token_id": 151643, "eos_token_id": 151643, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 8192, "rope_theta": 1000000.0, "hidden_act": "silu", "use_sliding_window": False,
        "sliding_window": 32768, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    },
    "phi35_moe": {
        "model_type": "phimoe", "architectures": ["PhiMoEForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 16, "num_experts_per_tok": 2,
        "intermediate_size": 6400, "vocab_size": 32064, "bos_token_id": 1, "eos_token_id": 32000,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
        "sliding_window": 131072, "rope_theta": 10000.0, "rope_scaling": _longrope(64), "attention_bias": True,
        "lm_head_bias": True, "router_jitter_noise": 0.01, "input_jitter_noise": 0.01, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    },
}  # fmt: skip

SMALL = ("small_deepseek_v2", "small_qwen2_moe", "small_phimoe")


def small_config(name: str, *, hidden: int, layers: int, experts: int, width: int, vocab: int) -> dict[str, Any]:
    """The config of the family behind a name of SMALL, shrunk; the number of experts per token shrinks with E."""
    base = {"small_deepseek_v2": "deepseek_v2_lite", "small_qwen2_moe": "qwen15_moe", "small_phimoe": "phi35_moe"}
    if name not in base:
        known = ", ".join((*CONFIGS, *SMALL))
        raise UserError(f"model {name!r} has no synthetic shape, known are {known}; choose one of these")
    config = dict(CONFIGS[base[name]])
    heads = max(2, hidden // 64)
    config |= {
        "hidden_size": hidden, "num_hidden_layers": layers, "vocab_size": vocab, "bos_token_id": vocab - 2,
        "eos_token_id": vocab - 1, "num_attention_heads": heads, "num_key_value_heads": heads,
        "max_position_embeddings": 4096,
    }  # fmt: skip
    if name == "small_deepseek_v2":
        small = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
        config |= {"n_routed_experts": experts, "moe_intermediate_size": width, "intermediate_size": 4 * width, **small}
        config["num_experts_per_tok"] = max(2, round(6 * experts / 64))
    elif name == "small_qwen2_moe":
        config |= {"num_experts": experts, "moe_intermediate_size": width, "intermediate_size": 4 * width}
        config |= {"shared_expert_intermediate_size": 4 * width, "num_experts_per_tok": max(2, round(4 * experts / 60))}
    else:
        config |= {"num_local_experts": experts, "intermediate_size": width, "num_key_value_heads": heads // 2}
        config |= {"rope_scaling": _longrope(hidden // heads // 2), "sliding_window": 4096}
    return config
