"""DeepSeek-V2 and -Lite (arXiv:2405.04434): MLA, yarn, shared experts, dense first layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from specter_core.errors import UserError
from specter_core.model.attention import LatentAttention
from specter_core.model.config import (
    Fields,
    MLAConfig,
    ModelConfig,
    NormKind,
    RopeConfig,
    RopeKind,
    RouterConfig,
)
from specter_core.model.family import ExpertNames, expert_tensors
from specter_core.model.layer import DecoderLayer
from specter_core.model.mlp import load_swiglu
from specter_core.model.norm import load_norm
from specter_core.model.ops import DecoderOps
from specter_core.model.rope import RopeTable, yarn_mscale
from specter_core.model.router import Router
from specter_core.model.tensor_source import TensorSource


@dataclass(frozen=True, slots=True)
class DeepseekV2:
    name: str = "deepseek_v2"
    model_types: tuple[str, ...] = ("deepseek_v2",)
    architectures: tuple[str, ...] = ("DeepseekV2ForCausalLM",)

    def read_config(self, raw: Mapping[str, Any]) -> ModelConfig:
        fields = Fields(raw)
        fields.require_silu()
        layers, experts = fields.integer("num_hidden_layers"), fields.integer("n_routed_experts")
        first_dense, frequency = (
            fields.integer("first_k_dense_replace", 0),
            fields.integer("moe_layer_freq", 1),
        )
        q_rank = fields.optional("q_lora_rank")
        mla = MLAConfig(
            kv_rank=fields.integer("kv_lora_rank"),
            q_rank=None if q_rank is None else fields.integer("q_lora_rank"),
            nope_dim=fields.integer("qk_nope_head_dim"),
            rope_dim=fields.integer("qk_rope_head_dim"),
            v_dim=fields.integer("v_head_dim"),
        )
        if fields.flag("mlp_bias"):
            raise UserError("config.json: mlp_bias true is not supported, expected false; use another model")
        rope, softmax_factor = _read_rope(fields, mla.rope_dim)
        qk_dim = mla.nope_dim + mla.rope_dim
        width = fields.integer("moe_intermediate_size")
        return ModelConfig(
            family=self.name,
            vocab_size=fields.integer("vocab_size"),
            hidden=fields.integer("hidden_size"),
            layers=layers,
            moe_layers=tuple(n for n in range(layers) if n >= first_dense and n % frequency == 0),
            num_experts=experts,
            top_k=fields.integer("num_experts_per_tok"),
            expert_width=width,
            shared_width=width * fields.integer("n_shared_experts", 0),
            dense_width=fields.integer("intermediate_size"),
            heads=fields.integer("num_attention_heads"),
            kv_heads=fields.integer("num_attention_heads"),
            head_dim=qk_dim,
            attention_scale=qk_dim**-0.5 * softmax_factor,
            norm=NormKind.RMS,
            norm_eps=fields.number("rms_norm_eps", 1e-6),
            qkv_bias=fields.flag("attention_bias"),
            output_bias=fields.flag("attention_bias"),
            head_bias=False,
            rope=rope,
            router=_read_router(fields),
            eos_ids=fields.eos_ids(),
            bos_id=fields.bos_id(),
            max_positions=fields.integer("max_position_embeddings"),
            dtype=fields.dtype(),
            tie_embeddings=fields.flag("tie_word_embeddings"),
            mla=mla,
        )

    def expected_tensors(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        mla, hidden, heads = config.mla, config.hidden, config.heads
        assert mla is not None
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
        query_out = heads * (mla.nope_dim + mla.rope_dim)
        for layer in range(config.layers):
            prefix = f"model.layers.{layer}"
            found[f"{prefix}.input_layernorm.weight"] = (hidden,)
            found[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
            attention: dict[str, tuple[int, ...]] = {}
            if mla.q_rank is None:
                attention["q_proj.weight"] = (query_out, hidden)
            else:
                attention["q_a_proj.weight"] = (mla.q_rank, hidden)
                attention["q_a_layernorm.weight"] = (mla.q_rank,)
                attention["q_b_proj.weight"] = (query_out, mla.q_rank)
            attention["kv_a_proj_with_mqa.weight"] = (mla.latent_dim, hidden)
            attention["kv_a_layernorm.weight"] = (mla.kv_rank,)
            attention["kv_b_proj.weight"] = (heads * (mla.nope_dim + mla.v_dim), mla.kv_rank)
            attention["o_proj.weight"] = (hidden, heads * mla.v_dim)
            if config.qkv_bias:
                attention["kv_a_proj_with_mqa.bias"] = (mla.latent_dim,)
                attention["o_proj.bias"] = (hidden,)
                if mla.q_rank is not None:
                    attention["q_a_proj.bias"] = (mla.q_rank,)
            found.update({f"{prefix}.self_attn.{name}": shape for name, shape in attention.items()})
            if layer in config.moe_layers:
                found[f"{prefix}.mlp.gate.weight"] = (config.num_experts, hidden)
                mlp, width = f"{prefix}.mlp.shared_experts", config.shared_width
            else:
                mlp, width = f"{prefix}.mlp", config.dense_width
            if width:
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
        assert config.mla is not None
        prefix = f"model.layers.{layer}"
        moe_index = config.moe_index.get(layer)
        router = mlp = None
        if moe_index is None:
            mlp = load_swiglu(f"{prefix}.mlp", source, ops)
        else:
            gate = source.get(f"{prefix}.mlp.gate.weight", torch.float32)
            router = Router(gate, config.top_k, config.router, ops)
            mlp = load_swiglu(f"{prefix}.mlp.shared_experts", source, ops) if config.shared_width else None
        return DecoderLayer(
            moe_index=moe_index,
            input_norm=load_norm(f"{prefix}.input_layernorm", config, source, ops),
            attention=LatentAttention(layer, config, config.mla, source, ops),
            mlp_norm=load_norm(f"{prefix}.post_attention_layernorm", config, source, ops),
            mlp=mlp,
            router=router,
            rope=rope,
            ops=ops,
        )


def _read_rope(fields: Fields, dim: int) -> tuple[RopeConfig, float]:
    """The rope and the factor that yarn puts on the softmax scale (mscale_all_dim, squared)."""
    raw = fields.rope_parameters()
    theta, kind = float(raw.get("rope_theta") or 10000.0), raw["rope_type"]
    if kind == "default":
        return RopeConfig(dim, theta, interleaved=True), 1.0
    if kind != "yarn":
        raise UserError(
            f"config.json: rope type {kind!r} is not supported here, known: default, yarn; use another model"
        )
    factor = float(raw["factor"])
    mscale, mscale_all = float(raw.get("mscale") or 0), float(raw.get("mscale_all_dim") or 0)
    scale = raw.get("attention_factor")
    if scale is None:
        both = mscale and mscale_all
        scale = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all) if both else yarn_mscale(factor, 1.0)
    rope = RopeConfig(
        dim,
        theta,
        kind=RopeKind.YARN,
        interleaved=True,
        scale=float(scale),
        factor=factor,
        original_positions=int(
            raw.get("original_max_position_embeddings") or fields.integer("max_position_embeddings")
        ),
        beta_fast=float(raw.get("beta_fast") or 32),
        beta_slow=float(raw.get("beta_slow") or 1),
        truncate=bool(raw.get("truncate", True)),
    )
    return rope, yarn_mscale(factor, mscale_all) ** 2 if mscale_all else 1.0


def _read_router(fields: Fields) -> RouterConfig:
    """norm_topk_prob is ignored, as by transformers 5.17's router; the published checkpoints have it
    false.
    """
    method, scoring = fields.optional("topk_method") or "greedy", fields.optional("scoring_func") or "softmax"
    if method not in ("greedy", "group_limited_greedy") or scoring != "softmax":
        raise UserError(
            f"config.json: topk_method {method!r} with scoring_func {scoring!r} is not supported,"
            " known: greedy and group_limited_greedy with softmax; use another model"
        )
    scaling = fields.number("routed_scaling_factor", 1.0)
    if method == "greedy":
        return RouterConfig(scaling=scaling)
    return RouterConfig(scaling=scaling, groups=fields.integer("n_group"), top_groups=fields.integer("topk_group"))


FAMILY = DeepseekV2()
