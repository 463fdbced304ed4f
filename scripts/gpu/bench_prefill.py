"""Time to the first token on CUDA: python -m scripts.gpu.bench_prefill --model deepseek_v2_lite

Full-size random (or synthetic) weights, prompts of several lengths, in two memory budgets and with every expert
resident, each with an empty cache (cold) and with what the prompt before left (warm). The floor of a cold prefill is
the bytes of its distinct experts over the link's standalone rate; computation alone is the prefill with every expert
resident. The last token's logits must have the same bits in every setting. Last line: JSON; exit code 1 on a mismatch.
Writes prefill_MODEL.csv to $OUT (or outputs/).
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.gpu.random_weights import random_model
from specter_core.assembly import build_engine
from specter_core.engine import SpecterEngine
from specter_core.memory.link import Priority
from specter_core.opening import LoadedModel
from specter_core.options import EngineOptions
from specter_core.types import ExpertKey, Request

BUDGETS_GB = {"deepseek_v2_lite": (24.0, 18.0), "qwen1.5_moe": (20.0, 16.0), "qwen15_moe": (20.0, 16.0)}


def prompt(name: str, weights: str, vocab: int, tokens: int, seed: int) -> Request:
    """Any tokens; text of its own kind for a synthetic model."""
    if weights == "synthetic":
        from harness.synthetic import spec_for
        from harness.synthetic.vocabulary import walk

        ids = walk(spec_for(name), 1, tokens, seed=seed)[0].tolist()
    else:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(10, vocab - 10, (tokens,), generator=generator).tolist()
    return Request(f"{tokens}-{seed}", tuple(ids), 1, ignore_eos=True)


class Bench:
    """Rows of one model."""

    def __init__(self, name: str, weights: str, model: LoadedModel, lengths: list[int], repeats: int) -> None:
        self.name, self.weights, self.model, self.lengths, self.repeats = name, weights, model, lengths, repeats
        self.rows: list[dict[str, Any]] = []
        self.compute_ms: dict[tuple[int, int], float] = {}
        self.bits: dict[str, int] = {}  # request -> hash of its first logits
        self.compared = self.mismatches = 0
        self._began = time.perf_counter()

    def resident(self, chunks: list[int]) -> None:
        """Computation alone, in chunks of several sizes."""
        for chunk in chunks:
            with self._engine(None, chunk) as engine:
                fill(engine, self.model.decoder.config.num_experts)
                for tokens in self.lengths:
                    found = [self._once(engine, tokens, seed) for seed in range(self.repeats + 1)][1:]
                    best = min(found, key=lambda row: float(row["ttft_ms"]))
                    self.compute_ms[tokens, chunk] = best["ttft_ms"]
                    self._add("resident", "warm", tokens, chunk, best)
            del engine  # its slots
            self._clear()

    def all(
        self, chunks: list[int], budgets: Sequence[float], profiled_tokens: int, path: Path, limit_s: float = 1e9
    ) -> None:
        """Everything, but nothing new after limit_s; the CSV holds what was measured, also after an error."""
        steps = [lambda: self.resident(chunks[:1])]
        steps += [lambda gb=gb: self.budget(gb, chunks[0]) for gb in budgets]  # type: ignore[misc]
        if profiled_tokens:
            steps.append(lambda: self.profile(profiled_tokens, chunks[0]))
        steps.append(lambda: self.resident(chunks[1:]))
        try:
            for step in steps:
                if time.perf_counter() - self._began < limit_s:
                    step()
        finally:
            if self.rows:
                with path.open("w", newline="", encoding="utf-8") as file:
                    writer = csv.DictWriter(file, list(self.rows[0]))
                    writer.writeheader()
                    writer.writerows(self.rows)

    def profile(self, tokens: int, chunk: int) -> None:
        config = self.model.decoder.config
        with self._engine(None, chunk) as engine:
            fill(engine, config.num_experts)
            request = prompt(self.name, self.weights, config.vocab_size, tokens, 99)
            for ms, count, kernel in kernel_shares(engine, request):
                print(f"    {ms:9.2f} ms x{count:6d} {kernel}")
        self._clear()

    def budget(self, budget_gb: float, chunk: int) -> None:
        with self._engine(budget_gb, chunk) as engine:
            for tokens in self.lengths:
                for state in ("cold", "warm"):
                    found = []
                    for seed in range(self.repeats + 1):
                        if state == "cold":
                            engine.reset_cache()
                        found.append(self._once(engine, tokens, seed))
                    best = min(found[1:], key=lambda row: float(row["ttft_ms"]))
                    self._add(f"{budget_gb:g} GB", state, tokens, chunk, best)
        del engine
        self._clear()

    def _engine(self, budget_gb: float | None, chunk: int) -> SpecterEngine:
        options = EngineOptions(depth=16, context_tokens=max(self.lengths) + 64, prefill_chunk_tokens=chunk)
        budget = None if budget_gb is None else round(budget_gb * 1e9)
        engine = build_engine(self.model, options, budget_bytes=budget)
        prefill = engine.target.prefill

        def watched(*args: Any) -> Tensor:
            self._logits = prefill(*args)
            return self._logits

        engine.target.prefill = watched  # type: ignore[method-assign]
        return engine

    def _once(self, engine: SpecterEngine, tokens: int, seed: int) -> dict[str, Any]:
        request = prompt(self.name, self.weights, self.model.decoder.config.vocab_size, tokens, seed)
        torch.cuda.reset_peak_memory_stats()
        result = engine.generate([request]).results[0]
        self._compare(request.request_id)
        stats, link = engine.prefill_stats, engine.experts.loader.link
        rate, entry = link.rate_bytes_per_s, link.entry_bytes
        distinct = sum(stats.distinct)
        return {
            "ttft_ms": result.ttft_ms, "slots": engine.slots.mean_slots, "distinct": distinct,
            "hits": sum(stats.hits), "moved_gb": stats.h2d_bytes / 1e9, "link_gb_s": rate / 1e9,
            "floor_ms": distinct * entry / rate * 1e3, "moved_ms": stats.h2d_bytes / rate * 1e3,
            "link_use": stats.h2d_bytes / rate / (result.ttft_ms / 1e3),
            "peak_allocated_gb": torch.cuda.max_memory_allocated() / 1e9,
        }  # fmt: skip

    def _compare(self, request: str) -> None:
        bits = self._logits.view(torch.int32).long()
        found = int((bits * (torch.arange(bits.numel(), device=bits.device) * 2_654_435_761 + 1)).sum())
        self.compared += request in self.bits
        self.mismatches += self.bits.setdefault(request, found) != found

    def _add(self, budget: str, state: str, tokens: int, chunk: int, found: dict[str, Any]) -> None:
        compute_ms = self.compute_ms.get((tokens, chunk), float("nan"))
        link_ms = found["floor_ms"] if state == "cold" else found["moved_ms"]
        bound_ms = compute_ms if budget == "resident" else max(link_ms, compute_ms)
        row = {"model": self.name, "weights": self.weights, "budget": budget, "cache": state, "prompt_tokens": tokens}
        row |= {"chunk_tokens": chunk, **found, "compute_ms": compute_ms, "over_bound": found["ttft_ms"] / bound_ms}
        self.rows.append({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
        print(
            f"{budget:9s} {state:5s} {tokens:5d} tokens, chunks of {chunk:4d}: TTFT {found['ttft_ms']:8.1f} ms, floor "
            f"{found['floor_ms']:7.1f}, moved {found['moved_gb']:5.1f} GB, compute {compute_ms:7.1f}, x bound "
            f"{row['over_bound']:.2f}, link {found['link_use']:.2f}",
            flush=True,
        )

    def _clear(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()


def fill(engine: SpecterEngine, experts: int) -> None:
    """Every expert into its slot."""
    cache, loader = engine.experts.cache, engine.experts.loader
    for layer in range(len(engine.slots.slots_per_layer)):
        absent = [e for e in range(experts) if cache.lookup(ExpertKey(layer, e)) is None]
        for expert, slot in zip(absent, cache.free_slots(layer), strict=False):
            loader.load(ExpertKey(layer, expert), slot, Priority.PREFETCH)
    loader.drain()


def kernel_shares(engine: SpecterEngine, request: Request) -> Iterator[tuple[float, int, str]]:
    """Device time of one prefill by kernel: (ms, launches, name), the largest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        engine.generate([request])
    events = sorted(found.key_averages(), key=lambda e: e.self_device_time_total, reverse=True)
    for event in events[:14]:
        yield event.self_device_time_total / 1e3, event.count, event.key[:70]


def opened(name: str, weights: str) -> LoadedModel:
    if weights == "random":
        return random_model(name)
    from harness.synthetic import open_synthetic, spec_for

    return open_synthetic(spec_for(name), "cuda")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=tuple(BUDGETS_GB), default="deepseek_v2_lite")
    parser.add_argument("--weights", choices=("random", "synthetic"), default="random")
    parser.add_argument("--lengths", default="16,512,4096")
    parser.add_argument("--chunks", default="256", help="sizes, every expert resident; the first serves the budgets")
    parser.add_argument("--repeats", type=int, default=2, help="the best counts; one more before is not counted")
    parser.add_argument("--budgets", default="", help="GB, comma-separated; default the model's")
    parser.add_argument("--profile", type=int, default=0, help="prompt tokens of one profiled prefill, all resident")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here; run this on a machine that has one", file=sys.stderr)
        return 2
    begin = time.perf_counter()
    lengths = [int(n) for n in options.lengths.split(",")]
    chunks = [int(n) for n in options.chunks.split(",")]
    budgets = [float(g) for g in options.budgets.split(",") if g] or BUDGETS_GB[options.model]
    out = Path(os.environ.get("OUT") or "outputs")
    out.mkdir(parents=True, exist_ok=True)
    with opened(options.model, options.weights) as model:
        bench = Bench(options.model, options.weights, model, lengths, options.repeats)
        bench.all(chunks, budgets, options.profile, out / f"prefill_{options.model}.csv")
    summary = {"model": options.model, "rows": len(bench.rows), "compared": bench.compared}
    summary |= {"mismatches": bench.mismatches, "seconds": round(time.perf_counter() - begin)}
    print(json.dumps(summary))
    return 1 if bench.mismatches else 0


if __name__ == "__main__":
    sys.exit(main())
