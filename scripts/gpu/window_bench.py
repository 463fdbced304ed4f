"""Windows of one model under memory budgets: exactness, times, bytes and memory of each, beside computation alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from harness.device_meter import DeviceMeter
from harness.systems.device_memory import tidy
from scripts.gpu.bench_draft import kernel_shares, step_bytes, time_steps
from scripts.gpu.engine_probes import Bits, committed_kv, fill, host_profile, lru_loads, segments_ms
from scripts.gpu.window_aims import BOUND, GROWTH_WINDOWS, LINK_USE
from specter_core.assembly import build_engine
from specter_core.engine import SpecterEngine
from specter_core.opening import LoadedModel
from specter_core.options import EngineOptions
from specter_core.types import Request, WindowStats

PROMPT_TOKENS = 96
COMPARED: dict[str, dict[str, Any]] = {
    "top-M by count": {
        "planning": "top_m", "eviction": "count_then_recency", "stage_ahead": False, "staging_slots": 2,
        "initial_chunk_tokens": 2,
    },
    "b_1 = 1": {"initial_chunk_tokens": 1},
    "not staged": {"stage_ahead": False},
    "waits for each step": {"draft_stop": 1e-9},  # what asking costs: no row gets so unlikely
    "draft_stop 0.6": {"draft_stop": 0.6},
}  # fmt: skip


def request(seed: int, tokens: int, vocab: int) -> Request:
    generator = torch.Generator().manual_seed(seed)
    prompt = tuple(torch.randint(10, vocab - 10, (PROMPT_TOKENS,), generator=generator).tolist())
    return Request(f"seed{seed}", prompt, tokens, ignore_eos=True)


class Bench:
    """What one model's windows showed: `summary`, one value per row; `rows`, one window per row."""

    """What one model's windows showed: `summary`, one value per row; `rows`, one window per row."""

    def __init__(
        self, name: str, model: LoadedModel, depth: int, tokens: int, meter: DeviceMeter, compared: Sequence[str],
        growth: bool,
    ) -> None:  # fmt: skip
        self.meter, self.compared, self.growth = meter, compared, growth
        self.name, self.model, self.depth, self.tokens = name, model, depth, tokens
        self.vocab = model.decoder.config.vocab_size
        self.options = EngineOptions(depth=depth, context_tokens=PROMPT_TOKENS + tokens + 32)
        self.started = time.perf_counter()
        self.expected: list[int] = []
        self.first_tokens: list[int] = []
        self.summary: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []

    def row(self, where: str, what: str, value: float, unit: str, note: str = "") -> None:
        self.summary.append(
            {"model": self.name, "where": where, "what": what, "value": round(value, 4), "unit": unit, "note": note}
        )
        print(f"{where:12s} {what:52s} {value:10.3f} {unit} {note}", flush=True)

    def resident(self, ceiling: float) -> None:
        """The plain target and the draft with every expert resident: the reference, and compute alone."""
        with build_engine(self.model, replace(self.options, depth=0)) as engine:
            fill = self._fill(engine)
            self.row("resident", "prefill of 96 tokens, experts streamed (TTFT)", fill, "ms")
            bits = Bits(engine)
            result = engine.generate([request(1, self.tokens, self.vocab)]).results[0]
            self.expected, self.expected_bits = result.tokens, bits.by_position
            self.expected_kv = committed_kv(engine, engine.kv.boundaries[0])
            engine.target.decode = bits._decode  # type: ignore[method-assign]
            run = engine.generate([request(2, 64, self.vocab)])
            self.row("resident", "plain decoding, K = 0", run.results[0].tpot_ms, "ms/token")
        del engine, bits
        tidy()
        with build_engine(self.model, self.options) as engine:
            self._fill(engine)
            run = engine.generate([request(2, 128, self.vocab)])
            full = [w for w in run.windows if w.depth == self.depth]
            self.draft_ms = statistics.median(w.draft_ms for w in full)
            self.verify_ms = statistics.median(w.verify_ms for w in full)
            accepted, tested = sum(w.accepted for w in run.windows), sum(w.tested for w in run.windows)
            self.row("resident", f"draft of K = {self.depth}", self.draft_ms, "ms/window")
            self.row("resident", f"verification of K + 1 = {self.depth + 1}", self.verify_ms, "ms/window")
            self.row("resident", "acceptance", accepted / max(tested, 1), "")
            self.row("resident", "TPOT", run.results[0].tpot_ms, "ms/token")
            self.step_ms = time_steps(engine.draft)  # type: ignore[arg-type]
            floor = step_bytes(self.model) / ceiling / 1e9
            self.row("resident", "draft step, graph replay", self.step_ms, "ms/token", f"floor {floor:.3f} ms")
            self.row("resident", "verification, segments replayed back to back", segments_ms(engine), "ms")
            for kernel, count, us in kernel_shares(engine.draft):  # type: ignore[arg-type]
                print(f"    draft step {us:8.1f} us x{count:4d} {kernel}")
        del engine
        tidy()

    def budget(self, budget_gb: float) -> None:
        where = f"{budget_gb:g} GB"
        print(f"-- {where} at {time.perf_counter() - self.started:.0f} s", flush=True)
        with build_engine(self.model, self.options, budget_bytes=round(budget_gb * 1e9)) as engine:
            self.meter.lap()
            plan = engine.slots
            self.row(where, "slots per layer", plan.mean_slots, "", f"staging {plan.staging}")
            if not self.expected:
                self._measure_quickly(where, engine, budget_gb)
                return
            bits = Bits(engine)
            result = engine.generate([request(1, self.tokens, self.vocab)]).results[0]
            wrong = sum(a != b for a, b in zip(result.tokens, self.expected, strict=True))
            self.row(where, "token mismatches", wrong, "", f"of {len(result.tokens)}")
            pairs = [(bits.by_position[p], h) for p, h in self.expected_bits.items()]
            spent = f"of {len(pairs)}, {time.perf_counter() - self.started:.0f} s"
            self.row(where, "positions with other logit bits", sum(a != b for a, b in pairs), "", spent)
            kv = zip(committed_kv(engine, self.expected_kv[0].shape[0]), self.expected_kv, strict=True)
            self.row(where, "KV entries with other bits", sum(int((a != b).sum()) for a, b in kv), "")
            engine.target.decode = bits._decode  # type: ignore[method-assign]
            self._measure(where, engine)
            self._memory(where, engine, budget_gb)
            host_profile(engine, request(4, 48, self.vocab))
        del engine, bits
        tidy()
        for name in self.compared:
            switches = COMPARED[name]
            own = replace(self.options, **switches)
            with build_engine(self.model, own, budget_bytes=round(budget_gb * 1e9)) as engine:
                engine.generate([request(1, 64, self.vocab)])
                self._measure(f"{where} {name}", engine)
            del engine
            tidy()

    def _measure_quickly(self, where: str, engine: SpecterEngine, budget_gb: float) -> None:
        """No resident target to compare with: budgets are compared with each other, by tokens."""
        tokens = engine.generate([request(1, 64, self.vocab)]).results[0].tokens
        self._measure(where, engine)
        self._memory(where, engine, budget_gb)
        self.first_tokens = self.first_tokens or tokens
        wrong = sum(a != b for a, b in zip(tokens, self.first_tokens, strict=True))
        self.row(where, "token mismatches with the first budget", wrong, "", f"of {len(tokens)}")
        host_profile(engine, request(4, 48, self.vocab))

    def _memory(self, where: str, engine: SpecterEngine, budget_gb: float) -> None:
        """The device's memory: growth over many windows, and its peak against the budget."""
        free, total = torch.cuda.mem_get_info()
        reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
        self.row(where, "memory beyond the allocator (context, modules, graphs)", (total - free - reserved) / 1e6, "MB",
                 f"allocator: {allocated / 1e6:.0f} of {reserved / 1e6:.0f} MB in use, planned"
                 f" {(engine.slots.total - engine.slots.parts.get('context', 0)) / 1e6:.0f}")  # fmt: skip
        windows, seed = 0, 20
        while self.growth and windows < GROWTH_WINDOWS:
            windows += len(engine.generate([request(seed, self.tokens, self.vocab)]).windows)
            seed += 1
        after, _ = torch.cuda.mem_get_info()
        if self.growth:
            self.row(where, "device memory grown", (free - after) / 1e6, "MB", f"over {windows} windows")
        found = self.meter.lap()
        peak = found.peak_bytes if found.peak_bytes is not None else total - after
        how = f"NVML, {found.samples} samples" if found.peak_bytes is not None else f"at the end; {found.status}"
        self.row(where, "peak device memory", peak / 1e9, "GB", how)
        self.row(where, "peak over budget", peak / (budget_gb * 1e9), "ratio")

    def _measure(self, where: str, engine: SpecterEngine) -> None:
        routes: list[list[tuple[int, Tensor]]] = []
        link = engine.experts.loader.link
        verify, drafted_mb, marks = engine._verify, [], []

        def watched(window: Any, stats: WindowStats) -> Tensor:
            drafted_mb.append(link.counters.bytes / 1e6)
            marks.append(time.perf_counter())
            logits = verify(window, stats)
            marks.append(time.perf_counter())
            drafted_mb.append(link.counters.bytes / 1e6)
            return logits

        engine._verify = watched  # type: ignore[method-assign]
        windows_before = time.perf_counter()
        run = engine.generate(
            [request(3, min(192, self.tokens), self.vocab)],
            on_commit=lambda *_: routes.append(list(engine.experts.routes)),
        )
        elapsed = time.perf_counter() - windows_before
        engine._verify = verify  # type: ignore[method-assign]
        between_ms = [(b - a) * 1e3 for a, b in zip(marks[1::2], marks[2::2], strict=False)]  # commit + draft
        entry, rate = link.entry_bytes, link.rate_bytes_per_s
        loads = lru_loads(routes, engine.slots.slots_per_layer)
        cold_ms = min(self.options.initial_chunk_tokens, self.depth) * self.step_ms
        rows = []
        for i, w in enumerate(run.windows):
            if w.depth != self.depth or i < 3:
                continue
            needed_ms = w.absent * entry / rate * 1e3
            compute_ms = self.draft_ms - cold_ms + self.verify_ms
            bound = cold_ms + max(needed_ms, compute_ms)
            rows.append({
                "model": self.name, "budget": where, "window": i, "draft_ms": w.draft_ms, "verify_ms": w.verify_ms,
                "committed": w.committed, "accepted": w.accepted, "tested": w.tested, "distinct": sum(w.distinct),
                "hits": sum(w.hits), "late": sum(w.late), "misses": sum(w.misses), "chunks": w.chunks,
                "moved_mb": w.h2d_bytes / 1e6, "used_mb": w.h2d_bytes_used / 1e6, "lru_mb": loads[i] * entry / 1e6,
                "link_use": w.h2d_bytes / (rate * w.link_span_ms / 1e3) if w.link_span_ms else 0.0,
                "needed_ms": needed_ms, "compute_ms": compute_ms, "bound_ms": bound,
                "over_bound": (w.draft_ms + w.verify_ms) / bound, "stall_ms": sum(w.stall_ms.values()),
                "prefetched": w.prefetch_issued, "prefetch_used": w.prefetch_used,
                "under_draft_mb": drafted_mb[2 * i] - drafted_mb[2 * i - 1],
                "under_verify_mb": drafted_mb[2 * i + 1] - drafted_mb[2 * i], "between_ms": between_ms[i - 1],
                "absent": w.absent, "absent_planned": w.absent_planned, "router_wait_ms": w.router_wait_ms,
            })  # fmt: skip
        self.rows += rows

        def median(key: str) -> float:
            return statistics.median(r[key] for r in rows)

        total = {key: sum(r[key] for r in rows) for key in ("moved_mb", "used_mb", "lru_mb", "committed", "needed_ms")}
        self.row(where, "link, standalone", rate / 1e9, "GB/s")
        self.row(where, "TPOT", run.results[0].tpot_ms, "ms/token", f"{len(run.windows)} windows, {elapsed:.1f} s")
        self.row(where, "TTFT of 96 tokens", run.results[0].ttft_ms, "ms")
        self.row(where, "draft", median("draft_ms"), "ms/window")
        self.row(where, "verify", median("verify_ms"), "ms/window", f"stalled {median('stall_ms'):.1f}")
        self.row(where, "committed tokens", total["committed"] / len(rows), "per window")
        self.row(where, "distinct | hits | late | misses", median("distinct"), "",
                 f"{median('hits'):g} | {median('late'):g} | {median('misses'):g}")  # fmt: skip
        self.row(where, "prefetches issued", median("prefetched"), "", f"used {median('prefetch_used'):g}")
        self.row(where, LINK_USE, median("link_use"), "share")
        self.row(where, "bytes used over moved", total["used_mb"] / max(total["moved_mb"], 1e-9), "share")
        self.row(where, "moved over demand-only LRU", total["moved_mb"] / max(total["lru_mb"], 1e-9), "ratio",
                 f"{total['moved_mb'] / total['committed']:.0f} MB per token")  # fmt: skip
        self.row(where, BOUND, median("bound_ms"), "ms",
                 f"needed {median('needed_ms'):.1f}, compute {median('compute_ms'):.1f}")  # fmt: skip
        self.row(where, "window over bound", median("over_bound"), "ratio")
        verify_use = statistics.median(r["under_verify_mb"] * 1e6 / rate / r["verify_ms"] * 1e3 for r in rows)
        self.row(where, "link use under verification", verify_use, "share",
                 f"{median('under_verify_mb') / entry * 1e6:.0f} experts; under the draft"
                 f" {median('under_draft_mb') / entry * 1e6:.0f}; chunks {median('chunks'):g}")  # fmt: skip
        self.row(where, "from one verification to the next", median("between_ms"), "ms",
                 f"absent at b_1 {median('absent'):g}, planned {median('absent_planned'):g}; waited for routers"
                 f" {median('router_wait_ms'):.1f} ms")  # fmt: skip

    def _fill(self, engine: SpecterEngine) -> float:
        """Every expert into its slot; returns the TTFT of a first, cold request, ms."""
        result = engine.generate([request(9, 2, self.vocab)]).results[0]
        fill(engine, self.model.decoder.config.num_experts)
        return result.ttft_ms
