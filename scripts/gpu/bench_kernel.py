"""Check and time the fused INT4 kernels on CUDA: python -m scripts.gpu.bench_kernel [--models a,b]
[--no-sweep]

First float64 checks on fresh inputs, then the HBM ceiling (measured here), then per model a sweep of tiles
at one token and the best pair of launches, with experts rotated over more data than the L2 holds, under
CUDA graphs. Further rows: 1 to 64 tokens, weights read per (token, choice) against once per expert. Writes
kernel_sweep.csv, kernel.csv and aims.csv to $OUT (or outputs/). A case that fails is a row that says why;
the last line is one JSON object. Exit code 1 when a check fails. --no-sweep times the configured tiles
only.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts.gpu.bench_decode_kernels import ceiling_tb_per_s, event_us
from scripts.gpu.int4_checks import SHAPES, Case, Config, check_case, make_inputs
from specter_core.draft.int4 import matrix_bytes
from specter_core.draft.kernels.configs import GemvConfig, GroupedConfig, path_config
from specter_core.draft.kernels.down import down_weighted_sum
from specter_core.draft.kernels.gate_up import gate_up_swiglu
from specter_core.draft.kernels.layout import GemvMatrix, repack_for_gemv

ROOT = Path(__file__).resolve().parents[2]
AIMS_US = {"deepseek_v2_lite": 13.5, "qwen15_moe": 11.0, "phi35_moe": 29.0}
LAUNCHES = 48
TOKENS = (1, 2, 3, 4, 6, 8, 16, 32, 64)
STAGES = ("gate_up", "down")


def candidates(stage: str, model: str) -> list[GemvConfig]:
    """Tiles to try; unrolled ones stay below 64 weight loads in a row."""
    hidden, width, _, top_k = SHAPES[model]
    groups = hidden // 128 if stage == "gate_up" else top_k * width // 128
    matrices = 2 if stage == "gate_up" else 1
    found = []
    for block_n in (2, 4, 8, 16):
        for warps in (1, 2, 4, 8):
            steps = -(-groups // (8 * warps))
            rows = block_n * matrices
            if steps * 8 * warps > 1.5 * groups or not 2 <= rows <= 16:
                continue
            if rows * steps <= 64:
                found.append(GemvConfig(block_n, warps))
            if steps > 1 and rows <= 8:
                found += [GemvConfig(block_n, warps, unroll=False, stages=stages) for stages in (1, 3)]
    return found


def rotation(experts: int, top_k: int, tokens: int) -> list[Tensor]:
    """Ids int64 [T, k] of each launch. T = 1 walks through all experts in turn; more tokens draw their own."""
    generator = torch.Generator().manual_seed(2)
    if tokens > 1:
        draws = [torch.rand(tokens, experts, generator=generator).argsort(dim=1)[:, :top_k] for _ in range(8)]
    else:
        order = torch.randperm(experts, generator=generator)
        draws = [order[(top_k * i + torch.arange(top_k)) % experts][None] for i in range(LAUNCHES)]
    return [draw.sort(dim=1).values for draw in draws]


class Layer:
    """One layer's experts of a model, and launches that never meet the same expert twice within the L2."""

    def __init__(self, model: str, device: str, tokens: int = 1) -> None:
        hidden, width, experts, top_k = SHAPES[model]
        self.case = Case(hidden, width, experts, top_k, tokens, torch.bfloat16)
        inputs = make_inputs(self.case, device, seed=1, padded=False)
        self.matrices = repack_for_gemv(inputs.gate_up), repack_for_gemv(inputs.down)
        self.x, self.weights = inputs.x, inputs.weights
        self.ids = [ids.to(device) for ids in rotation(experts, top_k, tokens)]
        self.act = torch.zeros(tokens * top_k, width, device=device)
        self.out = torch.zeros(tokens, hidden, device=device)
        self.distinct = sum(len(set(ids.flatten().tolist())) for ids in self.ids) / len(self.ids)

    def bytes(self, stage: str) -> float:
        """Weight bytes of one launch: each distinct expert once."""
        hidden, width = self.case.hidden, self.case.width
        one = matrix_bytes(2 * width, hidden) if stage == "gate_up" else matrix_bytes(hidden, width)
        return one * self.distinct

    def launch(self, stage: str, ids: Tensor, config: Config, pdl: bool = False) -> None:
        if stage == "gate_up":
            gate_up_swiglu(self.x, ids, self.matrices[0], self.act, config, pdl)
        else:
            down_weighted_sum(self.act, ids, self.weights, self.matrices[1], self.out, config, pdl)

    def time_us(self, stages: Sequence[tuple[str, Config]], pdl: bool = False) -> float:
        """Microseconds of one turn through the stages, many turns in one graph."""

        def turns() -> None:
            for ids in self.ids:
                for stage, config in stages:
                    self.launch(stage, ids, config, pdl)

        turns()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            turns()
        return event_us(graph.replay, 15) / len(self.ids)


def compile_candidates(model: str, index: int, workers: int) -> None:
    """Fill Triton's cache on the disk with every workers-th candidate; needs no GPU."""
    from scripts.gpu.offline_sm90 import compile_only

    layer = object.__new__(Layer)
    hidden, width, experts, top_k = SHAPES[model]

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def matrix(outputs: int, inputs: int) -> GemvMatrix:
        words = empty(experts, outputs, inputs // 8, dtype=torch.int32)
        return GemvMatrix(words, empty(experts, outputs, inputs // 128, dtype=torch.float16))

    layer.matrices = matrix(2 * width, hidden), matrix(hidden, width)
    layer.x, layer.weights = empty(1, hidden, dtype=torch.bfloat16), empty(1, top_k)
    layer.act, layer.out = empty(top_k, width), empty(1, hidden)
    ids = empty(1, top_k, dtype=torch.int64)
    jobs = [(stage, config) for stage in STAGES for config in candidates(stage, model)]
    with compile_only():
        for stage, config in jobs[index::workers]:
            try:
                layer.launch(stage, ids, config)
            except Exception as problem:
                print(f"compile {model} {stage} {config}: {problem}", file=sys.stderr)


def attempt(run: Callable[[], float]) -> tuple[float | None, str]:
    """(microseconds, "") or (None, why not)."""
    try:
        return run(), ""
    except Exception as problem:
        return None, f"{type(problem).__name__}: {problem}".splitlines()[0][:160]


def check_all() -> list[list[Any]]:
    """Failed checks, over the models' shapes and odd ones."""
    half, brain = torch.float16, torch.bfloat16
    plain = (GemvConfig(4, 2), GemvConfig(4, 2))
    grouped = (GroupedConfig(), GroupedConfig(16))
    failed = []
    cases: list[tuple[Case, tuple[Config, Config]]] = []
    for model, (hidden, width, experts, top_k) in SHAPES.items():
        config = path_config(hidden, width, top_k)
        one, many = (config.gate_up, config.down), (config.grouped_gate_up, config.grouped_down)
        most = 17 if model == "phi35_moe" else 64
        for dtype in (half, brain):
            for tokens, configs in ((1, one), (3, one), (most, many)):
                cases.append((Case(hidden, width, experts, top_k, tokens, dtype), configs))
    for tokens in (1, 5):
        odd, small = Case(1152, 896, 7, 5, tokens, half), Case(128, 128, 2, 2, tokens, half)
        cases += [(odd, plain), (odd._replace(dtype=brain), grouped), (small, plain), (small, grouped)]
    looped = GemvConfig(8, 1, unroll=False, stages=3)
    cases.append((Case(1152, 896, 7, 5, 2, half), (looped, looped)))
    for seed, (case, configs) in enumerate(cases):
        for name, value, limit in check_case(case, *configs, device="cuda", seed=seed):
            if not value <= limit:
                failed.append([list(map(str, case)), name, value, limit])
    print(f"{len(cases)} cases against float64: {len(failed)} checks failed")
    return failed


def sweep(model: str, layer: Layer, ceiling: float) -> tuple[list[dict[str, Any]], dict[str, GemvConfig]]:
    """Every candidate's row, and the quickest of each stage."""
    rows, best = [], {}
    for stage in STAGES:
        timed: list[tuple[float, GemvConfig]] = []
        for config in candidates(stage, model):
            us, note = attempt(partial(layer.time_us, [(stage, config)]))
            tried = {"model": model, "stage": stage, "config": str(config), "us": us, "note": note}
            rows.append(tried)
            if us is not None:
                timed.append((us, config))
        timed.sort(key=lambda pair: pair[0])
        best[stage] = timed[0][1]
        floor = layer.bytes(stage) / ceiling / 1e6
        top = "; ".join(f"{us:.2f} {config}" for us, config in timed[:3])
        print(f"{model:17s} {stage:8s} floor {floor:5.2f} µs, best {top}", flush=True)
    return rows, best


def token_rows(model: str, best: dict[str, GemvConfig], ceiling: float) -> list[dict[str, Any]]:
    """Both launches at 1 … 64 tokens, weights per (token, choice) and per expert."""
    hidden, width, _, top_k = SHAPES[model]
    config = path_config(hidden, width, top_k)
    rows = []
    for tokens in TOKENS:
        layer = Layer(model, "cuda", tokens)
        forms: dict[str, list[tuple[str, Config]]] = {
            "per choice": [(stage, best[stage]) for stage in STAGES],
            "per expert": [("gate_up", config.grouped_gate_up), ("down", config.grouped_down)],
        }
        for form, stages in forms.items():
            us, note = attempt(partial(layer.time_us, stages))
            rows.append(row(model, form, tokens, us, sum(map(layer.bytes, STAGES)), ceiling, note))
        torch.cuda.empty_cache()
    return rows


def row(
    model: str, form: str, tokens: int, us: float | None, weight_bytes: float, ceiling: float, note: str
) -> dict[str, Any]:
    found: dict[str, Any] = {"model": model, "form": form, "tokens": tokens, "bytes": round(weight_bytes)}
    found["note"] = note
    text = note
    if us is not None:
        rate = weight_bytes / us / 1e6
        found |= {"us": round(us, 3), "tb_per_s": round(rate, 3), "share_of_ceiling": round(rate / ceiling, 3)}
        text = f"{us:8.2f} µs {rate:5.2f} TB/s {rate / ceiling:5.0%}"
    print(f"{model:17s} {form:34s} {tokens:3d} tokens {text}", flush=True)
    return found


def bench(model: str, ceiling: float, swept: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """(sweep rows, rows, the aim's row) of one model."""
    hidden, width, _, top_k = SHAPES[model]
    layer = Layer(model, "cuda")
    configured = path_config(hidden, width, top_k)
    tried: list[dict[str, Any]] = []
    best = {"gate_up": configured.gate_up, "down": configured.down}
    if swept:
        tried, best = sweep(model, layer, ceiling)
    rows = []
    pairs: list[tuple[float, str]] = []
    both = [(stage, best[stage]) for stage in STAGES]
    for pdl in (False, True):
        us, note = attempt(partial(layer.time_us, both, pdl))
        form = "both launches" + (", dependent launch" if pdl else "")
        rows.append(row(model, form, 1, us, sum(map(layer.bytes, STAGES)), ceiling, note))
        if us is not None:
            pairs.append((us, form))
    for stage, config in both:
        us, note = attempt(partial(layer.time_us, [(stage, config)]))
        rows.append(row(model, f"{stage} alone", 1, us, layer.bytes(stage), ceiling, note))
    rows += token_rows(model, best, ceiling)
    us, form = min(pairs)
    aim: dict[str, Any] = {"aim": f"int4 kernel, one token, both launches, {model}", "value": round(us, 2)}
    aim |= {"unit": "µs per layer", "target": AIMS_US[model], "met": us <= AIMS_US[model]}
    aim |= {"git_commit": git_commit(), "form": form}
    return tried, rows, aim | {stage: str(config) for stage, config in both}


def git_commit() -> str:
    stated = os.environ.get("SPECTER_COMMIT")  # where the checkout came without its history
    if stated:
        return stated
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def write_csv(path: Path, rows: Sequence[dict[str, Any]], fields: Sequence[str]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fields, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--no-sweep", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here; run this on a machine that has one", file=sys.stderr)
        return 2
    begin = time.perf_counter()
    models = options.models.split(",")
    if not options.no_sweep:
        workers = max(1, (os.cpu_count() or 2) // len(models))
        with ProcessPoolExecutor(workers * len(models), mp_context=multiprocessing.get_context("spawn")) as pool:
            jobs = [pool.submit(compile_candidates, m, i, workers) for m in models for i in range(workers)]
            for job in jobs:
                if job.exception() is not None:
                    print(f"compile worker: {job.exception()}", file=sys.stderr)
        print(f"compiled in {time.perf_counter() - begin:.0f} s")
    ceilings = ceiling_tb_per_s()
    ceiling = max(ceilings.values())
    torch.cuda.empty_cache()
    print(f"HBM ceiling: copy {ceilings['copy']:.2f}, read {ceilings['read']:.2f} TB/s")
    failed = check_all()
    tried: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    aims = []
    for model in models:
        model_tried, model_rows, aim = bench(model, ceiling, not options.no_sweep)
        tried += model_tried
        rows += model_rows
        aims.append(aim)
        torch.cuda.empty_cache()
    out = Path(os.environ.get("OUT") or ROOT / "outputs")
    out.mkdir(parents=True, exist_ok=True)
    write_csv(out / "kernel_sweep.csv", tried, ("model", "stage", "config", "us", "note"))
    fields = ("model", "form", "tokens", "us", "bytes", "tb_per_s", "share_of_ceiling", "note")
    write_csv(out / "kernel.csv", rows, fields)
    write_csv(out / "aims.csv", aims, ("aim", "value", "unit", "target", "met", "git_commit"))
    summary = {
        "device": torch.cuda.get_device_name(),
        "ceiling_tb_per_s": ceilings,
        "failed_checks": failed,
        "aims": aims,
        "seconds": round(time.perf_counter() - begin, 1),
    }
    print(json.dumps(summary))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
