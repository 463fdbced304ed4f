"""The shared instance's tensors in the form that the fused CUDA pass reads; nothing big is copied."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specter_core.errors import UserError
from specter_core.model.attention import Attention, GroupedQueryAttention, LatentAttention
from specter_core.model.decoder import Decoder
from specter_core.model.kernels.linear import NormWeights
from specter_core.model.kernels.rope import RopeTables
from specter_core.model.layer import DecoderLayer
from specter_core.model.norm import LayerNorm, Norm, RMSNorm


@dataclass(frozen=True, slots=True)
class GqaWeights:
    """qkv [(heads + 2·kv_heads)·d, H], output [H, heads·d]."""

    qkv: Tensor
    qkv_bias: Tensor | None
    output: Tensor
    output_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class MlaWeights:
    """down [heads·nope | heads·rope | rope | rank, H], key_up [heads, nope, rank], value_up [heads, rank, v]."""

    down: Tensor
    down_bias: Tensor | None
    latent_norm: Tensor
    latent_eps: float
    key_up: Tensor
    value_up: Tensor
    output: Tensor
    output_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """router [E (+ 1 with a gated shared expert), H]; gate_up [2·I, H] and down [H, I] of the dense or shared MLP."""

    moe_index: int | None
    input_norm: NormWeights
    attention: GqaWeights | MlaWeights
    mlp_norm: NormWeights
    router: Tensor | None
    gate_up: Tensor | None
    mlp_down: Tensor | None
    gated: bool


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """embedding and head [V, H]."""

    embedding: Tensor
    norm: NormWeights
    head: Tensor
    head_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class FusedWeights:
    layers: tuple[LayerWeights, ...]
    head: HeadWeights

    @staticmethod
    def of(decoder: Decoder) -> FusedWeights:
        """UserError for what the fused kernels do not cover: a query down-projection, group-limited routing."""
        mla, groups = decoder.config.mla, decoder.config.router.groups
        if (mla is not None and mla.q_rank is not None) or groups > 1:
            rank = None if mla is None else mla.q_rank
            raise UserError(
                f"q_lora_rank {rank} with {groups} expert groups has no fused CUDA pass; run with fused=off"
            )
        head = HeadWeights(decoder._embedding, _norm(decoder._norm), decoder._head, decoder._head_bias)
        return FusedWeights(tuple(_layer(layer, decoder.dtype) for layer in decoder.layers), head)


def rope_tables(decoder: Decoder, positions: int) -> RopeTables:
    """The decoder's own rotation tables for positions 0 … positions-1."""
    table, config = decoder.layers[0]._rope, decoder.config.rope
    table._grow(positions)
    cos = torch.stack([side[0][:positions] for side in table._tables])
    sin = torch.stack([side[1][:positions] for side in table._tables])
    return RopeTables(cos.contiguous(), sin.contiguous(), config.interleaved, config.original_positions)


def _norm(norm: Norm) -> NormWeights:
    if isinstance(norm, LayerNorm):
        return NormWeights(norm.weight, norm.bias, norm.eps, True)
    assert isinstance(norm, RMSNorm)
    return NormWeights(norm.weight, None, norm.eps, False)


def _attention(attention: Attention) -> GqaWeights | MlaWeights:
    if isinstance(attention, GroupedQueryAttention):
        return GqaWeights(attention._qkv, attention._qkv_bias, attention._output, attention._output_bias)
    assert isinstance(attention, LatentAttention)
    return MlaWeights(
        attention._down,
        attention._down_bias,
        attention._latent_norm.weight,
        attention._latent_norm.eps,
        attention._key_up,
        attention._value_up,
        attention._output,
        attention._output_bias,
    )


def _layer(layer: DecoderLayer, dtype: torch.dtype) -> LayerWeights:
    mlp, router = layer._mlp, None
    gate_up = None if mlp is None else mlp._gate_up[: 2 * mlp._width]
    gated = mlp is not None and mlp._gated
    if layer._router is not None:
        parts = [layer._router.weight.to(dtype)]  # stored in this dtype; products are exact and sums in float32
        if mlp is not None and gated:
            parts.append(mlp._gate_up[2 * mlp._width : 2 * mlp._width + 1])
        router = torch.cat(parts)
    return LayerWeights(
        layer.moe_index,
        _norm(layer._input_norm),
        _attention(layer._attention),
        _norm(layer._mlp_norm),
        router,
        gate_up,
        None if mlp is None else mlp._down,
        gated,
    )
