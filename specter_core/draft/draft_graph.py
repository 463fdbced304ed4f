"""The draft pass of `device=cuda`: a step is one replayed graph, and the host waits once, for the window's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specter_core.device_runtime import DeviceRuntime
from specter_core.draft.draft_pass import DraftPass
from specter_core.draft.kernels.advance import Stopping, advance, begin_window
from specter_core.draft.kernels.block_path import BlockExpertPath
from specter_core.draft.stopping import SHARPNESS
from specter_core.memory.native import library
from specter_core.model.decoder import Decoder
from specter_core.model.fused_pass import FusedPass
from specter_core.model.fused_weights import FusedWeights, rope_tables
from specter_core.model.kernels.rope import RopeTables
from specter_core.model.kernels.tiles import Preset
from specter_core.model.kernels.tokens import ARGMAX_BLOCK, Margin
from specter_core.passes import DraftExpertsPath
from specter_core.prefetch.pattern_analyzer import PatternAnalyzer
from specter_core.state.kv_cache import KVCache
from specter_core.state.rng import Purpose, uniform
from specter_core.state.sampling import SpeculativeSampler, draw, filtered_probs
from specter_core.state.state_manager import StateManager
from specter_core.trace import Trace

PREFILL_ROWS = 64
FIRST_BUCKET = 512
_STEP_TIMEOUT_NS = 20_000_000_000


def kv_bucket(positions: int, capacity: int) -> int:
    """Size of the KV bucket that holds `positions`: powers of two from 512 on, at most the capacity."""
    bucket = FIRST_BUCKET
    while bucket < positions:
        bucket *= 2
    return min(bucket, capacity)


class _Step:
    """One (KV, bucket): the fused pass and its three replays."""

    def __init__(self, owner: GraphDraftPass, kv: KVCache, bucket: int) -> None:
        config, runtime = owner.decoder.config, owner.runtime
        self.step = FusedPass(owner.weights, config, kv, owner.tables(kv), 1, bucket, Preset.DRAFT, pdl=runtime.pdl)
        device = self.step.tokens.device
        self.depths = torch.zeros(kv.batch, dtype=torch.int64, device=device)
        self.drafted = torch.zeros(kv.batch, dtype=torch.int64, device=device)
        self._valid = self.step.valid.view(torch.uint8)
        self._owner = owner
        self.stop: Stopping | None = None
        self._margin: Margin | None = None
        if owner.stop:
            blocks = -(-config.vocab_size // ARGMAX_BLOCK)
            lead, product, seconds = (torch.zeros(kv.batch * n, device=device) for n in (1, 1, blocks))
            self.stop = Stopping(lead, product, owner.report, owner.stop, SHARPNESS)
            self._margin = Margin(lead, seconds)
        for run in (self._greedy, self._advance):
            run()
        runtime.synchronize()
        owner.analyzer.clear()
        parts = (self._greedy, self._logits, self._advance)
        self.greedy, self.logits, self.advance = map(runtime.capture, parts) if owner.graphs else parts

    def begin(self, host: Tensor) -> None:
        step = self.step
        begin_window(host, step.tokens, step.positions, step.context, self._valid, self.depths, self.drafted, self.stop)

    def _logits(self) -> None:
        step, owner = self.step, self._owner
        counters = owner.analyzer.elb.counters
        step.embed()
        for index, layer in enumerate(owner.weights.layers):
            step.attend(index)
            if layer.moe_index is None:
                step.dense(index)
                continue
            step.route(index, counters[layer.moe_index])
            if step.alone and isinstance(owner.experts, BlockExpertPath):
                shared = step.shared_down(index)
                owner.experts.add(layer.moe_index, step.normed, step.ids, step.weights, step.x, shared)
                continue
            step.routed = owner.experts.forward(layer.moe_index, step.normed, step.ids, step.weights)
            step.combine(index)
        step.head()

    def _greedy(self) -> None:
        self._logits()
        self.step.choose(self._margin)
        self._advance()

    def _advance(self) -> None:
        step = self.step
        advance(
            step.chosen, self._owner.tokens, step.tokens, step.positions, step.context, self._valid, self.depths,
            self.drafted, self.stop,
        )  # fmt: skip


class GraphDraftPass:
    """`DraftPass` with a step as one graph per (batch, KV bucket, sampling mode); see there for the methods.

    Shared KV, ELB, token and length live on the device; no step waits for the host. weights: the shared instance in
    the fused pass's form. depth: K, the most draft tokens of a window. graphs: replay steps, else launch their kernels
    one after another. Rows that sample add the sampler's own device operations behind a step's logits. stop: as for
    `DraftPass`; the device ends rows itself and reports after each step who goes on.
    """

    def __init__(
        self,
        decoder: Decoder,
        weights: FusedWeights,
        experts: DraftExpertsPath,
        analyzer: PatternAnalyzer,
        runtime: DeviceRuntime,
        *,
        depth: int,
        shared_kv: bool = True,
        stop: float = 0.0,
        graphs: bool = True,
        trace: Trace | None = None,
    ) -> None:
        self.decoder, self.weights, self.experts = decoder, weights, experts
        self.analyzer, self.runtime = analyzer, runtime
        self.shared_kv, self.stop, self.graphs = shared_kv, stop, graphs
        self._trace = trace or Trace(enabled=False)
        self._depth = depth
        self._plain = DraftPass(decoder, experts, analyzer, shared_kv=shared_kv)
        self._steps: dict[int, _Step] = {}
        self._made_for: KVCache | None = None

    def tables(self, kv: KVCache) -> RopeTables:
        return rope_tables(self.decoder, kv.capacity)

    def start_batch(self, state: StateManager, kv: KVCache, sampler: SpeculativeSampler) -> None:
        self.state, self.kv, self.sampler = state, kv, sampler
        self._plain.start_batch(state, kv, sampler)
        self._greedy = sampler.params.all_greedy
        if kv is not self._made_for:
            self._steps.clear()
            self._made_for = kv
            self.tokens = self.runtime.mapped(kv.batch, self._depth, dtype=torch.int64)
            self._host = self.runtime.mapped(3, kv.batch, dtype=torch.int64)
            self.report = self.runtime.mapped(self._depth, 1 + kv.batch, dtype=torch.int32)

    def begin(self, depths: Sequence[int]) -> None:
        if not self.shared_kv:
            self._plain.begin(depths)  # its own entries must reach the boundary
        self.depths = list(depths)
        self.boundaries = self.state.boundaries
        self._host.copy_(torch.tensor([self.state.pending, self.boundaries, list(depths)]))
        ends = [n + d for n, d in zip(self.boundaries, depths, strict=True)]
        bucket = kv_bucket(max(*ends, 1), self.kv.capacity)
        if bucket not in self._steps:
            self._steps[bucket] = _Step(self, self.kv, bucket)
        self._step = self._steps[bucket]
        if self.stop:
            self.report.zero_()
        self._step.begin(self._host)
        self._taken = 0
        self._probs: list[Tensor] = []

    def step(self) -> None:
        if self.shared_kv:
            for b, depth in enumerate(self.depths):
                if self._taken < depth:
                    self.state.note_draft_write(b, self.boundaries[b] + self._taken)
        self._taken += 1
        with self._trace.on_device("draft step", token=self._taken):
            if self._greedy:
                self._step.greedy()
            else:
                self._step.logits()
                self._sample()
                self._step.advance()

    def more(self) -> bool:
        """See `DraftPass`. With `stop` it waits for the last step's report: the device idles for a launch after each,
        which is less than a step in vain at the end of most windows."""
        if not self.stop:
            return True
        line = self.report[self._taken - 1]
        if library().wait_flag(line.data_ptr(), 1, _STEP_TIMEOUT_NS):
            self.runtime.synchronize()  # raises the device's own error, if there is one
            raise RuntimeError(f"no report of draft step {self._taken} within {_STEP_TIMEOUT_NS / 1e9:.0f} s")
        return bool(line[1:].any())

    def candidates(self) -> tuple[list[int], Tensor, Tensor | None]:
        """Waits for the window's steps. Depths, draft tokens [B, K] int64 on the host, distributions on the device."""
        self.runtime.synchronize()
        if self.stop:
            went_on = self.report[:, 1:].sum(dim=0).tolist()  # steps after which a row was drafted further
            self.depths = [min(depth, 1 + n) for depth, n in zip(self.depths, went_on, strict=True)]
        longest = max(self.depths)
        probs = torch.stack(self._probs[:longest], dim=1) if self._probs else None
        return self.depths, self.tokens[:, :longest].clone(), probs

    def end(self) -> None:
        if not self.shared_kv:
            self._plain.depths = self.depths
            self._plain.end()

    def prefill(self, prompt: Sequence[int], row: int, chunk_tokens: int) -> None:
        self._plain.prefill(prompt, row, min(chunk_tokens, PREFILL_ROWS))

    def _sample(self) -> None:
        step, params = self._step.step, self.sampler.params
        probs = filtered_probs(step.logits, params.temperature, params.top_p, params.top_k)
        step.chosen.copy_(draw(probs, uniform(params.keys, step.positions + 1, Purpose.DRAFT)))
        if self._step.stop is not None:
            best = step.logits.topk(2, dim=-1).values
            self._step.stop.margin.copy_(best[:, 0] - best[:, 1])
        self._probs.append(probs)
