"""Check and time the fused INT4 kernels on CUDA: python -m scripts.gpu.bench_kernel [--models a,b]
[--no-sweep]

First float64 checks on fresh inputs, then the HBM ceiling (measured here), then per model a sweep of the tensor-core
kernels' tiles at one token and the best pair of launches, with experts rotated over more data than the L2 holds, under
CUDA graphs, and that pair at 1 to 64 tokens. Writes kernel_sweep.csv, kernel.csv and kernel_aims.csv to $OUT (or
outputs/). A case that fails is a row that says why; the last line is one JSON object. Exit code 1 when a check fails.
--no-sweep times the configured tiles only. SPECTER_COMMIT states the commit where there is no git history.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from harness import aim
from harness.aim import Aim
from harness.environment import git_commit
from scripts.gpu.bench_decode_kernels import ceiling_tb_per_s
from scripts.gpu.int4_checks import SHAPES, Case, check_case
from scripts.gpu.int4_layer import STAGES, Job, Layer, compile_all, model_case
from specter_core.draft.kernels.block_configs import BlockConfig, block_path_config

ROOT = Path(__file__).resolve().parents[2]
AIMS_US = {"deepseek_v2_lite": 13.5, "qwen15_moe": 11.0, "phi35_moe": 29.0}
TOKENS = (1, 2, 3, 4, 6, 8, 16, 32, 64)


def candidates(stage: str, model: str) -> list[BlockConfig]:
    """Tiles to try: some 8 to 64 warps per multiprocessor, up to 64 registers of weights on their way per thread."""
    hidden, width, _, top_k = SHAPES[model]
    if stage == "gate_up":
        slots = {split: hidden // 128 // split for split in (2, 4, 8)}
        return [BlockConfig(split, 1, min(8, slots[split])) for split in slots] + [BlockConfig(4, 2, min(8, slots[4]))]
    slots = {
        split: -(-top_k * width // 128 // split) for split in (4, 8, 16, 32) if 1000 <= hidden // 16 * split < 4500
    }
    return [
        BlockConfig(split, 1, ahead) for split, most in slots.items() for ahead in sorted({min(4, most), min(8, most)})
    ]


class Bench(NamedTuple):
    """What one model's bench found."""

    tried: list[dict[str, Any]]
    rows: list[dict[str, Any]]
    aim: Aim


def attempt(run: Callable[[], float]) -> tuple[float | None, str]:
    """(microseconds, "") or (None, why not)."""
    try:
        return run(), ""
    except Exception as problem:
        return None, f"{type(problem).__name__}: {problem}".splitlines()[0][:160]


def check_cases() -> list[tuple[Case, tuple[BlockConfig, BlockConfig]]]:
    """The models' shapes, and odd ones."""
    half, brain = torch.float16, torch.bfloat16
    cases: list[tuple[Case, tuple[BlockConfig, BlockConfig]]] = []
    for model, (hidden, width, experts, top_k) in SHAPES.items():
        config = block_path_config(hidden, width, top_k)
        most = 17 if model == "phi35_moe" else 64
        for dtype, tokens in itertools.product((half, brain), (1, 3, most)):
            cases.append((Case(hidden, width, experts, top_k, tokens, dtype), (config.gate_up, config.down)))
    uneven, wide = (BlockConfig(4, 4, 1), BlockConfig(4, 2, 2)), (BlockConfig(2, 8), BlockConfig(1, 16))
    for tokens in (1, 5):
        odd, small = Case(1152, 896, 7, 5, tokens, half), Case(128, 128, 2, 2, tokens, half)
        cases += [(odd, uneven), (odd._replace(dtype=brain), wide), (small, uneven), (small, wide)]
    return cases


def check_all() -> list[list[Any]]:
    """Failed checks."""
    failed = []
    cases = check_cases()
    for seed, (case, configs) in enumerate(cases):
        for name, value, limit in check_case(case, *configs, device="cuda", seed=seed):
            if not value <= limit:
                failed.append([list(map(str, case)), name, value, limit])
    print(f"{len(cases)} cases against float64: {len(failed)} checks failed", flush=True)
    return failed


def sweep(model: str, layer: Layer, ceiling: float) -> tuple[list[dict[str, Any]], dict[str, list[BlockConfig]]]:
    """Every candidate's row, and the quickest three of each stage."""
    rows: list[dict[str, Any]] = []
    best: dict[str, list[BlockConfig]] = {}
    for stage in STAGES:
        timed: list[tuple[float, BlockConfig]] = []
        for config in candidates(stage, model):
            us, note = attempt(partial(layer.time_us, [(stage, config)]))
            tried = {"model": model, "stage": stage, "config": str(config), "us": us, "note": note}
            rows.append(tried)
            if us is not None:
                timed.append((us, config))
        timed.sort(key=lambda pair: pair[0])
        best[stage] = [config for _, config in timed[:3]]
        floor = layer.bytes(stage) / ceiling / 1e6
        top = "; ".join(f"{us:.2f} {config}" for us, config in timed[:3])
        print(f"{model:17s} {stage:8s} floor {floor:5.2f} µs, best {top}", flush=True)
    return rows, best


def token_rows(
    model: str, pair: Sequence[BlockConfig], ceiling: float, counts: Sequence[int] = TOKENS
) -> list[dict[str, Any]]:
    """Both launches at 1 … 64 tokens."""
    rows = []
    for tokens in counts:
        layer = Layer(model, "cuda", tokens)
        us, note = attempt(partial(layer.time_us, list(zip(STAGES, pair, strict=True))))
        rows.append(row(model, "per choice", tokens, us, sum(map(layer.bytes, STAGES)), ceiling, note))
        del layer
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


def bench(model: str, best: dict[str, list[BlockConfig]], ceiling: float, counts: Sequence[int] = TOKENS) -> Bench:
    """Pairs of the best tiles, with and without dependent launch, and the best pair at 1 … 64 tokens."""
    layer = Layer(model, "cuda")
    tried: list[dict[str, Any]] = []
    timed: list[tuple[float, bool, list[BlockConfig]]] = []
    for pdl, first, second in itertools.product((False, True), best["gate_up"], best["down"]):
        us, note = attempt(partial(layer.time_us, [("gate_up", first), ("down", second)], pdl))
        config = f"{first} + {second}"
        tried.append({"model": model, "stage": "both" + ", dependent" * pdl, "config": config, "us": us, "note": note})
        if us is not None:
            timed.append((us, pdl, [first, second]))
    timed.sort(key=lambda entry: entry[0])
    rows = []
    for pdl in (False, True):
        us, _, both = next(entry for entry in timed if entry[1] == pdl)
        form = "both launches" + ", dependent launch" * pdl
        rows.append(row(model, form, 1, us, sum(map(layer.bytes, STAGES)), ceiling, f"{both[0]} + {both[1]}"))
    us, pdl, both = timed[0]
    for stage, config in zip(STAGES, both, strict=True):
        alone, note = attempt(partial(layer.time_us, [(stage, config)]))
        rows.append(row(model, f"{stage} alone", 1, alone, layer.bytes(stage), ceiling, note))
    rows += token_rows(model, both, ceiling, counts)
    form = ", ".join(["dependent launch" if pdl else "plain launch", *map(str, both)])
    name = f"int4 kernel, one token, both launches, {model}"
    return Bench(tried, rows, Aim(name, us, "µs per layer", f"<= {AIMS_US[model]}", git_commit(), form))


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
    best: dict[str, dict[str, list[BlockConfig]]] = {}
    for model in models:
        hidden, width, _, top_k = SHAPES[model]
        config = block_path_config(hidden, width, top_k)
        best[model] = {"gate_up": [config.gate_up], "down": [config.down]}
    workers = max(1, (os.cpu_count() or 2) - 1)
    tried: list[dict[str, Any]] = []
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = [Job(case, *entry) for case, pair in check_cases() for entry in zip(STAGES, pair, strict=True)]
        if not options.no_sweep:
            jobs += [Job(model_case(m), s, c) for m in models for s in STAGES for c in candidates(s, m)]
        compile_all(pool, workers, jobs)
        print(f"compiled {len(jobs)} kernels in {time.perf_counter() - begin:.0f} s", flush=True)
        ceilings = ceiling_tb_per_s()
        ceiling = max(ceilings.values())
        torch.cuda.empty_cache()
        print(f"HBM ceiling: copy {ceilings['copy']:.2f}, read {ceilings['read']:.2f} TB/s")
        failed = check_all()
        if not options.no_sweep:
            for model in models:
                found, best[model] = sweep(model, Layer(model, "cuda"), ceiling)
                tried += found
                torch.cuda.empty_cache()
        jobs = [Job(model_case(m), s, c, p) for m in models for s in STAGES for c in best[m][s] for p in (False, True)]
        compile_all(pool, workers, jobs)
    rows: list[dict[str, Any]] = []
    aims: list[Aim] = []
    for model in models:
        found_of_model = bench(model, best[model], ceiling)
        tried += found_of_model.tried
        rows += found_of_model.rows
        aims.append(found_of_model.aim)
        torch.cuda.empty_cache()
    out = Path(os.environ.get("OUT") or ROOT / "outputs")
    out.mkdir(parents=True, exist_ok=True)
    write_csv(out / "kernel_sweep.csv", tried, ("model", "stage", "config", "us", "note"))
    fields = ("model", "form", "tokens", "us", "bytes", "tb_per_s", "share_of_ceiling", "note")
    write_csv(out / "kernel.csv", rows, fields)
    aim.write(out / "kernel_aims.csv", aims)
    summary = {
        "device": torch.cuda.get_device_name(),
        "ceiling_tb_per_s": ceilings,
        "failed_checks": failed,
        "aims": [[a.aim, round(a.value or 0.0, 2), a.target, a.met] for a in aims],
        "seconds": round(time.perf_counter() - begin, 1),
    }
    print(json.dumps(summary))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
