"""What a GGUF file of a model holds, and where each Hugging Face tensor goes.

Names, order of dimensions and metadata follow llama.cpp's loaders (src/models/{qwen2moe,deepseek2,phimoe}.cpp) and its
converter (conversion/{qwen,deepseek,phi}.py) of the version that README.md names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specter_core.errors import UserError
from specter_core.model.config import ModelConfig
from specter_core.model.families import family_named

ARCHITECTURES = {"qwen2_moe": "qwen2moe", "deepseek_v2": "deepseek2", "phimoe": "phimoe"}
LITE_LAYERS = 27
"""deepseek2 reads a model without q_lora_rank only when it has 26 or 27 layers."""
SOFTMAX_GATING = 1
PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
for _part in ("gate", "up", "down"):
    PARTS |= {f"mlp.shared_expert{s}.{_part}_proj": f"ffn_{_part}_shexp" for s in ("", "s")}
    PARTS[f"mlp.{_part}_proj"] = f"ffn_{_part}"
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
FLOAT32 = ("ffn_gate_inp", "ffn_gate_inp_shexp")


class GgufTensor(NamedTuple):
    """shape in torch's order; a file lists it reversed."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Target(NamedTuple):
    """Part of a GGUF tensor: all of it, or entry `index` of its first dimension, made by `change`."""

    tensor: str
    index: int | None = None
    change: Callable[[Tensor], Tensor] | None = None


@dataclass(slots=True)
class GgufPlan:
    """tensors: in the file's order. targets: by Hugging Face name. constants: tensors that come from config.json.
    Tensors with neither are zero. metadata: str, bool, int (uint32) or float (float32) by key."""

    architecture: str
    layers: int
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor] = field(default_factory=dict)
    targets: dict[str, list[Target]] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)

    @property
    def filled(self) -> list[str]:
        """Names of the tensors that are not all zero."""
        given = {target.tensor for targets in self.targets.values() for target in targets}
        return [name for name in self.tensors if name in given or name in self.constants]


def gguf_plan(config: ModelConfig, raw: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16) -> GgufPlan:
    """raw: config.json's content. dtype: of every matrix but the routers, which are float32 as vectors are. UserError
    for a family or shape that llama.cpp does not read."""
    if config.family not in ARCHITECTURES:
        raise UserError(f"llama_cpp has no {config.family}; known: {', '.join(ARCHITECTURES)}")
    padding = _padding(config)
    plan = GgufPlan(ARCHITECTURES[config.family], config.layers + padding, {})
    plan.metadata = _metadata(config, raw, plan)
    for layer in range(padding):
        _add_identity(plan, config, layer, dtype)
    family = family_named(config.family)
    experts = {
        name: (layer, expert, part)
        for layer in config.moe_layers
        for expert in range(config.num_experts)
        for name, part in zip(family.expert_names(layer, expert), ("gate", "up", "down"), strict=True)
    }
    for name, shape in family.expected_tensors(config).items():
        if name in experts:
            layer, expert, part = experts[name]
            tensor = f"blk.{layer + padding}.ffn_{part}_exps.weight"
            plan.tensors.setdefault(tensor, GgufTensor((config.num_experts, *shape), dtype))
            plan.targets[name] = [Target(tensor, expert)]
        elif name.endswith("kv_b_proj.weight"):
            _add_kv_b(plan, config, name, padding, dtype)
        else:
            tensor = gguf_name(name, padding)
            kind = tensor.split(".")[-2]
            shape = tuple(n for n in shape if n > 1) if kind == "ffn_gate_inp_shexp" else shape
            single = len(shape) == 1 or kind in FLOAT32
            plan.tensors[tensor] = GgufTensor(shape, torch.float32 if single else dtype)
            plan.targets[name] = [Target(tensor)]
    if config.rope.short_factor:
        for kind, factors in (("long", config.rope.long_factor), ("short", config.rope.short_factor)):
            tensor = f"rope_factors_{kind}.weight"
            plan.constants[tensor] = torch.tensor(factors, dtype=torch.float32)
            plan.tensors[tensor] = GgufTensor((len(factors),), torch.float32)
    return plan


def gguf_name(name: str, padding: int = 0) -> str:
    """llama.cpp's name of a tensor that is neither an expert's nor split."""
    stem, _, suffix = name.rpartition(".")
    if stem in OUTER:
        return f"{OUTER[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{int(layer) + padding}.{PARTS[part]}.{suffix}"


def _padding(config: ModelConfig) -> int:
    """Layers that do nothing, in front, where llama.cpp tells DeepSeek-V2-Lite by its number of layers."""
    if config.mla is None or config.layers in (26, 27):
        return 0
    if config.mla.q_rank is not None:
        raise UserError("llama_cpp: DeepSeek with q_lora_rank is not written here; use llama.cpp's own converter")
    if config.layers > LITE_LAYERS:
        raise UserError(f"llama_cpp reads DeepSeek without q_lora_rank up to 27 layers, not {config.layers}")
    return LITE_LAYERS - config.layers


def _add_kv_b(plan: GgufPlan, config: ModelConfig, name: str, padding: int, dtype: torch.dtype) -> None:
    """kv_b_proj [heads * (nope + v), rank] -> attn_k_b [heads, rank, nope] and attn_v_b [heads, v, rank]."""
    mla, heads = config.mla, config.heads
    assert mla is not None
    nope, rows = mla.nope_dim, mla.nope_dim + mla.v_dim
    layer = int(name.split(".")[2]) + padding

    def keys(weight: Tensor) -> Tensor:
        return weight.view(heads, rows, mla.kv_rank)[:, :nope].transpose(1, 2)

    def values(weight: Tensor) -> Tensor:
        return weight.view(heads, rows, mla.kv_rank)[:, nope:]

    plan.tensors[f"blk.{layer}.attn_k_b.weight"] = GgufTensor((heads, mla.kv_rank, nope), dtype)
    plan.tensors[f"blk.{layer}.attn_v_b.weight"] = GgufTensor((heads, mla.v_dim, mla.kv_rank), dtype)
    plan.targets[name] = [
        Target(f"blk.{layer}.attn_k_b.weight", change=keys),
        Target(f"blk.{layer}.attn_v_b.weight", change=values),
    ]


def _add_identity(plan: GgufPlan, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
    """A dense layer of zeros: it adds nothing to the residual stream."""
    mla, hidden, heads = config.mla, config.hidden, config.heads
    assert mla is not None
    shapes = {
        "attn_norm": (hidden,),
        "attn_q": (heads * (mla.nope_dim + mla.rope_dim), hidden),
        "attn_kv_a_mqa": (mla.latent_dim, hidden),
        "attn_kv_a_norm": (mla.kv_rank,),
        "attn_k_b": (heads, mla.kv_rank, mla.nope_dim),
        "attn_v_b": (heads, mla.v_dim, mla.kv_rank),
        "attn_output": (hidden, heads * mla.v_dim),
        "ffn_norm": (hidden,),
        "ffn_gate": (config.dense_width, hidden),
        "ffn_up": (config.dense_width, hidden),
        "ffn_down": (hidden, config.dense_width),
    }
    for name, shape in shapes.items():
        plan.tensors[f"blk.{layer}.{name}.weight"] = GgufTensor(shape, torch.float32 if len(shape) == 1 else dtype)


def _metadata(config: ModelConfig, raw: Mapping[str, Any], plan: GgufPlan) -> dict[str, Any]:
    moe = {
        "expert_count": config.num_experts,
        "expert_used_count": config.top_k,
        "expert_feed_forward_length": config.expert_width,
    }
    own = {
        "block_count": plan.layers,
        "context_length": config.max_positions,
        "embedding_length": config.hidden,
        "feed_forward_length": config.dense_width or int(raw["intermediate_size"]),
        "vocab_size": config.vocab_size,
        "attention.head_count": config.heads,
        "attention.head_count_kv": 1 if config.mla else config.kv_heads,
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "rope.freq_base": float(config.rope.theta),
        "rope.dimension_count": config.rope.dim,
        **moe,
    }
    match config.family:
        case "qwen2_moe":
            own["expert_shared_feed_forward_length"] = config.shared_width
        case "deepseek_v2":
            own |= _deepseek(config, raw, plan)
        case "phimoe":
            own |= {
                "rope.scaling.type": "longrope",
                "rope.scaling.attn_factor": float(config.rope.short_scale),
                "rope.scaling.original_context_length": config.rope.original_positions,
            }
    return {f"{plan.architecture}.{key}": value for key, value in own.items()} | {"tokenizer.ggml.model": "none"}


def _deepseek(config: ModelConfig, raw: Mapping[str, Any], plan: GgufPlan) -> dict[str, Any]:
    mla, rope = config.mla, config.rope
    assert mla is not None
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    found = {
        "leading_dense_block_count": plan.layers - len(config.moe_layers),
        "attention.kv_lora_rank": mla.kv_rank,
        "attention.key_length": mla.latent_dim,
        "attention.value_length": mla.kv_rank,
        "attention.key_length_mla": mla.nope_dim + mla.rope_dim,
        "attention.value_length_mla": mla.v_dim,
        "expert_shared_count": config.shared_width // config.expert_width,
        "expert_weights_scale": float(config.router.scaling),
        "expert_weights_norm": config.router.normalise,
        "expert_gating_func": SOFTMAX_GATING,
    }
    if rope.factor != 1.0:
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope.factor),
            "rope.scaling.original_context_length": rope.original_positions,
            "rope.scaling.yarn_beta_fast": float(rope.beta_fast),
            "rope.scaling.yarn_beta_slow": float(rope.beta_slow),
            "rope.scaling.yarn_log_multiplier": 0.1 * float(scaling.get("mscale_all_dim", 0.0)),
        }
    return found
