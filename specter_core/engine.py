"""The engine: a window from draft to commit, readable top to bottom."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specter_core.errors import UserError
from specter_core.memory.budget import SlotPlan
from specter_core.model.decoder import Decoder
from specter_core.model.rows import Rows
from specter_core.options import EngineOptions
from specter_core.passes import Draft, Target
from specter_core.policies import DepthPolicy, FixedDepth, Prefetching
from specter_core.prefetch.pattern_analyzer import PatternAnalyzer, Snapshot
from specter_core.prefetch.planner import Timings
from specter_core.prefetch.prefill_fill import fill_ahead
from specter_core.state.kv_cache import KVCache
from specter_core.state.sampling import SamplingParams, SpeculativeSampler, Verdict
from specter_core.state.state_manager import StateManager
from specter_core.trace import Trace
from specter_core.types import GenerationRun, Request, WindowStats
from specter_core.verify.expert_pass import ExpertPass
from specter_core.verify.layer_hook import LayerHook
from specter_core.window_meter import WindowMeter

STEPS_AHEAD = 2
"""Draft steps that a device is given beyond a boundary, to be busy while the host plans; 1 where the host computes, or
waits for each step to know whether there is another one (`draft_stop`)."""
FIRST_STEP_MS = 2.0
"""Taken for a draft step before one was measured."""


class Window(NamedTuple):
    """What one window hands from drafting to verification: depth per row (−1: finished row), draft tokens [B, K]
    int64 and, when some row samples, their distributions [B, K, V] float32."""

    depths: list[int]
    tokens: Tensor
    probs: Tensor | None

    @property
    def steps(self) -> int:
        """K of this window: the longest row's depth."""
        return max(self.depths)


class SpecterEngine:
    """Generates with INT4 drafts and a full-precision target whose experts are streamed through a cache.

    With depth 0 it is plain autoregressive decoding on the same target pass; draft and analyzer are then None. Built by
    `specter_core.assembly.build_engine`.
    """

    def __init__(
        self,
        *,
        decoder: Decoder,
        target: Target,
        experts: ExpertPass,
        draft: Draft | None,
        analyzer: PatternAnalyzer | None,
        prefetcher: Prefetching,
        slots: SlotPlan,
        options: EngineOptions,
        trace: Trace,
        depth_policy: DepthPolicy | None = None,
    ) -> None:
        if options.depth and draft is None:
            raise UserError(f"depth {options.depth} needs a draft and 0 were given; name a draft folder or use depth 0")
        self.decoder = decoder
        self.target = target
        self.experts = experts
        self.draft = draft
        self.analyzer = analyzer
        self.prefetcher = prefetcher
        self.meter = WindowMeter(experts.loader)
        self._step_ms = FIRST_STEP_MS  # of the last window
        self._asynchronous = decoder.device.type == "cuda"
        self._ahead = STEPS_AHEAD if self._asynchronous and not options.draft_stop else 1
        self._unaccounted: tuple[list[int], WindowStats] | None = None  # useful rows of the last window
        self._kvs: dict[bool, KVCache] = {}  # by whether it is the draft's private one
        self.slots = slots
        self.options = options
        self.trace = trace
        self.depth_policy = depth_policy or FixedDepth(options.depth)

    def generate(
        self, requests: Sequence[Request], on_commit: Callable[[int, list[int]], None] | None = None
    ) -> GenerationRun:
        """Runs a batch to its end. Rows advance by their own accepted + 1 per window.

        on_commit(row, tokens) is called after each commit with the row's generated tokens so far.
        Returns results in the order of `requests` and the statistics of every window. Raises UserError for an empty
        batch, a bad request, or NaN logits. Greedy tokens equal the target's own, whatever the options.
        """
        if not 1 <= len(requests) <= self.options.max_batch:
            raise UserError(
                f"batch of {len(requests)} requests, the engine takes 1 … {self.options.max_batch}; raise max_batch"
            )
        self._unaccounted = None
        self._prefill(requests)
        windows = []
        while not self.state.finished:
            windows.append(self._window())
            if on_commit:
                for b, row in enumerate(self.state.rows):
                    on_commit(b, row.tokens[len(row.request.prompt) :])
        self._account()
        return GenerationRun(self.state.results(), windows)

    def reset_cache(self) -> None:
        """Empties every slot and forgets what was routed, so that the next request starts cold."""
        self.experts.reset()

    def install_hook(self, hook: LayerHook) -> None:
        """Lets a lookahead policy act between layers of the target pass."""
        self.experts.hook = hook
        self.target.hook = hook

    def close(self) -> None:
        """Ends the link's worker."""
        self.experts.loader.link.close()

    def __enter__(self) -> SpecterEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prefill(self, requests: Sequence[Request]) -> None:
        """Each prompt alone, in fixed chunks; its last logits give the first token, which becomes pending."""
        self.kv = self._kv(len(requests))
        self.state = StateManager(requests, self.kv, self.decoder.config.eos_ids)
        self.sampler = SpeculativeSampler(SamplingParams.of(requests, self.decoder.device))
        private = self.draft is not None and not self.options.shared_kv
        if self.draft:
            kv = self._kv(len(requests), private=True) if private else self.kv
            self.draft.start_batch(self.state, kv, self.sampler)
        self.prefill_stats = WindowStats()
        self.experts.begin_pass()
        self.meter.begin()
        start_ns = time.perf_counter_ns()
        for b, request in enumerate(requests):
            prompt = request.prompt
            self.state.rows[b].start_ns = start_ns
            if self.options.prefetch:
                fill_ahead(self.experts.loader, self.decoder.config, len(prompt))
            with self.trace.span("prefill", request=b):
                logits = self.target.prefill(prompt, b, self.kv, self.options.prefill_chunk_tokens, self.prefill_stats)
                if self.draft and private:
                    self.draft.prefill(prompt, b, self.options.prefill_chunk_tokens)
            self.state.note_target_write(b, 0, len(prompt))
            first = self._first_token(b, logits, len(prompt))
            self.state.commit_prefill(b, first, time.perf_counter_ns())
        self.meter.end(self.prefill_stats)
        self.trace.settle()

    def _window(self) -> WindowStats:
        """One iteration: draft, with prefetching underneath; verify; commit."""
        stats = WindowStats()
        self.meter.begin()
        window = self._draft(stats)
        logits = self._verify(window, stats)
        self._commit(window, logits, stats)
        self.depth_policy.observe(stats)
        self.trace.settle()
        return stats

    def _draft(self, stats: WindowStats) -> Window:
        """K draft steps. At a boundary the ELB is snapshot and more steps are enqueued before the host plans."""
        depths = self.state.window_depths(self.depth_policy.depth())
        steps = max(depths)
        boundary = 0
        if steps <= 0:
            self._account()
            self.prefetcher.begin_window(0)
            self.meter.open_link()
            return Window(depths, torch.empty(len(depths), 0, dtype=torch.int64), None)
        assert self.draft is not None and self.analyzer is not None
        start_ns = time.perf_counter_ns()
        self.draft.begin(depths)
        snapshot: Snapshot | None = None
        taken = 0  # steps that the snapshot has seen
        for t in range(1, steps + 1):
            if t > 1 and not self.draft.more():  # draft_stop
                steps = t - 1
                self.prefetcher.shorten_window(steps)
                snapshot = self.analyzer.snapshot() if self._wants_plan(steps, boundary, steps) else None
                break
            with self.trace.span("draft step", token=t):
                self.draft.step()
            if t == 1:  # while the device is busy
                self._account()
                boundary = self.prefetcher.begin_window(steps)
            if snapshot is not None and (t == steps or t >= taken + self._ahead):
                boundary = self._plan(snapshot, taken if self._asynchronous or self._ahead > 1 else t)
                snapshot = None
            if snapshot is None and self._wants_plan(t, boundary, steps):
                snapshot, taken = self.analyzer.snapshot(), t
        if snapshot is not None:
            self._plan(snapshot, steps)
        self.prefetcher.end_of_draft()
        self.analyzer.clear()
        depths, tokens, probs = self.draft.candidates()
        self.draft.end()
        stats.draft_ms = (time.perf_counter_ns() - start_ns) / 1e6
        self._step_ms = stats.draft_ms / steps
        return Window(depths, tokens, probs)

    def _wants_plan(self, t: int, boundary: int, steps: int) -> bool:
        """At every boundary before Final Cleanup; and after the last step where loads go on under verification."""
        if not self.options.prefetch:
            return False
        if t == steps:
            return self.options.prefetch_under_verify
        return t >= boundary and self.prefetcher.wants_snapshot

    def _plan(self, snapshot: Snapshot, drafted: int) -> int:
        """Hands the counters to the planner and its loads to the link; returns the next boundary. drafted: steps that
        are computed by now.
        """
        timings = Timings(self._step_ms, self.experts.loader.entry_ms)
        with self.trace.span("plan", drafted=drafted) as note:
            counters = snapshot.wait()
            self.meter.open_link()
            plan = self.prefetcher.on_boundary(counters, drafted, timings)
            note |= {"phase": plan.phase.value, "loads": len(plan.loads), "next_boundary": plan.next_boundary}
        return plan.next_boundary

    def _verify(self, window: Window, stats: WindowStats) -> Tensor:
        """One target pass over pending, d_1 … d_K of every row. Returns logits [B, K + 1, V] float32."""
        start_ns = time.perf_counter_ns()
        boundaries = self.state.boundaries
        pending = torch.tensor(self.state.pending, dtype=torch.int64)[:, None]
        tokens = torch.cat([pending, window.tokens], dim=1)  # [B, K+1]
        rows = Rows.decode(boundaries, window.steps + 1, [depth + 1 for depth in window.depths])
        with self.trace.span("verify", rows=int(rows.valid.sum())):
            self.experts.begin_pass(rows.batch)
            logits = self.target.decode(tokens, rows, self.kv, stats)
        for b, depth in enumerate(window.depths):
            if depth >= 0:
                self.state.note_target_write(b, boundaries[b], depth + 1)
        stats.verify_ms = (time.perf_counter_ns() - start_ns) / 1e6
        return logits

    def _commit(self, window: Window, logits: Tensor, stats: WindowStats) -> None:
        """Accepted tokens and the corrected or bonus token become text; the boundary moves by accepted + 1."""
        first = [n + 1 for n in self.state.boundaries]
        verdict = self.sampler.judge(logits, window.tokens, window.probs, window.depths, first)
        committed = self.state.commit(window.tokens.tolist(), verdict, window.depths, time.perf_counter_ns())
        self.meter.end(stats)
        self._count(window, verdict, committed, stats)

    def _count(self, window: Window, verdict: Verdict, committed: list[int], stats: WindowStats) -> None:
        steps = window.steps + 1
        useful = [b * steps + t for b, n in enumerate(committed) for t in range(n)]  # inputs of committed tokens
        self._unaccounted = (useful, stats)
        stats.depth = window.steps
        stats.drafted = sum(max(depth, 0) for depth in window.depths)
        stats.tested = sum(verdict.tested)
        stats.accepted = sum(verdict.accepted)
        stats.committed = sum(committed)

    def _account(self) -> None:
        """What the last window's prefetches were worth: known at its end, counted when the host has time for it."""
        if self._unaccounted is None:
            return
        useful, stats = self._unaccounted
        self._unaccounted = None
        loads = self.prefetcher.end_window(self.experts.routed_by(useful))
        stats.chunks = loads.chunks
        stats.prefetch_planned, stats.prefetch_planned_used = loads.planned, loads.planned_used
        stats.prefetch_issued, stats.prefetch_used = loads.issued, loads.used
        stats.absent, stats.absent_planned = loads.absent, loads.absent_planned

    def _first_token(self, b: int, logits: Tensor, position: int) -> int:
        """The token after the prompt: logits [1, V]."""
        alone = SpeculativeSampler(SamplingParams(*(t[b : b + 1] for t in self.sampler.params)))
        nothing = torch.empty(1, 0, dtype=torch.int64)
        return alone.judge(logits[None], nothing, None, [0], [position]).next_token[0]

    def _kv(self, batch: int, *, private: bool = False) -> KVCache:
        """The batch's cache: the last batch's of this size, emptied, since captured passes work on these buffers."""
        kept = self._kvs.get(private)
        if kept is None or kept.batch != batch:
            tokens, device = self.options.context_tokens, self.decoder.device
            kept = self._kvs[private] = KVCache(self.decoder.config, batch, tokens, device, self.decoder.dtype)
        for row in range(batch):
            kept.reset(row)
        return kept
