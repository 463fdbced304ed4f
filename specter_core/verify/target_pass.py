"""The target's forward pass: layer by layer, routed experts through the expert cache (paper, Figure 12)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specter_core.model.decoder import Decoder
from specter_core.model.rows import Rows
from specter_core.state.kv_cache import KVCache
from specter_core.trace import Trace
from specter_core.types import WindowStats
from specter_core.verify.expert_pass import ExpertPass
from specter_core.verify.layer_hook import LayerHook


class TargetPass:
    """Runs decoding (K + 1 rows per sequence) and layer-major prefill; both use the same row-invariant kernels."""

    def __init__(self, decoder: Decoder, experts: ExpertPass, *, trace: Trace) -> None:
        self.decoder = decoder
        self.experts = experts
        self.trace = trace
        self.hook: LayerHook | None = None

    def decode(self, tokens: Tensor, rows: Rows, kv: KVCache, stats: WindowStats) -> Tensor:
        """tokens [B, T] int64 -> logits [B, T, V] float32; KV of valid rows is written behind the boundaries."""
        x = self._layers([self.decoder.embed(tokens)], [rows], kv, stats)[0]
        return self.decoder.logits(x).view(*tokens.shape, -1)

    def prefill(self, prompt: Sequence[int], row: int, kv: KVCache, chunk_tokens: int, stats: WindowStats) -> Tensor:
        """Every chunk of the prompt passes layer l before l + 1, so each expert crosses the link at most once.

        prompt: P token ids of the request in KV row `row`. Returns logits [1, V] float32 of its last token.
        """
        starts = range(0, len(prompt), chunk_tokens)
        parts = [prompt[s : s + chunk_tokens] for s in starts]
        device = str(self.decoder.device)
        rows = [Rows.prefill(row, s, len(p), len(prompt), device=device) for s, p in zip(starts, parts, strict=True)]
        tokens = [torch.tensor([list(p)], device=device) for p in parts]
        xs = self._layers([self.decoder.embed(t) for t in tokens], rows, kv, stats)
        return self.decoder.logits(xs[-1][len(parts[-1]) - 1 : len(parts[-1])])

    def _layers(self, xs: list[Tensor], rows: list[Rows], kv: KVCache, stats: WindowStats) -> list[Tensor]:
        """xs: hidden [R_i, H] per chunk -> the same after the last layer."""
        for index, layer in enumerate(self.decoder.layers):
            with self.trace.compute(f"attention {index}"):
                xs = [layer.attend(x, kv, r) for x, r in zip(xs, rows, strict=True)]
            if layer.moe_index is None:
                xs = [layer.dense(x) for x in xs]
                continue
            routings = [layer.route(x, r) for x, r in zip(xs, rows, strict=True)]
            routed = self.experts.run(layer.moe_index, routings, stats)
            xs = [layer.combine(x, g.normed, y) for x, g, y in zip(xs, routings, routed, strict=True)]
            if self.hook:
                self.hook.after_layer(layer.moe_index, xs[-1], self.decoder.layers[index + 1 :])
        return xs
