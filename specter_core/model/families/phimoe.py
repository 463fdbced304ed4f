"""PhiMoE (Phi-3.5-MoE, arXiv:2404.14219 and 2409.12136): sparsemixer, LayerNorm with bias, longrope,
biases.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from specter_core.errors import UserError
from specter_core.model.attention import GroupedQueryAttention, grouped_query_tensors
from specter_core.model.config import Fields, ModelConfig, NormKind, RopeConfig, RopeKind, RouterConfig
from specter_core.model.family import ExpertNames, expert_tensors
from specter_core.model.layer import DecoderLayer
from specter_core.model.norm import load_norm
from specter_core.model.ops import DecoderOps
from specter_core.model.rope import RopeTable
from specter_core.model.router import Router
from specter_core.model.tensor_source import TensorSource

_OTHER_PARTS = {".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}


@dataclass(frozen=True, slots=True)
class Phimoe:
    name: str = "phimoe"
    model_types: tuple[str, ...] = ("phimoe",)
    architectures: tuple[str, ...] = ("PhiMoEForCausalLM", "PhimoeForCausalLM")

    def read_config(self, raw: Mapping[str, Any]) -> ModelConfig:
        fields = Fields(raw)
        fields.require_silu()
        layers, heads = fields.integer("num_hidden_layers"), fields.integer("num_attention_heads")
        head_dim = fields.integer("head_dim", fields.integer("hidden_size") // heads)
        positions = fields.integer("max_position_embeddings")
        attention_bias = fields.flag("attention_bias")
        return ModelConfig(
            family=self.name,
            vocab_size=fields.integer("vocab_size"),
            hidden=fields.integer("hidden_size"),
            layers=layers,
            moe_layers=tuple(range(layers)),
            num_experts=fields.integer("num_local_experts"),
            top_k=2,  # sparsemixer is two argmax passes, whatever num_experts_per_tok says
            expert_width=fields.integer("intermediate_size"),
            shared_width=0,
            dense_width=0,
            heads=heads,
            kv_heads=fields.integer("num_key_value_heads", heads),
            head_dim=head_dim,
            attention_scale=head_dim**-0.5,
            norm=NormKind.LAYER,
            norm_eps=fields.number("rms_norm_eps", 1e-5),
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            head_bias=fields.flag("lm_head_bias"),
            rope=_read_rope(fields, head_dim, positions),
            router=RouterConfig(jitter=fields.number("router_jitter_noise", 0.01)),
            eos_ids=fields.eos_ids(),
            bos_id=fields.bos_id(),
            max_positions=min(positions, fields.integer("sliding_window", positions)),
            dtype=fields.dtype(),
            tie_embeddings=fields.flag("tie_word_embeddings"),
        )

    def expected_tensors(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        hidden = config.hidden
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
        for layer in range(config.layers):
            prefix = f"model.layers.{layer}"
            for norm in ("input_layernorm", "post_attention_layernorm"):
                found[f"{prefix}.{norm}.weight"] = found[f"{prefix}.{norm}.bias"] = (hidden,)
            found |= grouped_query_tensors(layer, config)
            found[f"{prefix}.block_sparse_moe.gate.weight"] = (config.num_experts, hidden)
        found["model.norm.weight"] = found["model.norm.bias"] = (hidden,)
        if not config.tie_embeddings:
            found["lm_head.weight"] = (config.vocab_size, hidden)
        if config.head_bias:
            found["lm_head.bias"] = (config.vocab_size,)
        return found | expert_tensors(self, config)

    def expert_names(self, layer: int, expert: int) -> ExpertNames:
        prefix = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
        return ExpertNames(*(f"{prefix}.{part}.weight" for part in ("w1", "w3", "w2")))

    def aliases(self, name: str) -> tuple[str, ...]:
        """transformers 5's module names, under which GPTQModel saves this family."""
        other = name.replace(".block_sparse_moe.gate.", ".mlp.router.").replace(".block_sparse_moe.", ".mlp.")
        if other == name:
            return ()
        for part, replacement in _OTHER_PARTS.items():
            other = other.replace(part, replacement)
        return (other,)

    def build_layers(self, config: ModelConfig, source: TensorSource, ops: DecoderOps) -> list[DecoderLayer]:
        rope = RopeTable(config.rope, source.device)
        return [self._build_layer(config, layer, source, rope, ops) for layer in range(config.layers)]

    def _build_layer(
        self, config: ModelConfig, layer: int, source: TensorSource, rope: RopeTable, ops: DecoderOps
    ) -> DecoderLayer:
        prefix = f"model.layers.{layer}"
        gate = source.get(f"{prefix}.block_sparse_moe.gate.weight", torch.float32)
        return DecoderLayer(
            moe_index=config.moe_index[layer],
            input_norm=load_norm(f"{prefix}.input_layernorm", config, source, ops),
            attention=GroupedQueryAttention(layer, config, source, ops),
            mlp_norm=load_norm(f"{prefix}.post_attention_layernorm", config, source, ops),
            mlp=None,
            router=Router(gate, config.top_k, config.router, ops),
            rope=rope,
            ops=ops,
        )


def _read_rope(fields: Fields, dim: int, positions: int) -> RopeConfig:
    """Long factors apply beyond `original_positions`, as in the published model's own code; transformers 5.17
    switches only the scale there and keeps the short factors."""
    raw = fields.rope_parameters()
    theta, kind = float(raw.get("rope_theta") or 10000.0), raw["rope_type"]
    if kind == "default":
        return RopeConfig(dim, theta)
    if kind != "longrope":
        raise UserError(
            f"config.json: rope type {kind!r} is not supported here, known: default, longrope; use another model"
        )
    short, long = tuple(map(float, raw["short_factor"])), tuple(map(float, raw["long_factor"]))
    if len(short) != dim // 2 or len(long) != dim // 2:
        raise UserError(
            f"config.json: longrope has {len(short)} short and {len(long)} long factors, head size"
            f" {dim} needs {dim // 2}; correct the file"
        )
    original = int(raw.get("original_max_position_embeddings") or positions)
    factor = float(raw.get("factor") or positions / original)
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    default = float(raw.get("attention_factor") or default)
    return RopeConfig(
        dim,
        theta,
        kind=RopeKind.LONGROPE,
        original_positions=original,
        short_factor=short,
        long_factor=long,
        short_scale=float(raw.get("short_mscale") or default),
        long_scale=float(raw.get("long_mscale") or default),
    )


FAMILY = Phimoe()
