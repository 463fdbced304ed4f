"""Qwen2-MoE (Qwen1.5-MoE-A2.7B): q, k, v biases, a shared expert scaled by a sigmoid gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from specter_core.errors import UserError
from specter_core.model.attention import GroupedQueryAttention, grouped_query_tensors
from specter_core.model.config import Fields, ModelConfig, NormKind, RopeConfig, RouterConfig
from specter_core.model.family import ExpertNames, expert_tensors
from specter_core.model.layer import DecoderLayer
from specter_core.model.mlp import load_swiglu
from specter_core.model.norm import load_norm
from specter_core.model.ops import DecoderOps
from specter_core.model.rope import RopeTable
from specter_core.model.router import Router
from specter_core.model.tensor_source import TensorSource


@dataclass(frozen=True, slots=True)
class Qwen2Moe:
    name: str = "qwen2_moe"
    model_types: tuple[str, ...] = ("qwen2_moe",)
    architectures: tuple[str, ...] = ("Qwen2MoeForCausalLM",)

    def read_config(self, raw: Mapping[str, Any]) -> ModelConfig:
        fields = Fields(raw)
        fields.require_silu()
        layers, step = fields.integer("num_hidden_layers"), fields.integer("decoder_sparse_step", 1)
        dense_only = fields.optional("mlp_only_layers") or []
        rope = fields.rope_parameters()
        if rope["rope_type"] != "default":
            raise UserError(
                f"config.json: rope type {rope['rope_type']!r} is not supported here, known: default; use another model"
            )
        heads = fields.integer("num_attention_heads")
        head_dim = fields.integer("head_dim", fields.integer("hidden_size") // heads)
        positions = fields.integer("max_position_embeddings")
        if fields.flag("use_sliding_window"):
            positions = min(positions, fields.integer("sliding_window", positions))
        return ModelConfig(
            family=self.name,
            vocab_size=fields.integer("vocab_size"),
            hidden=fields.integer("hidden_size"),
            layers=layers,
            moe_layers=tuple(n for n in range(layers) if n not in dense_only and (n + 1) % step == 0),
            num_experts=fields.integer("num_experts"),
            top_k=fields.integer("num_experts_per_tok"),
            expert_width=fields.integer("moe_intermediate_size"),
            shared_width=fields.integer("shared_expert_intermediate_size"),
            dense_width=fields.integer("intermediate_size"),
            heads=heads,
            kv_heads=fields.integer("num_key_value_heads", heads),
            head_dim=head_dim,
            attention_scale=head_dim**-0.5,
            norm=NormKind.RMS,
            norm_eps=fields.number("rms_norm_eps", 1e-6),
            qkv_bias=fields.flag("qkv_bias", True),
            output_bias=False,
            head_bias=False,
            rope=RopeConfig(head_dim, float(rope.get("rope_theta") or 10000.0)),
            router=RouterConfig(normalise=fields.flag("norm_topk_prob")),
            eos_ids=fields.eos_ids(),
            bos_id=fields.bos_id(),
            max_positions=positions,
            dtype=fields.dtype(),
            tie_embeddings=fields.flag("tie_word_embeddings"),
        )

    def expected_tensors(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        hidden = config.hidden
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
        for layer in range(config.layers):
            prefix = f"model.layers.{layer}"
            found[f"{prefix}.input_layernorm.weight"] = (hidden,)
            found[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
            found |= grouped_query_tensors(layer, config)
            if layer in config.moe_layers:
                found[f"{prefix}.mlp.gate.weight"] = (config.num_experts, hidden)
                found[f"{prefix}.mlp.shared_expert_gate.weight"] = (1, hidden)
                mlp, width = f"{prefix}.mlp.shared_expert", config.shared_width
            else:
                mlp, width = f"{prefix}.mlp", config.dense_width
            found[f"{mlp}.gate_proj.weight"] = found[f"{mlp}.up_proj.weight"] = (width, hidden)
            found[f"{mlp}.down_proj.weight"] = (hidden, width)
        found["model.norm.weight"] = (hidden,)
        if not config.tie_embeddings:
            found["lm_head.weight"] = (config.vocab_size, hidden)
        return found | expert_tensors(self, config)

    def expert_names(self, layer: int, expert: int) -> ExpertNames:
        prefix = f"model.layers.{layer}.mlp.experts.{expert}"
        return ExpertNames(*(f"{prefix}.{part}_proj.weight" for part in ("gate", "up", "down")))

    def aliases(self, name: str) -> tuple[str, ...]:
        return ()

    def build_layers(self, config: ModelConfig, source: TensorSource, ops: DecoderOps) -> list[DecoderLayer]:
        rope = RopeTable(config.rope, source.device)
        return [self._build_layer(config, layer, source, rope, ops) for layer in range(config.layers)]

    def _build_layer(
        self, config: ModelConfig, layer: int, source: TensorSource, rope: RopeTable, ops: DecoderOps
    ) -> DecoderLayer:
        prefix = f"model.layers.{layer}"
        moe_index = config.moe_index.get(layer)
        if moe_index is None:
            router = None
            mlp = load_swiglu(f"{prefix}.mlp", source, ops)
        else:
            gate = source.get(f"{prefix}.mlp.gate.weight", torch.float32)
            router = Router(gate, config.top_k, config.router, ops)
            scalar_gate = f"{prefix}.mlp.shared_expert_gate.weight"
            mlp = load_swiglu(f"{prefix}.mlp.shared_expert", source, ops, scalar_gate)
        return DecoderLayer(
            moe_index=moe_index,
            input_norm=load_norm(f"{prefix}.input_layernorm", config, source, ops),
            attention=GroupedQueryAttention(layer, config, source, ops),
            mlp_norm=load_norm(f"{prefix}.post_attention_layernorm", config, source, ops),
            mlp=mlp,
            router=router,
            rope=rope,
            ops=ops,
        )


FAMILY = Qwen2Moe()
