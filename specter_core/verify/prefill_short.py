"""Prefill of a few rows: the captured segments of a decode pass, on a KV cache of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from specter_core.model.decoder import Decoder
from specter_core.model.fused_pass import FusedPass
from specter_core.model.fused_weights import FusedWeights, rope_tables
from specter_core.model.kernels.tiles import Preset
from specter_core.model.prefill_pass import last_logits
from specter_core.state.kv_cache import KVCache
from specter_core.trace import Trace
from specter_core.verify.decode_segments import DecodeSegments
from specter_core.verify.executor_cuda import CudaLayerExecutor

SIZES = (16, 32, 64)
"""Rows of a pass: prompts take the first that holds them, the rest are invalid rows. No bit depends on which it is."""


class ShortPrefill:
    """Reading each weight once is most of what such a prompt costs, and launching kernels one by one would cost more:
    so it runs as verification does. The segments write the entries of one sequence, from which they are copied to the
    request's row, so that one capture serves every row and every KV cache.
    """

    def __init__(
        self, decoder: Decoder, weights: FusedWeights, executor: CudaLayerExecutor, *, graphs: bool, hits: bool,
        trace: Trace,
    ) -> None:  # fmt: skip
        self._decoder, self._weights, self._executor = decoder, weights, executor
        self._graphs, self._hits, self._trace = graphs, hits, trace
        self._made: dict[int, DecodeSegments] = {}
        self._kv: KVCache | None = None

    def segments(self, tokens: int) -> DecodeSegments | None:
        """Captured at first use; None for a prompt that is too long, or whose positions turn by its length."""
        rows = next((size for size in SIZES if size >= tokens), None)
        rope = self._decoder.config.rope
        if rows is None or (rope.long_factor and tokens > rope.original_positions):
            return None
        if rows not in self._made:
            config, decoder = self._decoder.config, self._decoder
            self._kv = self._kv or KVCache(config, 1, SIZES[-1], decoder.device, decoder.dtype)
            tables = rope_tables(decoder, self._kv.capacity)
            step = FusedPass(self._weights, config, self._kv, tables, rows, rows, Preset.TARGET, logits=False)
            self._made[rows] = DecodeSegments(
                step, self._weights, self._executor, rows, 1, graphs=self._graphs, hits=self._hits, trace=self._trace
            )
        return self._made[rows]

    def finish(self, made: DecodeSegments, tokens: int, row: int, kv: KVCache) -> Tensor:
        """After the segments: entries into KV row `row`; logits [1, V] float32 of the last token."""
        own = self._kv
        assert own is not None
        pairs = [
            (target[row, :tokens], source[0, :tokens])
            for targets, sources in ((kv.keys, own.keys), (kv.values, own.values), (kv.latents, own.latents))
            for target, source in zip(targets, sources, strict=True)
        ]
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
        return last_logits(self._weights.head, made.step.x[tokens - 1 : tokens])
