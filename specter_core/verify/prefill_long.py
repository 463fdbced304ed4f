"""Layer-major prefill on a device: every chunk of a prompt passes a layer, then its experts, each loaded once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from specter_core.model.decoder import Decoder
from specter_core.model.fused_weights import FusedWeights, rope_tables
from specter_core.model.kernels.rope import RopeTables
from specter_core.model.prefill_pass import Carver, PrefillPass, last_logits
from specter_core.state.kv_cache import KVCache
from specter_core.trace import Trace
from specter_core.types import WindowStats
from specter_core.verify.executor_cpu import LayerTiming
from specter_core.verify.executor_cuda import CudaLayerExecutor, RoutedWork
from specter_core.verify.expert_pass import ExpertPass
from specter_core.verify.kernels.combine_rows import add_rows
from specter_core.verify.kernels.group_rows import group_rows
from specter_core.verify.kernels.host_io import load_rows, report_ids
from specter_core.verify.residency import LayerPlan
from specter_core.verify.router_report import wait_for_router


class _Kept(NamedTuple):
    """From one prompt to the next: inputs int64 [3 · capacity] and ids int32 [capacity · k], mapped."""

    tables: RopeTables
    inputs: Tensor
    ids: Tensor


class LongPrefill:
    """Prompts of any length. What the host must know of a layer comes through mapped memory, and what needs no routed
    expert is on the stream before the host waits for it. No bit depends on what is resident, in which order experts
    arrive, or where the prompt is cut into chunks.
    """

    def __init__(
        self, decoder: Decoder, weights: FusedWeights, experts: ExpertPass, executor: CudaLayerExecutor, trace: Trace
    ) -> None:
        self._decoder, self._weights, self._experts = decoder, weights, experts
        self._executor, self._trace = executor, trace
        self._kept: dict[int, _Kept] = {}  # by KV capacity
        self._flags = executor.runtime.mapped(len(decoder.config.moe_layers), 4, dtype=torch.int32)

    def run(self, prompt: Sequence[int], row: int, kv: KVCache, chunk_tokens: int, stats: WindowStats) -> Tensor:
        """See `TargetPass.prefill`; the device may still be at work."""
        kept = self._kept_for(kv.capacity)
        step, work = self._begin(prompt, row, kv, chunk_tokens, kept)
        ids = kept.ids[: step.ids.numel()]
        step.embed()
        for index, layer in enumerate(self._weights.layers):
            j = layer.moe_index
            with self._trace.on_device(f"attention {index}"):
                step.attend(index)
                if j is None:
                    step.dense(index)
                    continue
                step.route(index)
                report_ids(step.ids, ids, self._flags[j])
                group_rows(step.ids, work.members, work.counts)
                shared = step.share(index)
            self._experts.prefetcher.prepare_layer(j)
            self._wait(j, stats)
            self._run_experts(j, ids.view(step.ids.shape).to(torch.int64), step, work, stats)
            with self._trace.on_device(f"sum {j}"):
                add_rows(work.out, step.weights, step.ids, shared, step.x)
        return last_logits(self._weights.head, step.x[-1:])

    def _kept_for(self, capacity: int) -> _Kept:
        if capacity not in self._kept:
            tables, mapped = rope_tables(self._decoder, capacity), self._executor.runtime.mapped
            ids = mapped(capacity * self._decoder.config.top_k, dtype=torch.int32)
            self._kept[capacity] = _Kept(tables, mapped(3 * capacity, dtype=torch.int64), ids)
        return self._kept[capacity]

    def _begin(
        self, prompt: Sequence[int], row: int, kv: KVCache, chunk_tokens: int, kept: _Kept
    ) -> tuple[PrefillPass, RoutedWork]:
        """Buffers of this prompt. Those of attention and of the routed experts, never in use together, share their
        bytes; those that kernels are compiled for have the KV's capacity, whatever the prompt."""
        config, device, count = self._decoder.config, self._decoder.device, len(prompt)
        dtype, top_k, width = self._decoder.dtype, config.top_k, self._executor.layout.width
        chunk = min(chunk_tokens, count)
        routed = count * top_k * (width * dtype.itemsize + config.hidden * 4) + 512
        scratch = torch.empty(
            max(routed, PrefillPass.scratch_bytes(config, chunk, dtype)), dtype=torch.uint8, device=device
        )
        step = PrefillPass(self._weights, config, kv, kept.tables, row, count, chunk, scratch)
        inputs = kept.inputs[: 3 * count].view(3, count)
        inputs[0] = torch.tensor(prompt)
        inputs[1] = torch.arange(count)
        inputs[2] = 1
        self._flags.zero_()
        load_rows(inputs, step.tokens, step.positions, step.context, step.valid.view(torch.uint8))
        step.context.fill_(count)
        carve = Carver(scratch)
        work = RoutedWork(
            step.normed,
            torch.empty(self._executor.experts, kv.capacity, dtype=torch.int32, device=device),
            torch.empty(self._executor.experts, dtype=torch.int32, device=device),
            carve(dtype, count, top_k * width).view(count, top_k, width),
            carve(torch.float32, count, top_k * config.hidden).view(count, top_k, config.hidden),
            prefill=True,
        )
        return step, work

    def _wait(self, j: int, stats: WindowStats) -> None:
        start_ns = time.perf_counter_ns()
        wait_for_router(self._flags[j], j, self._executor.runtime)
        stats.router_wait_ms += (time.perf_counter_ns() - start_ns) / 1e6

    def _run_experts(self, j: int, ids: Tensor, step: PrefillPass, work: RoutedWork, stats: WindowStats) -> None:
        busiest = int(torch.bincount(ids.flatten()).max())

        def run(plan: LayerPlan, own: list[int] | None) -> LayerTiming:
            if own is not None:  # some rows at a time: grouped anew for each plan
                group_rows(step.ids, work.members, work.counts, range(own[0], own[-1] + 1))
            return self._executor.enqueue(plan, replace(work, most=busiest))

        self._experts.schedule(j, ids, stats, run)
