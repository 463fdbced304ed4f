"""Time to the first token on CUDA: python -m scripts.gpu.bench_prefill --model deepseek_v2_lite

Full-size random (or synthetic) weights, plain or nested, prompts of several lengths, in two memory budgets and with
every expert resident, each with an empty cache (cold) and with what the prompt before left (warm). The floor of a cold
prefill is the bytes of its distinct experts over the link's standalone rate; computation alone is the prefill with
every expert resident. The last token's logits and all KV entries must have the same bits in every setting of an
encoding. Last line: JSON; exit code 1 on a mismatch, or where --check finds a kernel's value out of its limit. Writes
prefill_MODEL.csv to $OUT (or outputs/).
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

from harness.systems.device_memory import tidy
from scripts.gpu.engine_probes import fill
from scripts.gpu.random_weights import random_model
from specter_core.assembly import build_engine
from specter_core.engine import SpecterEngine
from specter_core.opening import LoadedModel
from specter_core.options import EngineOptions
from specter_core.types import Request, WindowStats

BOTH_WAYS_TOKENS = 64
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
    """Rows of one model in one encoding."""

    def __init__(
        self, name: str, weights: str, model: LoadedModel, lengths: list[int], repeats: int, depth: int = 16
    ) -> None:
        self.name, self.weights, self.model, self.lengths, self.repeats = name, weights, model, lengths, repeats
        self.depth, self.encoding = depth, model.store.layout.encoding
        self.rows: list[dict[str, Any]] = []
        self.compute_ms: dict[tuple[int, int], float] = {}
        self.bits: dict[str, list[int]] = {}  # request -> hashes of its first logits and of each layer's KV
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
                self._two_ways(engine, chunk)
            del engine  # its slots
            tidy()

    def _two_ways(self, engine: SpecterEngine, chunk: int) -> None:
        """A prompt that runs as decoding does, and the way of longer ones: relative differences, rounding alone apart
        from experts that were chosen otherwise."""
        request = prompt(self.name, self.weights, self.model.decoder.config.vocab_size, BOTH_WAYS_TOKENS, 7)
        engine.generate([request])
        kv = engine.kv

        def entries() -> list[Tensor]:
            return [t[0, :BOTH_WAYS_TOKENS].double() for t in (*kv.keys, *kv.values, *kv.latents)]

        short, logits = entries(), self._logits.double()
        other = engine.target._long.run(request.prompt, 0, kv, chunk, WindowStats()).double()  # type: ignore[attr-defined]
        torch.cuda.synchronize()
        errors = [float((a - b).norm() / a.norm()) for a, b in zip([logits, *short], [other, *entries()], strict=True)]
        print(
            f"{self.encoding:6s} short and long way, {BOTH_WAYS_TOKENS} tokens: relative difference of logits "
            f"{errors[0]:.1e}, KV of the first layers {', '.join(f'{e:.1e}' for e in errors[1:4])}, worst "
            f"{max(errors[1:]):.1e}", flush=True,
        )  # fmt: skip

    def all(
        self, chunks: list[int], budgets: Sequence[float], profiled: Sequence[int] = (), limit_s: float = 1e9
    ) -> None:
        """Everything, but nothing new after limit_s. profiled: prompt tokens of prefills shown by kernel."""
        steps = [lambda: self.resident(chunks[:1])]
        steps += [lambda gb=gb: self.budget(gb, chunks[0]) for gb in budgets]  # type: ignore[misc]
        if profiled:
            steps.append(lambda: self.profile(profiled, chunks[0]))
        steps.append(lambda: self.resident(chunks[1:]))
        for step in steps:
            if time.perf_counter() - self._began < limit_s:
                step()

    def profile(self, lengths: Sequence[int], chunk: int) -> None:
        config = self.model.decoder.config
        with self._engine(None, chunk) as engine:
            fill(engine, config.num_experts)
            for tokens in lengths:
                print(f"  kernels of {tokens} tokens, every expert resident, {self.encoding}:")
                request = prompt(self.name, self.weights, config.vocab_size, tokens, 99)
                for ms, count, kernel in kernel_shares(engine, request):
                    print(f"    {ms:9.2f} ms x{count:6d} {kernel}", flush=True)
        del engine
        tidy()

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
        tidy()

    def _engine(self, budget_gb: float | None, chunk: int) -> SpecterEngine:
        options = EngineOptions(depth=self.depth, context_tokens=max(self.lengths) + 64, prefill_chunk_tokens=chunk)
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
        self._compare(request.request_id, engine, tokens)
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

    def _compare(self, request: str, engine: SpecterEngine, tokens: int) -> None:
        """Logits and KV entries against the first setting in which this prompt was run."""
        kv = engine.kv
        found = [bit_hash(self._logits), *(bit_hash(t[0, :tokens]) for t in (*kv.keys, *kv.values, *kv.latents))]
        self.compared += request in self.bits
        wrong = [i for i, (a, b) in enumerate(zip(found, self.bits.setdefault(request, found), strict=True)) if a != b]
        if wrong:
            print(f"  OTHER BITS, request {request}: 0 = logits, then layers' KV: {wrong[:12]}", flush=True)
        self.mismatches += bool(wrong)

    def _add(self, budget: str, state: str, tokens: int, chunk: int, found: dict[str, Any]) -> None:
        compute_ms = self.compute_ms.get((tokens, chunk), float("nan"))
        link_ms = found["floor_ms"] if state == "cold" else found["moved_ms"]
        bound_ms = compute_ms if budget == "resident" else max(link_ms, compute_ms)
        row: dict[str, Any] = {"model": self.name, "weights": self.weights, "encoding": self.encoding, "budget": budget}
        row |= {"cache": state, "prompt_tokens": tokens}
        row |= {"chunk_tokens": chunk, **found, "compute_ms": compute_ms, "over_bound": found["ttft_ms"] / bound_ms}
        self.rows.append({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
        print(
            f"{self.encoding:6s} {budget:9s} {state:5s} {tokens:5d} tokens: TTFT {found['ttft_ms']:8.1f} ms, floor "
            f"{found['floor_ms']:7.1f}, moved {found['moved_gb']:5.1f} GB, compute {compute_ms:7.1f}, x bound "
            f"{row['over_bound']:.2f}, link {found['link_use']:.2f}",
            flush=True,
        )


def kernel_shares(engine: SpecterEngine, request: Request) -> Iterator[tuple[float, int, str]]:
    """Device time of one prefill by kernel: (ms, launches, name), the largest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        engine.generate([request])
    events = sorted(found.key_averages(), key=lambda e: e.self_device_time_total, reverse=True)
    for event in events[:14]:
        yield event.self_device_time_total / 1e3, event.count, event.key[:70]


def bit_hash(values: Tensor) -> int:
    """Of a tensor's bits, order included."""
    raw = values.contiguous().view(torch.int32).flatten().long()
    return int((raw * (torch.arange(raw.numel(), device=raw.device) * 2_654_435_761 + 1)).sum())


def check_kernels() -> int:
    """The prefill's kernels at real shapes against float64 and themselves; the number of failures."""
    from scripts.gpu.prefill_checks import on_device

    failures = 0
    for check in on_device():
        failures += not check.ok
        if not check.ok or "rows with" not in check.name:
            print(
                f"  {'ok' if check.ok else 'FAILED':6s} {check.value:9.2e} <= {check.limit:.0e} {check.name}",
                flush=True,
            )
    return failures


def write(rows: list[dict[str, Any]], path: Path) -> None:
    if rows:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


def opened(name: str, weights: str, encoding: str) -> LoadedModel:
    if weights == "random":
        return random_model(name, encoding=encoding)
    from harness.synthetic import open_synthetic, spec_for

    return open_synthetic(spec_for(name), "cuda", encoding=encoding)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=tuple(BUDGETS_GB), default="deepseek_v2_lite")
    parser.add_argument("--weights", choices=("random", "synthetic"), default="random")
    parser.add_argument("--encodings", default="plain", help="plain, nested or both, comma-separated")
    parser.add_argument("--lengths", default="16,512,4096")
    parser.add_argument("--chunks", default="1024", help="sizes, every expert resident; the first serves the budgets")
    parser.add_argument("--repeats", type=int, default=2, help="the best counts; one more before is not counted")
    parser.add_argument("--budgets", default="", help="GB, comma-separated; default the model's")
    parser.add_argument("--depth", type=int, default=16, help="of the engine: its draft takes part of a budget")
    parser.add_argument("--profile", default="", help="prompt tokens, comma-separated, of prefills shown by kernel")
    parser.add_argument("--check", action="store_true", help="the kernels against float64 first")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which an encoding begins nothing new")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here; run this on a machine that has one", file=sys.stderr)
        return 2
    begin = time.perf_counter()
    lengths, chunks, profiled = (
        [int(n) for n in text.split(",") if n] for text in (options.lengths, options.chunks, options.profile)
    )
    budgets = [float(g) for g in options.budgets.split(",") if g] or BUDGETS_GB[options.model]
    out = Path(os.environ.get("OUT") or "outputs")
    out.mkdir(parents=True, exist_ok=True)
    failures = check_kernels() if options.check else 0
    rows: list[dict[str, Any]] = []
    bits: list[dict[str, list[int]]] = []
    compared = mismatches = 0
    try:
        for encoding in options.encodings.split(","):
            with opened(options.model, options.weights, encoding) as model:
                print(f"  {encoding} opened after {time.perf_counter() - begin:.0f} s", flush=True)
                bench = Bench(options.model, options.weights, model, lengths, options.repeats, options.depth)
                bench.rows = rows
                try:
                    bench.all(chunks, budgets, profiled, options.limit)
                finally:
                    compared, mismatches = compared + bench.compared, mismatches + bench.mismatches
                    bits.append(bench.bits)
            del model, bench
            gc.collect()
            torch.cuda.empty_cache()
    finally:
        write(rows, out / f"prefill_{options.model}.csv")
    summary = {"model": options.model, "rows": len(rows), "compared": compared, "mismatches": mismatches}
    summary |= {"kernel_failures": failures, "seconds": round(time.perf_counter() - begin)}
    if len(bits) == 2:
        summary["equal_in_both_encodings"] = sum(bits[0][r] == bits[1].get(r) for r in bits[0])
    print(json.dumps(summary))
    return 1 if mismatches or failures else 0


if __name__ == "__main__":
    sys.exit(main())
