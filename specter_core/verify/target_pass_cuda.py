"""The target's forward pass of `device=cuda`: decoding and short prompts in captured segments, long prompts beside."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from specter_core.device_runtime import DeviceEvent
from specter_core.draft.draft_graph import kv_bucket
from specter_core.model.decoder import Decoder
from specter_core.model.fused_pass import FusedPass
from specter_core.model.fused_weights import FusedWeights, rope_tables
from specter_core.model.kernels.tiles import Preset
from specter_core.model.rows import Rows
from specter_core.state.kv_cache import KVCache
from specter_core.trace import Trace
from specter_core.types import WindowStats
from specter_core.verify.decode_segments import DecodeSegments
from specter_core.verify.executor_cpu import LayerTiming
from specter_core.verify.executor_cuda import CudaLayerExecutor
from specter_core.verify.expert_pass import ExpertPass
from specter_core.verify.kernels.group_rows import group_rows
from specter_core.verify.layer_hook import LayerHook
from specter_core.verify.prefill_long import LongPrefill
from specter_core.verify.prefill_short import ShortPrefill
from specter_core.verify.residency import LayerPlan

NOTHING: dict[int, int] = {}
"""No resident expert."""


class CudaTargetPass:
    """`TargetPass` on a device. Plain decoding and verification are one code path with one set of tiles, whose rows
    do not influence each other's bits: `steps` = K + 1 rows per sequence, of which a pass uses some.

    Per layer the host launches a segment, reads the router's choice from mapped memory, and enqueues what the
    segment could not know: experts that were not in the layer's slot table when it was launched. Where there are none,
    the next segment is launched before anything else is done. A layer with every expert resident is not waited for.
    One synchronisation per pass, at its end.
    """

    def __init__(
        self, decoder: Decoder, weights: FusedWeights, experts: ExpertPass, executor: CudaLayerExecutor, *,
        steps: int, graphs: bool, trace: Trace,
    ) -> None:  # fmt: skip
        self.decoder, self.experts, self.trace = decoder, experts, trace
        self.hook: LayerHook | None = None
        self._weights, self._executor = weights, executor
        self._steps, self._graphs = steps, graphs
        self._short = ShortPrefill(
            decoder, weights, executor, graphs=graphs, hits=experts.order == "expertwise", trace=trace
        )
        self._long = LongPrefill(decoder, weights, experts, executor, trace)
        self._segments: dict[int, DecodeSegments] = {}
        self._made_for: KVCache | None = None
        self._layers = len(decoder.config.moe_layers)
        self._versions = [-1] * self._layers
        self._resident: list[dict[int, int]] = [{} for _ in range(self._layers)]

    def prefill(self, prompt: Sequence[int], row: int, kv: KVCache, chunk_tokens: int, stats: WindowStats) -> Tensor:
        """See `TargetPass.prefill`. Which way a prompt goes depends on its length alone; a hook has no part in it."""
        made = self._short.segments(len(prompt))
        if made is None:
            logits = self._long.run(prompt, row, kv, chunk_tokens, stats)
        else:
            self._run(made, torch.tensor([list(prompt)]), Rows.prefill(0, 0, len(prompt), len(prompt)), stats)
            logits = self._short.finish(made, len(prompt), row, kv)
        self._executor.end_pass()
        return logits

    def decode(self, tokens: Tensor, rows: Rows, kv: KVCache, stats: WindowStats) -> Tensor:
        """tokens [B, T] int64 and rows on the host -> logits [B, T, V] float32, valid until the next pass."""
        made = self._segments_for(kv, rows.last + 1)
        self._run(made, tokens, rows, stats, self.hook)
        self._executor.end_pass()
        return made.logits(rows.steps)

    def _run(
        self, made: DecodeSegments, tokens: Tensor, rows: Rows, stats: WindowStats, hook: LayerHook | None = None
    ) -> None:
        """All segments on these rows."""
        tokenwise = self.experts.order != "expertwise"
        made.fill(tokens, rows)
        if hook is not None or tokenwise:
            for j in range(self._layers):
                made.show(j, NOTHING)
        if hook is not None:
            self._decode_with(hook, made, rows, stats)
        else:
            self._decode(made, rows, stats, tokenwise)

    def _decode(self, made: DecodeSegments, rows: Rows, stats: WindowStats, tokenwise: bool) -> None:
        waiting: list[tuple[int, DeviceEvent, Tensor | None]] = []  # layers that the host has yet to account for
        table: list[dict[int, int]] = []
        for j in range(self._layers):
            table.append(NOTHING if tokenwise or self.hook else self._resident_slots(j))  # a hook moves experts
            made.show(j, table[j])
            made.segments[j]()
            if len(table[j]) == self.decoder.config.num_experts:
                waiting.append((j, self._executor.mark(), None))
                continue
            self._account(made, waiting, rows, table, stats)
            self.experts.prefetcher.prepare_layer(j)
            after = self._executor.mark()
            ids = self._routed(made, j, rows, stats)
            if not tokenwise and self._all_in(table[j], ids):
                waiting.append((j, after, ids))
            else:
                self._settle(made, j, after, ids, table[j], stats, tokenwise)
        made.segments[self._layers]()
        self._account(made, waiting, rows, table, stats)

    @staticmethod
    def _routed(made: DecodeSegments, j: int, rows: Rows, stats: WindowStats) -> Tensor:
        """The router's choice, once it has been made."""
        start_ns = time.perf_counter_ns()
        ids = made.ids(j, rows.steps)
        stats.router_wait_ms += (time.perf_counter_ns() - start_ns) / 1e6
        return ids

    @staticmethod
    def _all_in(resident: dict[int, int], ids: Tensor) -> bool:
        return resident.keys() >= set(ids.flatten().tolist()) - {-1}

    def _account(
        self, made: DecodeSegments, waiting: list[tuple[int, DeviceEvent, Tensor | None]], rows: Rows,
        table: list[dict[int, int]], stats: WindowStats,
    ) -> None:  # fmt: skip
        """Layers whose experts were all in the slot table: nothing to compute, only uses to be noted."""
        for layer, after, ids in waiting:
            found = self._routed(made, layer, rows, stats) if ids is None else ids
            self._settle(made, layer, after, found, table[layer], stats)
        waiting.clear()

    def _settle(
        self, made: DecodeSegments, j: int, after: DeviceEvent, ids: Tensor, resident: dict[int, int],
        stats: WindowStats, tokenwise: bool = False,
    ) -> None:  # fmt: skip
        """The host's part of layer j: account for its hits, load and compute the rest. after: behind its segment."""
        if tokenwise:
            self._run_rows(made, j, ids, stats)
            return
        self.experts.schedule(
            j, ids, stats, lambda plan, _: self._executor.enqueue(plan, made.work, resident, after), resident
        )

    def _run_rows(self, made: DecodeSegments, j: int, ids: Tensor, stats: WindowStats) -> None:
        """Token-wise order: each row (or half of the batch) has a plan and launches of its own. Rows between the first
        and the last that a pass does not use are routed nowhere."""
        step, steps = made.step, ids.shape[0] // made.batch

        def place(row: int) -> int:
            return row // steps * made.steps + row % steps

        def run(plan: LayerPlan, own: list[int] | None) -> LayerTiming:
            assert own is not None, self.experts.order
            work = made.rows_work
            group_rows(step.ids, work.members, work.counts, range(place(own[0]), place(own[-1]) + 1))
            return self._executor.enqueue(plan, work)

        self.experts.schedule(j, ids, stats, run)

    def _decode_with(self, hook: LayerHook, made: DecodeSegments, rows: Rows, stats: WindowStats) -> None:
        """Launch by launch, since a lookahead policy acts on every layer's output."""
        for j, index in enumerate(self.decoder.config.moe_layers):
            made.open(j)
            ids = self._routed(made, j, rows, stats)
            self._settle(made, j, self._executor.mark(), ids, {}, stats, self.experts.order != "expertwise")
            made.close(j)
            hidden = made.step.x.view(made.batch, made.steps, -1)[:, : rows.steps].flatten(0, 1)
            hook.after_layer(j, hidden, self.decoder.layers[index + 1 :])
        made.finish()

    def _resident_slots(self, layer: int) -> dict[int, int]:
        """expert -> slot of what may be computed from now: loads that have arrived by this moment included."""
        self.experts.loader.reap()
        cache = self.experts.cache
        if self._versions[layer] != cache.version(layer):
            self._versions[layer] = cache.version(layer)
            self._resident[layer] = cache.resident_slots(layer)
        return self._resident[layer]

    def _segments_for(self, kv: KVCache, positions: int) -> DecodeSegments:
        """The segments of this KV cache and bucket; captured at first use."""
        if kv is not self._made_for:
            self._segments.clear()
            self._made_for = kv
        bucket = kv_bucket(positions, kv.capacity)
        if bucket not in self._segments:
            tables = rope_tables(self.decoder, kv.capacity)
            step = FusedPass(self._weights, self.decoder.config, kv, tables, self._steps, bucket, Preset.TARGET)
            self._segments[bucket] = DecodeSegments(
                step, self._weights, self._executor, self._steps, kv.batch, graphs=self._graphs,
                hits=self.experts.order == "expertwise", trace=self.trace,
            )  # fmt: skip
        return self._segments[bucket]
