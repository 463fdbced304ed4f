"""Time a draft step on CUDA with full-size random weights: python -m scripts.gpu.bench_draft [--models a,b]

Prints the floor first (bytes a step reads over the HBM ceiling measured here), then one row per model; the last line is
one JSON object. Writes draft.csv and draft_aims.csv to $OUT (or outputs/). bench_window measures the same on a model
that it has loaded.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness import aim
from harness.environment import git_commit
from specter_core.assembly import build_engine
from specter_core.draft.draft_graph import GraphDraftPass
from specter_core.opening import LoadedModel
from specter_core.options import EngineOptions
from specter_core.types import Request

ROOT = Path(__file__).resolve().parents[2]
FIELDS = ("model", "batch", "context", "ms_per_token", "floor_ms", "read_gb", "ceiling_tb_per_s")
STEPS = 16
AIM_MS = 2.0
"""Per token, DeepSeek-V2-Lite, B = 1."""


def hbm_ceiling_tb_per_s() -> float:
    """Best of five reads of 4 GB."""
    data = torch.empty(1_000_000_000, dtype=torch.float32, device="cuda")
    times = []
    for _ in range(6):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.amax(data)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return data.nbytes / min(times) / 1e9


def step_bytes(model: LoadedModel) -> int:
    """What one draft token must read: shared tensors but the embedding, and k experts per layer in INT4."""
    config = model.decoder.config
    shared = model.decoder.shared_bytes - config.vocab_size * config.hidden * 2
    expert = config.expert_params * 33 // 64
    return shared + len(config.moe_layers) * config.top_k * expert


def time_steps(draft: GraphDraftPass, rounds: int = 12) -> float:
    """Median device ms per token of windows of 16 replays, on the rows of the last batch."""
    made = draft._step
    times = []
    for _ in range(rounds):
        draft._host[2] = STEPS
        made.begin(draft._host)
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(min(STEPS, draft.tokens.shape[1])):
            made.greedy()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / min(STEPS, draft.tokens.shape[1]))
    draft.analyzer.clear()
    return statistics.median(times)


def kernel_shares(draft: GraphDraftPass, top: int = 14) -> list[tuple[str, int, float]]:
    """(kernel, launches, µs) of one step, launched one by one."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        draft._step._greedy()
        torch.cuda.synchronize()
    draft.analyzer.clear()
    rows = [(e.key[:40], int(e.count), float(e.device_time_total)) for e in recorded.key_averages()]
    return sorted(rows, key=lambda r: -r[2])[:top]


def measure(name: str, model: LoadedModel, ceiling: float, batch: int = 1) -> dict[str, Any]:
    options = EngineOptions(depth=STEPS, context_tokens=512, max_batch=batch)
    requests = [Request(f"r{b}", tuple(range(10 + b, 90 + b)), 20, ignore_eos=True) for b in range(batch)]
    with build_engine(model, options, slots_per_layer=4) as engine:
        engine.generate(requests)
        assert isinstance(engine.draft, GraphDraftPass)
        ms = time_steps(engine.draft)
        shares = kernel_shares(engine.draft) if batch == 1 else []
    size = step_bytes(model)
    row = {
        "model": name, "batch": batch, "context": 100, "ms_per_token": round(ms, 4),
        "floor_ms": round(size / ceiling / 1e9, 4), "read_gb": round(size / 1e9, 3),
        "ceiling_tb_per_s": round(ceiling, 3),
    }  # fmt: skip
    print(f"{name:18s} B {batch}: {ms:.3f} ms per step, floor {row['floor_ms']:.3f} ms", flush=True)
    for kernel, count, us in shares:
        print(f"    {us:8.1f} us x{count:4d} {kernel}")
    return row


def aims(rows: Sequence[dict[str, Any]], commit: str) -> list[aim.Aim]:
    """One per model at B = 1; only DeepSeek-V2-Lite has a target."""
    return [
        aim.Aim(
            f"draft step as a CUDA graph, {row['model']}, B = 1",
            row["ms_per_token"],
            "ms per token",
            f"<= {AIM_MS}" if row["model"] == "deepseek_v2_lite" else "",
            commit,
            f"bytes allow {row['floor_ms']:.2f} ms",
        )
        for row in rows
        if row["batch"] == 1
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="deepseek_v2_lite,qwen1.5_moe")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here; run this on a machine that has one", file=sys.stderr)
        return 2
    from scripts.gpu.random_weights import random_model

    ceiling = hbm_ceiling_tb_per_s()
    print(f"HBM ceiling (read): {ceiling:.2f} TB/s")
    rows = []
    for name in options.models.split(","):
        with random_model(name) as model:
            rows += [measure(name, model, ceiling, batch) for batch in (1, 4)]
    out = Path(os.environ.get("OUT") or ROOT / "outputs")
    out.mkdir(parents=True, exist_ok=True)
    with (out / "draft.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)
    aim.write(out / "draft_aims.csv", aims(rows, git_commit()))
    print(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
