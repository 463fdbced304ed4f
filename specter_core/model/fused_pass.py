"""A decode pass of the shared instance in few launches on buffers of its own, fit for CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specter_core.model.config import ModelConfig
from specter_core.model.fused_weights import FusedWeights, GqaWeights, LayerWeights, MlaWeights
from specter_core.model.kernels import gqa_row
from specter_core.model.kernels.attention import combine_splits, gqa_splits
from specter_core.model.kernels.gemv import gemv
from specter_core.model.kernels.linear import NormWeights, linear
from specter_core.model.kernels.mla import mla_prepare
from specter_core.model.kernels.mla_attention import mla_splits, mla_values
from specter_core.model.kernels.norm import norm_rows
from specter_core.model.kernels.partials import Partials
from specter_core.model.kernels.rope import RopeTables, RowTensors, rope_append
from specter_core.model.kernels.router import Routing, route
from specter_core.model.kernels.shared_down import SharedDown
from specter_core.model.kernels.tiles import Preset, gemv_tile, linear_tile
from specter_core.model.kernels.tokens import ARGMAX_BLOCK, Margin, argmax, embed
from specter_core.state.kv_cache import KVCache

_SPLIT_LIMIT = 8


class FusedPass:
    """B sequences x T steps. The caller fills tokens, positions, valid and context (in place, also between replays);
    then per pass: embed; per layer attend, and dense or route + routed experts into `routed` + combine (`alone`:
    route + routed experts beside `shared_down`, into x); head, choose.

    Buffers: tokens, positions, context int64 [R], valid bool [R]; x, normed [R, H]; ids int64 [R, k], weights
    float32 [R, k]; routed float32 [R, H]; logits float32 [R, V]; chosen int64 [R]. bucket: every valid position is
    below it; no bit depends on it, on B, T or the other rows, except that a draft of one row takes other launches
    than one of several and one of GQA other launches in short contexts. Passes with one preset else agree bit for bit.
    pdl: programmatic dependent launches (kernels/pdl.py), for CUDA only. logits: off where the caller makes its own of
    some rows of x.
    """

    def __init__(
        self,
        weights: FusedWeights,
        config: ModelConfig,
        kv: KVCache,
        tables: RopeTables,
        steps: int,
        bucket: int,
        preset: Preset,
        *,
        pdl: bool = False,
        logits: bool = True,
    ) -> None:
        embedding = weights.head.embedding
        rows, device, dtype = kv.batch * steps, embedding.device, embedding.dtype
        self._weights, self._config, self._kv, self._tables = weights, config, kv, tables
        self._bucket, self._preset = min(bucket, kv.capacity), preset
        self._pdl = pdl
        self._draft = preset is Preset.DRAFT
        self._row_tile = 16 if self._draft else 32

        def integers(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        def counts(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        def floats(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float32, device=device)

        def values(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.tokens, self.positions, self.context = integers(rows), integers(rows), integers(rows)
        self.valid = torch.zeros(rows, dtype=torch.bool, device=device)
        self.rows = RowTensors(self.positions, self.valid, self.context, steps)
        self.x, self.normed = values(rows, config.hidden), values(rows, config.hidden)
        self._input = values(rows, config.hidden)
        self.ids, self.weights = integers(rows, config.top_k), floats(rows, config.top_k)
        self.routed, self.logits = floats(rows, config.hidden), floats(rows if logits else 0, config.vocab_size)
        self.chosen = integers(rows)

        mla, heads = config.mla, config.heads
        # What a draft step draws together, by measurement (LOG: "Draft step: fewer launches"). One row: the choice of
        # experts with the router's product, shared experts with routed ones. Any rows of GQA, over short contexts: all
        # of attention between the projections.
        self.alone = self._draft and rows == 1
        self._attends_at_once = self._draft and mla is None and steps == 1 and self._bucket <= gqa_row.REACH
        self._arrivals, self._head_arrivals = counts(1), counts(rows * heads)
        value_dim = config.head_dim if mla is None else mla.kv_rank
        self._part = Partials.allocate(rows, heads, value_dim, self._bucket, device)
        if mla is None:
            self._projected = values(rows, (heads + 2 * config.kv_heads) * config.head_dim)
            self._query = values(rows, heads, config.head_dim)
            self._mixed = values(rows, heads * config.head_dim)
        else:
            self._projected = values(rows, heads * (mla.nope_dim + mla.rope_dim) + mla.rope_dim + mla.kv_rank)
            self._query = values(rows, heads, mla.latent_dim)
            self._mixed = values(rows, heads * mla.v_dim)
            self._latent_mix = None if self._draft else values(rows, heads, mla.kv_rank)
        self._scores, self._gate = floats(rows * (config.num_experts + 1)), floats(rows)
        inner = max(config.shared_width, config.dense_width)
        self._inner = values(rows * inner)
        self._partial = floats(_SPLIT_LIMIT * rows * 1024)  # tiles split only products of at most 1,024 outputs
        parts = -(-config.vocab_size // ARGMAX_BLOCK)
        self._best, self._best_id = floats(rows * parts), counts(rows * parts)

    def embed(self) -> None:
        """tokens -> x."""
        embed(self.tokens, self._weights.head.embedding, self.x, pdl=self._pdl)

    def attend(self, index: int) -> None:
        """Decoder layer `index`: x += attention(norm(x)), and the rows' KV entries."""
        layer = self._weights.layers[index]
        if isinstance(layer.attention, GqaWeights):
            self._grouped(index, layer, layer.attention)
        else:
            self._latent(index, layer, layer.attention)
        attention = layer.attention
        self._linear(self._mixed, attention.output, self.x, bias=attention.output_bias, residual=self.x)

    def dense(self, index: int) -> None:
        """x += mlp(norm(x)) of a dense layer."""
        layer = self._weights.layers[index]
        self._mlp(layer, self.x, layer.mlp_norm, addend=None, row_gate=None)

    def route(self, index: int, counters: Tensor | None = None) -> None:
        """normed = norm(x), then ids and weights; counters int32 [E] (this layer's ELB row) counts the choices."""
        layer, config = self._weights.layers[index], self._config
        assert layer.router is not None
        gate = self._gate if layer.gated else None
        if self.alone:
            routing = Routing(
                self.ids, self.weights, self.valid, self._arrivals, config.num_experts, config.router.scaling,
                config.router.normalise, config.router.jitter, counters, gate,
            )  # fmt: skip
            self._draft_logits(layer, routing)
            return
        scores = self._draft_logits(layer) if self._draft else self._target_logits(layer)
        route(
            scores,
            self.ids,
            self.weights,
            rows=self.rows,
            experts=config.num_experts,
            scaling=config.router.scaling,
            normalise=config.router.normalise,
            jitter=config.router.jitter,
            counters=counters,
            gate=gate,
            pdl=self._pdl,
        )

    def combine(self, index: int) -> None:
        """x += routed + shared experts(normed)."""
        layer = self._weights.layers[index]
        if layer.gate_up is None:
            self.x.add_(self.routed)
            return
        row_gate = self._gate if layer.gated else None
        if self._draft:  # `route` has done the first half
            self._down(layer, addend=self.routed, row_gate=row_gate)
        else:
            self._mlp(layer, self.normed, None, addend=self.routed, row_gate=row_gate)

    def shared_down(self, index: int) -> SharedDown | None:
        """Where `alone`, in place of `combine`: to run beside the routed experts; its sum with x goes to `routed`."""
        assert self.alone
        layer = self._weights.layers[index]
        if layer.mlp_down is None:
            return None
        gate = self._gate if layer.gated else None
        return SharedDown(self._inner_of(layer), layer.mlp_down, gate, self.x, self.routed)

    def head(self) -> None:
        """x -> logits, float32."""
        head = self._weights.head
        self._linear(self.x, head.head, self.logits, bias=head.head_bias, norm=head.norm)

    def choose(self, margin: Margin | None = None) -> None:
        """logits -> chosen: the greedy token, ties to the lowest id; margin: by how much it leads."""
        argmax(self.logits, self.chosen, self._best, self._best_id, margin, pdl=self._pdl)

    def _latent(self, index: int, layer: LayerWeights, attention: MlaWeights) -> None:
        mla, config = self._config.mla, self._config
        assert mla is not None
        self._linear(self.x, attention.down, self._projected, bias=attention.down_bias, norm=layer.input_norm)
        widths = [config.heads * mla.nope_dim, config.heads * mla.rope_dim, mla.rope_dim, mla.kv_rank]
        cache = self._kv.latents[index]
        q_nope, q_rope, k_rope, latent = self._projected.split(widths, dim=1)
        mla_prepare(
            q_nope,
            q_rope,
            k_rope,
            latent,
            attention.key_up,
            attention.latent_norm,
            attention.latent_eps,
            self.rows,
            self._tables,
            self._query,
            cache,
            row_tile=self._row_tile,
            pdl=self._pdl,
        )
        mla_splits(
            self._query, cache, mla.kv_rank, self.rows, config.attention_scale, self._bucket, self._part, pdl=self._pdl
        )
        mla_values(
            self._part,
            attention.value_up,
            self.rows,
            self._bucket,
            self._mixed,
            latent=self._latent_mix,
            row_tile=self._row_tile,
            pdl=self._pdl,
        )

    def _grouped(self, index: int, layer: LayerWeights, attention: GqaWeights) -> None:
        self._linear(self.x, attention.qkv, self._projected, bias=attention.qkv_bias, norm=layer.input_norm)
        keys, values = self._kv.keys[index], self._kv.values[index]
        if self._attends_at_once:
            gqa_row.gqa_row(
                self._projected, keys, values, self.rows, self._tables, self._config.attention_scale, self._bucket,
                self._part, self._head_arrivals, self._mixed.view(self._query.shape), pdl=self._pdl,
            )  # fmt: skip
            return
        rope_append(self._projected, self._query, keys, values, self.rows, self._tables, pdl=self._pdl)
        gqa_splits(
            self._query, keys, values, self.rows, self._config.attention_scale, self._bucket, self._part, pdl=self._pdl
        )
        combine_splits(self._part, self.rows, self._bucket, self._mixed.view(self._query.shape), pdl=self._pdl)

    def _mlp(
        self, layer: LayerWeights, x: Tensor, norm: NormWeights | None, addend: Tensor | None, row_gate: Tensor | None
    ) -> None:
        assert layer.gate_up is not None
        self._linear(x, layer.gate_up, self._inner_of(layer), norm=norm, swiglu=True)
        self._down(layer, addend, row_gate)

    def _down(self, layer: LayerWeights, addend: Tensor | None, row_gate: Tensor | None) -> None:
        assert layer.mlp_down is not None
        inner = self._inner_of(layer)
        self._linear(inner, layer.mlp_down, self.x, addend=addend, row_gate=row_gate, residual=self.x)

    def _inner_of(self, layer: LayerWeights) -> Tensor:
        assert layer.mlp_down is not None
        rows, width = self.x.shape[0], layer.mlp_down.shape[1]
        return self._inner[: rows * width].view(rows, width)

    def _draft_logits(self, layer: LayerWeights, routing: Routing | None = None) -> Tensor:
        """The router's logits [R, E], what of the shared experts needs no routed one, and with `routing` the choice, in
        one launch."""
        router, gate_up = layer.router, layer.gate_up
        assert router is not None
        rows, (width, hidden) = self.x.shape[0], router.shape
        scores = self._scores[: rows * width].view(rows, width)
        if gate_up is None:
            w, out, swiglu = router[:0], scores[:, :0], False
            tile = gemv_tile(width, hidden, pair=False)
        else:
            w, out, swiglu = gate_up, self._inner_of(layer), True
            tile = gemv_tile(out.shape[1], hidden, pair=True)
        gemv(
            self.x, w, out, tile, norm=layer.mlp_norm, swiglu=swiglu, router=router, logits=scores,
            normed=self.normed, routing=routing, pdl=self._pdl,
        )  # fmt: skip
        return scores

    def _target_logits(self, layer: LayerWeights) -> Tensor:
        """Partial sums [split, R, E] of the router's logits."""
        assert layer.router is not None
        rows, (width, hidden) = self.x.shape[0], layer.router.shape
        split = linear_tile(width, hidden, pair=False, preset=self._preset).split
        scores = self._partial if split > 1 else self._scores
        scores = scores[: split * rows * width].view(split, rows, width)
        self._norm(layer.mlp_norm, self.normed)
        self._linear(self.normed, layer.router, scores[0], keep_parts=True)
        return scores

    def _norm(self, norm: NormWeights, out: Tensor) -> None:
        norm_rows(self.x, norm.weight, norm.bias if norm.layer else None, norm.eps, out, pdl=self._pdl)

    def _linear(
        self, x: Tensor, w: Tensor, out: Tensor, *, norm: NormWeights | None = None, swiglu: bool = False,
        **options: Any,
    ) -> None:  # fmt: skip
        """options: those of `linear`."""
        if self._draft:
            tile = gemv_tile(out.shape[1], x.shape[1], pair=swiglu)
            gemv(x, w, out, tile, norm=norm, swiglu=swiglu, pdl=self._pdl, **options)
            return
        if norm is not None:
            self._norm(norm, self._input)
            x = self._input
        own = linear_tile(out.shape[1], x.shape[1], pair=swiglu, preset=self._preset)
        linear(x, w, out, own, swiglu=swiglu, partial=self._partial, pdl=self._pdl, **options)
