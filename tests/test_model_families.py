"""Configs and tensor names of the official checkpoints, without allocating them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers

from specter_core.errors import UserError
from specter_core.model.config import ModelConfig
from specter_core.model.families import all_families, family_named
from specter_core.model.family import expert_tensors
from specter_core.state.kv_cache import KVCache

OFFICIAL: dict[str, dict[str, Any]] = {
    "DeepSeek-V2-Lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "attention_bias": False,
        "bos_token_id": 100000,
        "eos_token_id": 100001,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "greedy",
        "torch_dtype": "bfloat16",
        "v_head_dim": 128,
        "vocab_size": 102400,
    },
    "Qwen1.5-MoE-A2.7B": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "decoder_sparse_step": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "max_position_embeddings": 8192,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "shared_expert_intermediate_size": 5632,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Phi-3.5-MoE-instruct": {
        "architectures": ["PhiMoEForCausalLM"],
        "model_type": "phimoe",
        "attention_bias": True,
        "bos_token_id": 1,
        "eos_token_id": 32000,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "input_jitter_noise": 0.01,
        "intermediate_size": 6400,
        "lm_head_bias": True,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 64,  # the real lists do not change names or shapes
            "long_factor": [2.0] * 64,
            "short_mscale": 1.243163121016122,
            "long_mscale": 1.243163121016122,
            "original_max_position_embeddings": 4096,
        },
        "router_jitter_noise": 0.01,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 32064,
    },
}
# tensors, all parameters, routed experts' parameters, parameters of one expert, KV bytes per token in 16 bits
PUBLISHED = {
    "DeepSeek-V2-Lite": (5291, 15_706_484_224, 14_394_851_328, 8_650_752, 31_104),
    "Qwen1.5-MoE-A2.7B": (4659, 14_315_784_192, 12_457_082_880, 8_650_752, 196_608),
    "Phi-3.5-MoE-instruct": (1957, 41_873_153_344, 40_265_318_400, 78_643_200, 131_072),
}


def parameters(tensors: dict[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in tensors.values())


@pytest.mark.parametrize("model", OFFICIAL)
def test_tensor_counts_and_parameter_totals_are_the_official_ones(model: str) -> None:
    config = ModelConfig.from_dict(OFFICIAL[model])
    family = family_named(config.family)
    tensors, experts = family.expected_tensors(config), expert_tensors(family, config)
    count, total, routed, one, kv_bytes = PUBLISHED[model]
    assert (len(tensors), parameters(tensors), parameters(experts)) == (count, total, routed)
    assert config.expert_params == one
    assert len(config.moe_layers) * config.num_experts * one == routed
    assert KVCache.bytes_per_token(config, torch.bfloat16) == kv_bytes


@pytest.mark.parametrize("model", OFFICIAL)
def test_names_and_shapes_equal_a_meta_device_instance_of_transformers(model: str) -> None:
    config = ModelConfig.from_dict(OFFICIAL[model])
    family = family_named(config.family)
    theirs = transformers.AutoConfig.for_model(**OFFICIAL[model])
    with torch.device("meta"):
        instance = transformers.AutoModelForCausalLM.from_config(theirs)
    found = {name: tuple(tensor.shape) for name, tensor in instance.state_dict().items()}
    experts = expert_tensors(family, config)
    shared = {n: shape for n, shape in family.expected_tensors(config).items() if n not in experts}
    renamed = {(family.aliases(name) or (name,))[0]: shape for name, shape in shared.items()}
    fused = {
        f"model.layers.{layer}.mlp.experts.{part}": shape
        for layer in config.moe_layers
        for part, shape in (
            ("gate_up_proj", (config.num_experts, 2 * config.expert_width, config.hidden)),
            ("down_proj", (config.num_experts, config.hidden, config.expert_width)),
        )
    }
    assert found == renamed | fused


def test_official_values_that_shape_the_arithmetic() -> None:
    lite, qwen, phi = (ModelConfig.from_dict(raw) for raw in OFFICIAL.values())
    assert lite.attention_scale == pytest.approx(0.11472, abs=1e-5)
    assert lite.rope.scale == 1.0 and lite.rope.interleaved and lite.rope.dim == 64
    assert lite.moe_layers == tuple(range(1, 27)) and lite.shared_width == 2816
    assert qwen.moe_layers == tuple(range(24)) and qwen.qkv_bias and not qwen.output_bias
    assert qwen.max_positions == 8192 and qwen.eos_ids == (151643,)
    assert phi.top_k == 2 and phi.head_bias and phi.rope.long_scale == phi.rope.short_scale == 1.243163121016122
    assert {config.dtype for config in (lite, qwen, phi)} == {torch.bfloat16}


def altered(model: str, **changes: Any) -> dict[str, Any]:
    return {name: value for name, value in (OFFICIAL[model] | changes).items() if value != "absent"}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (altered("DeepSeek-V2-Lite", architectures=["LlamaForCausalLM"]), "LlamaForCausalLM is not supported, known: "),
        (altered("DeepSeek-V2-Lite", quantization_config={"quant_method": "gptq"}), r"is quantized \(gptq\)"),
        (altered("DeepSeek-V2-Lite", kv_lora_rank="absent"), "kv_lora_rank is None, expected an integer"),
        (altered("DeepSeek-V2-Lite", torch_dtype="float8_e4m3fn"), "dtype 'float8_e4m3fn' is not supported, known: bf"),
        (altered("DeepSeek-V2-Lite", scoring_func="sigmoid"), "scoring_func 'sigmoid' is not supported"),
        (altered("DeepSeek-V2-Lite", rope_scaling={"type": "linear", "factor": 2}), "rope type 'linear'"),
        (altered("Qwen1.5-MoE-A2.7B", hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
        (altered("Qwen1.5-MoE-A2.7B", num_experts_per_tok=61), "top-k 61 of 60 experts"),
        (altered("Qwen1.5-MoE-A2.7B", hidden_size="big"), "hidden_size is 'big', expected an integer"),
        (altered("Phi-3.5-MoE-instruct", hidden_size=2048), "64 short and 64 long factors, head size 64 needs 32"),
    ],
)
def test_an_unsupported_config_is_refused_in_one_line(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        ModelConfig.from_dict(raw)
    assert "\n" not in str(caught.value)


def test_an_unknown_architecture_lists_every_known_one() -> None:
    with pytest.raises(UserError) as caught:
        ModelConfig.from_dict({"architectures": ["GPT2LMHeadModel"]})
    for family in all_families():
        assert all(name in str(caught.value) for name in family.architectures)
