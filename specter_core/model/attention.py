"""The two attention blocks. Both append their rows' KV to the cache, then attend to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from specter_core.model.config import MLAConfig, ModelConfig
from specter_core.model.norm import RMSNorm
from specter_core.model.ops import DecoderOps
from specter_core.model.rope import Rotation
from specter_core.model.rows import Rows
from specter_core.model.tensor_source import TensorSource
from specter_core.state.kv_cache import KVCache


class Attention(Protocol):
    def __call__(self, x: Tensor, kv: KVCache, rows: Rows, rotation: Rotation) -> Tensor:
        """Normed x [R', H] with R' ≥ R rows -> [R, H]: KV append and attention, without residual."""
        ...

    def tensors(self) -> Iterator[Tensor]: ...


class GroupedQueryAttention:
    """Heads share KV heads in groups; q, k, v come from one product."""

    def __init__(self, layer: int, config: ModelConfig, source: TensorSource, ops: DecoderOps) -> None:
        prefix = f"model.layers.{layer}.self_attn"
        self._layer = layer
        self._config = config
        self._ops = ops
        parts = [f"{prefix}.{name}_proj" for name in "qkv"]
        self._qkv = source.stack(*(f"{part}.weight" for part in parts))  # [(Hq + 2·Hkv)·d, H]
        self._qkv_bias = source.stack(*(f"{part}.bias" for part in parts)) if config.qkv_bias else None
        self._output = source.get(f"{prefix}.o_proj.weight")  # [H, Hq·d]
        self._output_bias = source.get_optional(f"{prefix}.o_proj.bias", config.output_bias)

    def __call__(self, x: Tensor, kv: KVCache, rows: Rows, rotation: Rotation) -> Tensor:
        heads, kv_heads = self._config.heads, self._config.kv_heads
        qkv = self._ops.linear(x, self._qkv, self._qkv_bias)[: rows.count]
        qkv = qkv.unflatten(1, (heads + 2 * kv_heads, self._config.head_dim))
        rotated = self._ops.rope(qkv[:, : heads + kv_heads], rotation)
        keys, values = kv.keys[self._layer], kv.values[self._layer]
        kv.write(keys, rows, rotated[:, heads:])
        kv.write(values, rows, qkv[:, heads + kv_heads :])
        query = rotated[:, :heads].unflatten(1, (kv_heads, -1))  # [R, Hkv, G, d]
        mixed = self._ops.attention(query, keys, values, rows, self._config.attention_scale)
        return self._ops.linear(mixed.flatten(1), self._output, self._output_bias)

    def tensors(self) -> Iterator[Tensor]:
        for tensor in (self._qkv, self._qkv_bias, self._output, self._output_bias):
            if tensor is not None:
                yield tensor


def grouped_query_tensors(layer: int, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Official name -> shape of what GroupedQueryAttention reads."""
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    found: dict[str, tuple[int, ...]] = {}
    for part, out in (("q", query), ("k", key), ("v", key)):
        found[f"model.layers.{layer}.self_attn.{part}_proj.weight"] = (out, config.hidden)
        if config.qkv_bias:
            found[f"model.layers.{layer}.self_attn.{part}_proj.bias"] = (out,)
    found[f"model.layers.{layer}.self_attn.o_proj.weight"] = (config.hidden, query)
    if config.output_bias:
        found[f"model.layers.{layer}.self_attn.o_proj.bias"] = (config.hidden,)
    return found


class LatentAttention:
    """MLA in its absorbed form, in prefill and decoding alike: queries are carried into the latent space
    by W_UK and results out of it by W_UV, so that only latents are cached and attended (arXiv:2405.04434,
    2.1).
    """

    def __init__(self, layer: int, config: ModelConfig, mla: MLAConfig, source: TensorSource, ops: DecoderOps) -> None:
        prefix = f"model.layers.{layer}.self_attn"
        heads = config.heads
        self._layer = layer
        self._config = config
        self._mla = mla
        self._ops = ops
        kv_a = source.get(f"{prefix}.kv_a_proj_with_mqa.weight")  # [rank + rope, H]
        bias = source.get(f"{prefix}.kv_a_proj_with_mqa.bias") if config.qkv_bias else None
        latent, key_rope = kv_a.split((mla.kv_rank, mla.rope_dim))
        query = source.get(f"{prefix}.q_proj.weight" if mla.q_rank is None else f"{prefix}.q_b_proj.weight")
        query_nope, query_rope = self._by_head(query)
        self._query: Tensor | None = None
        if mla.q_rank is None:
            # one product, what is rotated lying together: q_nope | q_rope, of all heads, | k_rope | latent
            self._down = torch.cat([query_nope, query_rope, key_rope, latent])
            zeros = torch.zeros(query.shape[0], dtype=kv_a.dtype, device=kv_a.device)
            parts = None if bias is None else (zeros, bias[mla.kv_rank :], bias[: mla.kv_rank])
        else:
            self._down = torch.cat([source.get(f"{prefix}.q_a_proj.weight"), key_rope, latent])
            self._query = torch.cat([query_nope, query_rope])
            self._query_norm = RMSNorm(source.get(f"{prefix}.q_a_layernorm.weight"), 1e-6, ops)
            parts = None
            if bias is not None:
                parts = (source.get(f"{prefix}.q_a_proj.bias"), bias[mla.kv_rank :], bias[: mla.kv_rank])
        self._down_bias = None if parts is None else torch.cat(parts)
        self._latent_norm = RMSNorm(source.get(f"{prefix}.kv_a_layernorm.weight"), 1e-6, ops)
        kv_b = source.get(f"{prefix}.kv_b_proj.weight").unflatten(0, (heads, mla.nope_dim + mla.v_dim))
        self._key_up = kv_b[:, : mla.nope_dim].contiguous()  # W_UK [heads, nope, rank]
        self._value_up = kv_b[:, mla.nope_dim :].transpose(1, 2).contiguous()  # W_UV [heads, rank, v]
        self._output = source.get(f"{prefix}.o_proj.weight")  # [H, heads·v]
        self._output_bias = source.get_optional(f"{prefix}.o_proj.bias", config.output_bias)

    def _by_head(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """[heads·(nope + rope), in] -> all heads' nope rows, all heads' rope rows."""
        heads = query.unflatten(0, (self._config.heads, -1))
        nope, rope = heads.split((self._mla.nope_dim, self._mla.rope_dim), dim=1)
        return nope.flatten(0, 1), rope.flatten(0, 1)

    def __call__(self, x: Tensor, kv: KVCache, rows: Rows, rotation: Rotation) -> Tensor:
        heads, mla, count = self._config.heads, self._mla, rows.count
        nope, rope = heads * mla.nope_dim, heads * mla.rope_dim
        down = self._ops.linear(x, self._down, self._down_bias)
        if self._query is None:
            query_nope = down[:, :nope]
            pe = down[:count, nope : nope + rope + mla.rope_dim]
        else:
            query = self._ops.linear(self._query_norm(down[:, : mla.q_rank]), self._query)
            query_nope = query[:, :nope]
            pe = torch.cat([query[:count, nope:], down[:count, mla.q_rank : -mla.kv_rank]], dim=1)
        pe = self._ops.rope(pe.unflatten(1, (heads + 1, mla.rope_dim)), rotation)  # [R, heads + 1, rope]
        latent = self._latent_norm(down[:, -mla.kv_rank :])[:count]
        buffer = kv.latents[self._layer]  # [B, S_max + 1, rank + rope]
        kv.write(buffer, rows, torch.cat([latent, pe[:, heads]], dim=1))
        absorbed = self._ops.head_linear(query_nope.unflatten(1, (heads, mla.nope_dim)), self._key_up)[:count]
        query = torch.cat([absorbed, pe[:, :heads]], dim=2).unsqueeze(1)  # [R, 1, heads, rank + rope]
        entries = buffer.unsqueeze(2)  # one KV head
        mixed = self._ops.attention(query, entries, entries[..., : mla.kv_rank], rows, self._config.attention_scale)
        values = self._ops.head_linear(mixed.squeeze(1), self._value_up)  # [R, heads, v]
        return self._ops.linear(values.flatten(1), self._output, self._output_bias)

    def tensors(self) -> Iterator[Tensor]:
        yield from self._latent_norm.tensors()
        if self._query is not None:
            yield from self._query_norm.tensors()
        for tensor in (self._down, self._down_bias, self._query, self._key_up, self._value_up, self._output):
            if tensor is not None:
                yield tensor
        if self._output_bias is not None:
            yield self._output_bias
