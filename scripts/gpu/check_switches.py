"""Every engine switch and every baseline in the research group, checked against the plain target.

python -m scripts.gpu.check_switches --model reference/deepseek_v2_mini --device cuda

Greedy tokens must be those of the same engine with K = 0, B = 1 and every expert resident. At temperature > 0 the
sampled tokens must not depend on the batch, on graphs, on slots or on the prefetch options. One line per case, one JSON
object last; exit code 1 when a case differs or fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from baselines.mixtral_offloading import system as mixtral_offloading
from baselines.specmoeoff import system as specmoeoff
from harness.system import MemorySpec, ModelSpec
from scripts.check_exactness import PROMPTS, differences
from specter_core.assembly import build_engine
from specter_core.opening import LoadedModel, open_model
from specter_core.options import EngineOptions
from specter_core.text import TextCodec
from specter_core.types import Request

Tokens = dict[str, list[int]]


class Outcome(NamedTuple):
    """What a case generated, and whether it did what it is for."""

    tokens: Tokens
    tested: int = 0
    accepted: int = 0
    misses: int = 0


@dataclass(frozen=True, slots=True)
class Case:
    """options over the defaults; paper: the published variant; batch: requests at once; sampled: temperature > 0."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    batch: int = 1
    slots: int = 3
    sampled: bool = False
    paper: bool = False
    rate_bytes_per_s: float | None = None


def switches(depth: int, many: int) -> list[Case]:
    """Every switch off (or on) by itself, alone and in a batch."""
    changes: dict[str, dict[str, Any]] = {
        "default": {},
        "graphs off": {"graphs": False},
        "fused_kernel off": {"fused_kernel": False},
        "prefetch off": {"prefetch": False},
        "hit_first off": {"hit_first": False},
        "prefetch_under_verify off": {"prefetch_under_verify": False},
        "shared_kv off": {"shared_kv": False},
        "shared_weights off": {"shared_weights": False},
        "verify=tokenwise": {"verify": "tokenwise"},
        "verify=microbatches": {"verify": "microbatches"},
        "eviction=lru": {"eviction": "lru"},
        "eviction=count_then_recency": {"eviction": "count_then_recency"},
        "planning=top_m": {"planning": "top_m"},
        "stage_ahead off": {"stage_ahead": False},
        "uniform slots": {"uniform_slots": True},
        "staging 0": {"staging_slots": 0},
        "initial chunk 1": {"initial_chunk_tokens": 1},
        "draft_stop": {"draft_stop": 0.6},
        "depth 0": {"depth": 0},
        "prefill chunk 8": {"prefill_chunk_tokens": 8},
    }
    cases = [Case(name, {"depth": depth} | own, batch) for name, own in changes.items() for batch in (1, many)]
    cases += [Case("variant=paper", {"depth": depth}, batch, paper=True) for batch in (1, many)]
    cases += [Case("paced link", {"depth": depth}, 1, rate_bytes_per_s=1e9)]
    for name in ("default", "graphs off", "prefetch off", "eviction=lru", "draft_stop"):
        for batch in (1, many):
            cases.append(Case(f"{name}, sampled", {"depth": depth} | changes[name], batch, sampled=True))
    return [*cases, Case("default, sampled", {"depth": depth}, many, slots=1, sampled=True)]


class Checker:
    """Runs cases on one loaded model and keeps what they found."""

    def __init__(self, model: LoadedModel, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        self.model = model
        self.requests = [Request(f"r{i}", tuple(p), new_tokens, ignore_eos=True) for i, p in enumerate(prompts)]
        self.context = max(len(p) for p in prompts) + new_tokens
        self.rows: list[dict[str, Any]] = []
        base = EngineOptions(depth=0, context_tokens=self.context)
        with build_engine(model, base) as engine:
            self.expected: Tokens = {r.request_id: engine.generate([r]).results[0].tokens for r in self.requests}
        self.sampled: dict[float, Tokens] = {}  # by draft_stop: sampled text depends on where windows begin

    def check(self, name: str, run: Callable[[], Outcome], expected: Tokens) -> None:
        """expected: what the case must generate; empty: it becomes what later cases must generate."""
        start, error, found = time.perf_counter(), "", Outcome({})
        try:
            found = run()
        except Exception:
            error = traceback.format_exc(limit=-4)
        if not expected:
            expected |= found.tokens
        wrong = sum(differences(found.tokens.get(i, []), tokens) for i, tokens in expected.items())
        row = {"case": name, "tokens": sum(map(len, found.tokens.values())), "mismatches": wrong}
        row |= {"tested": found.tested, "accepted": found.accepted, "misses": found.misses}
        self.rows.append(row | {"failed": bool(error), "seconds": round(time.perf_counter() - start, 2)})
        counts = f"{row['tokens']:5d} tokens {wrong:4d} wrong {found.accepted:4d}/{found.tested:4d} accepted"
        bad = "FAIL" if wrong or error else "ok"
        print(f"{bad:4s} {name:38s} {counts} {found.misses:5d} misses {self.rows[-1]['seconds']:6.2f} s", flush=True)
        if error:
            print("     " + error.strip().replace("\n", "\n     ")[-1800:], flush=True)

    def switch(self, case: Case) -> None:
        own = self.sampled.setdefault(case.options.get("draft_stop", 0.0), {})
        expected = own if case.sampled else self.expected
        self.check(f"{case.name}, B {case.batch}, M {case.slots}", lambda: self._run(case), expected)

    def _run(self, case: Case) -> Outcome:
        options = EngineOptions(context_tokens=self.context, max_batch=case.batch)
        options = replace(options.paper() if case.paper else options, **case.options)
        requests = self.requests
        if case.sampled:
            requests = [replace(r, temperature=0.8, top_p=0.9, top_k=50, seed=7) for r in requests]
        tokens: Tokens = {}
        counts = [0, 0, 0]
        rate = case.rate_bytes_per_s
        with build_engine(self.model, options, slots_per_layer=case.slots, rate_bytes_per_s=rate) as engine:
            for group in batches(requests, case.batch):
                run = engine.generate(group)
                tokens |= {r.request_id: r.tokens for r in run.results}
                counts[0] += sum(r.tested for r in run.results)
                counts[1] += sum(r.accepted for r in run.results)
                counts[2] += sum(sum(w.misses) for w in run.windows)
            engine.experts.cache.check_integrity()
        return Outcome(tokens, *counts)

    def baseline(self, name: str, make: Callable[[], Any], spec: ModelSpec, memory: MemorySpec) -> None:
        def run() -> Outcome:
            system, tokens, counts = make(), {}, [0, 0]
            system.load(spec, memory)
            try:
                for group in batches(self.requests, memory.batch):
                    for request, record in zip(group, system.generate(group), strict=True):
                        tokens[request.request_id] = list(record.tokens)
            finally:
                system.close()
            return Outcome(tokens, *counts)

        self.check(f"{name}, B {memory.batch}", run, self.expected)


def batches(requests: Sequence[Request], size: int) -> Iterator[list[Request]]:
    for start in range(0, len(requests), size):
        yield list(requests[start : start + size])


BASELINES: dict[str, tuple[Any, dict[str, Any]]] = {
    "mixtral_offloading same_cache improved": (mixtral_offloading, {"capacity": "same_cache"}),
    "mixtral_offloading same_cache as_released": (
        mixtral_offloading, {"capacity": "same_cache", "variant": "as_released"},
    ),
    "mixtral_offloading same_memory improved": (mixtral_offloading, {}),
    "specmoeoff adapted": (specmoeoff, {"variant": "adapted", "depth": 4}),
    "specmoeoff shared_weights": (specmoeoff, {"variant": "shared_weights", "depth": 4}),
    "specmoeoff streaming": (specmoeoff, {"variant": "streaming", "depth": 4}),
}  # fmt: skip


def check_baselines(checker: Checker, path: Path, device: str, many: int) -> None:
    """Each with the bytes of half of the experts on top of everything else, the draft's copies included."""
    model = checker.model
    config, entry = model.decoder.config, model.store.layout.entry_bytes
    spec = ModelSpec(path.name, config.family, str(path), None, "reference", "bfloat16", "")
    from specter_core.assembly import fixed_parts

    for batch in (1, many):
        own = EngineOptions(depth=4, context_tokens=checker.context, max_batch=batch, shared_kv=False,
                            shared_weights=False)  # fmt: skip
        slots = max(len(config.moe_layers) * config.num_experts // 2, config.num_experts)
        budget = sum(fixed_parts(model, own).values()) + slots * entry
        for name, (module, options) in BASELINES.items():
            by_slots = "same_cache" in name
            memory = MemorySpec("check", None if by_slots else budget, 3 if by_slots else None, "native", None,
                                device=device, batch=batch, max_sequence=checker.context)  # fmt: skip
            checker.baseline(name, lambda m=module, o=options: m.create(o), spec, memory)


def check_long_prompt(model: LoadedModel, tokens: Sequence[int], length: int) -> Checker:
    """A prompt of `length` tokens in chunks of several sizes, experts streamed through few slots."""
    prompt = [tokens[i % len(tokens)] for i in range(length)]
    checker = Checker(model, [prompt], 8)
    for chunk in sorted({64, 1000, 256, length}):
        for depth in (0, 4):
            checker.switch(Case(f"prompt of {length}, chunks of {chunk}, K {depth}",
                                {"depth": depth, "prefill_chunk_tokens": chunk}))  # fmt: skip
    return checker


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=40, help="new tokens per prompt")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--long", type=int, default=0, help="check a prompt of so many tokens too")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first cases: run before")
    parser.add_argument("--limit-s", type=float, default=1e9, help="start no further case after this long")
    options = parser.parse_args()
    torch.set_num_threads(1)
    codec, begin, skipped = TextCodec(options.model), time.perf_counter(), 0
    prompts = [codec.encode(text) for text in PROMPTS[: options.prompts]]
    with open_model(options.model, device=options.device, rtn_if_missing=True) as model:
        checker = Checker(model, prompts, options.tokens)
        for case in switches(options.depth, options.prompts)[options.skip :]:
            if options.only in case.name:
                if time.perf_counter() - begin > options.limit_s:
                    skipped += 1
                    continue
                checker.switch(case)
        if not options.only or options.only == "baselines":
            if time.perf_counter() - begin > options.limit_s:
                skipped += 2 * len(BASELINES)
            else:
                check_baselines(checker, options.model.resolve(), options.device, options.prompts)
        if options.long and time.perf_counter() - begin <= options.limit_s:
            text = codec.encode(" ".join(PROMPTS))
            checker.rows += check_long_prompt(model, text, options.long).rows
    bad = [row["case"] for row in checker.rows if row["mismatches"] or row["failed"]]
    summary = {"model": options.model.name, "device": options.device, "cases": len(checker.rows), "skipped": skipped}
    summary |= {"tokens": sum(row["tokens"] for row in checker.rows), "bad": bad}
    print(json.dumps(summary | {"seconds": round(time.perf_counter() - begin, 1)}))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
