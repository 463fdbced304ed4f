"""A prompt through the shared instance, layer by layer, in tiles made for many rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specter_core.model.config import ModelConfig
from specter_core.model.fused_weights import FusedWeights, GqaWeights, HeadWeights, LayerWeights, MlaWeights
from specter_core.model.kernels.head_linear import HeadTile, head_linear
from specter_core.model.kernels.linear import NormWeights, linear
from specter_core.model.kernels.mla import mla_prepare
from specter_core.model.kernels.norm import norm_rows
from specter_core.model.kernels.prefill_attention import gqa_prefill, mla_prefill
from specter_core.model.kernels.rope import RopeTables, RowTensors, rope_append
from specter_core.model.kernels.router import route
from specter_core.model.kernels.tiles import Preset, linear_tile, prefill_tile
from specter_core.model.kernels.tokens import embed
from specter_core.state.kv_cache import KVCache

_HEAD_ROWS = 64
_VALUE_TILE = HeadTile(128, 64, 3)


class PrefillPass:
    """One prompt of P tokens in KV row `row`. The caller fills tokens, positions, valid (all) and context (P); then
    embed; per layer attend, and dense or route + share + (routed experts, elsewhere, added to x with what is shared);
    `last_logits` of x's last row.

    tokens, positions, context int64 [P], valid bool [P]; x, normed [P, H]; ids int64 [P, k], weights float32 [P, k];
    shared float32 [P, H], what the shared experts add. chunk rows at a time through all but the experts. scratch uint8,
    at least `scratch_bytes`, free for others outside these calls. A row's bits depend neither on chunk nor on P; they
    are not those of decoding.
    """

    def __init__(
        self, weights: FusedWeights, config: ModelConfig, kv: KVCache, tables: RopeTables, row: int, count: int,
        chunk: int, scratch: Tensor,
    ) -> None:  # fmt: skip
        embedding = weights.head.embedding
        device, dtype = embedding.device, embedding.dtype
        self._weights, self._config, self._kv, self._tables = weights, config, kv, tables
        self._row, self._chunk, self._scratch = row, chunk, scratch
        self.tokens, self.positions, self.context = (
            torch.zeros(count, dtype=torch.int64, device=device) for _ in range(3)
        )
        self.valid = torch.zeros(count, dtype=torch.bool, device=device)
        self.x, self.normed = torch.empty(2, count, config.hidden, dtype=dtype, device=device)
        self.ids = torch.zeros(count, config.top_k, dtype=torch.int64, device=device)
        self.weights = torch.zeros(count, config.top_k, device=device)
        self.shared = torch.empty(count, config.hidden, device=device)
        self._gate = torch.empty(count, device=device)

    @staticmethod
    def scratch_bytes(config: ModelConfig, rows: int, dtype: torch.dtype) -> int:
        """For chunks of at most `rows` rows."""
        attention = sum(_attention_widths(config))
        width = config.hidden + max(attention, config.shared_width, config.dense_width)
        return rows * (width * dtype.itemsize + 4 * (config.num_experts + 1)) + 8 * _ALIGNMENT_BYTES

    def embed(self) -> None:
        """tokens -> x."""
        embed(self.tokens, self._weights.head.embedding, self.x)

    def attend(self, index: int) -> None:
        """Decoder layer `index`: x += attention(norm(x)), and the rows' KV entries."""
        layer = self._weights.layers[index]
        for part in self._parts():
            x = self.x[part]
            if isinstance(layer.attention, GqaWeights):
                mixed = self._grouped(index, layer.attention, layer.input_norm, part)
            else:
                mixed = self._latent(index, layer.attention, layer.input_norm, part)
            _linear(mixed, layer.attention.output, x, bias=layer.attention.output_bias, residual=x)

    def dense(self, index: int) -> None:
        """x += mlp(norm(x)) of a dense layer."""
        layer = self._weights.layers[index]
        for part in self._parts():
            x = self.x[part]
            carve = Carver(self._scratch)
            normed = carve(x.dtype, *x.shape)
            _norm(x, layer.mlp_norm, normed)
            self._mlp(layer, normed, x, carve, residual=x)

    def route(self, index: int) -> None:
        """normed = norm(x), then ids and weights."""
        layer, config = self._weights.layers[index], self._config
        assert layer.router is not None
        for part in self._parts():
            normed = self.normed[part]
            _norm(self.x[part], layer.mlp_norm, normed)
            scores = Carver(self._scratch)(torch.float32, normed.shape[0], layer.router.shape[0])
            _linear(normed, layer.router, scores)
            route(
                scores, self.ids[part], self.weights[part], rows=None, experts=config.num_experts,
                scaling=config.router.scaling, normalise=config.router.normalise, jitter=config.router.jitter,
                gate=self._gate[part] if layer.gated else None,
            )  # fmt: skip

    def share(self, index: int) -> Tensor | None:
        """shared = the shared experts' part of the layer, from normed; None where the layer has none."""
        layer = self._weights.layers[index]
        if layer.gate_up is None:
            return None
        for part in self._parts():
            row_gate = self._gate[part] if layer.gated else None
            self._mlp(layer, self.normed[part], self.shared[part], Carver(self._scratch), row_gate=row_gate)
        return self.shared

    def _parts(self) -> list[slice]:
        count = self.x.shape[0]
        return [slice(start, min(start + self._chunk, count)) for start in range(0, count, self._chunk)]

    def _rows(self, part: slice) -> RowTensors:
        steps = part.stop - part.start
        return RowTensors(self.positions[part], self.valid[part], self.context[part], steps, self._row)

    def _latent(self, index: int, attention: MlaWeights, norm: NormWeights, part: slice) -> Tensor:
        mla, config, rows = self._config.mla, self._config, self._rows(part)
        assert mla is not None
        x, count, heads, cache = self.x[part], rows.steps, config.heads, self._kv.latents[index]
        carve = Carver(self._scratch)
        normed = carve(x.dtype, *x.shape)
        projected, query, latent, mixed = (carve(x.dtype, count, width) for width in _attention_widths(config))
        _norm(x, norm, normed)
        _linear(normed, attention.down, projected, bias=attention.down_bias)
        widths = [heads * mla.nope_dim, heads * mla.rope_dim, mla.rope_dim, mla.kv_rank]
        q_nope, q_rope, k_rope, new = projected.split(widths, dim=1)
        query = query.view(count, heads, mla.latent_dim)
        mla_prepare(
            q_nope, q_rope, k_rope, new, attention.key_up, attention.latent_norm, attention.latent_eps, rows,
            self._tables, query, cache, row_tile=_HEAD_ROWS,
        )  # fmt: skip
        latent = latent.view(count, heads, mla.kv_rank)
        mla_prefill(query, cache, mla.kv_rank, rows, config.attention_scale, latent)
        values = mixed.view(count, heads, mla.v_dim)
        head_linear(latent, attention.value_up, values, row_tile=_HEAD_ROWS, tile=_VALUE_TILE)
        return mixed

    def _grouped(self, index: int, attention: GqaWeights, norm: NormWeights, part: slice) -> Tensor:
        config, rows = self._config, self._rows(part)
        x, count = self.x[part], rows.steps
        carve = Carver(self._scratch)
        normed = carve(x.dtype, *x.shape)
        projected, query, mixed = (carve(x.dtype, count, width) for width in _attention_widths(config))
        _norm(x, norm, normed)
        _linear(normed, attention.qkv, projected, bias=attention.qkv_bias)
        query = query.view(count, config.heads, config.head_dim)
        keys, values = self._kv.keys[index], self._kv.values[index]
        rope_append(projected, query, keys, values, rows, self._tables)
        gqa_prefill(query, keys, values, rows, config.attention_scale, mixed.view(query.shape))
        return mixed

    def _mlp(self, layer: LayerWeights, normed: Tensor, out: Tensor, carve: Carver, **options: Any) -> None:
        assert layer.gate_up is not None and layer.mlp_down is not None
        inner = carve(normed.dtype, normed.shape[0], layer.mlp_down.shape[1])
        _linear(normed, layer.gate_up, inner, swiglu=True)
        _linear(inner, layer.mlp_down, out, **options)


def last_logits(head: HeadWeights, x: Tensor) -> Tensor:
    """x [R, H] after the last layer -> float32 [R, V], for few rows."""
    normed = torch.empty_like(x)
    _norm(x, head.norm, normed)
    logits = x.new_empty(x.shape[0], head.head.shape[0], dtype=torch.float32)
    tile = linear_tile(head.head.shape[0], x.shape[1], pair=False, preset=Preset.TARGET)
    partial = x.new_empty(tile.split * logits.numel(), dtype=torch.float32)
    return linear(normed, head.head, logits, tile, bias=head.head_bias, partial=partial)


_ALIGNMENT_BYTES = 256


class Carver:
    """Hands out successive pieces of a buffer, uint8."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer, self._at = buffer, 0

    def __call__(self, dtype: torch.dtype, rows: int, width: int) -> Tensor:
        """The next [rows, width], not initialised."""
        stop = self._at + rows * width * dtype.itemsize
        assert stop <= self._buffer.numel(), (stop, self._buffer.numel())
        found = self._buffer[self._at : stop].view(dtype).view(rows, width)
        self._at = -(-stop // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return found


def _attention_widths(config: ModelConfig) -> list[int]:
    """Values per row of projected, query, (latent results,) mixed."""
    mla, heads = config.mla, config.heads
    if mla is None:
        return [(heads + 2 * config.kv_heads) * config.head_dim, heads * config.head_dim, heads * config.head_dim]
    projected = heads * (mla.nope_dim + mla.rope_dim) + mla.rope_dim + mla.kv_rank
    return [projected, heads * mla.latent_dim, heads * mla.kv_rank, heads * mla.v_dim]


def _norm(x: Tensor, norm: NormWeights, out: Tensor) -> None:
    norm_rows(x, norm.weight, norm.bias if norm.layer else None, norm.eps, out)


def _linear(x: Tensor, w: Tensor, out: Tensor, *, swiglu: bool = False, **options: Any) -> None:
    """options: those of `linear`."""
    linear(x, w, out, prefill_tile(out.shape[1], x.shape[1], pair=swiglu), swiglu=swiglu, **options)
