"""Measure the host-to-device link on CUDA: python -m scripts.gpu.bench_link [--gb 4]

Prints the ceiling first (one large pinned copy), then rows: page-locking, back-to-back experts through the software
queue, the gap that queued work waits for an empty copy stream, a demand's wait behind queued prefetches, pacing. The
last line is one JSON object; writes link.csv and link_aims.csv to $OUT (or outputs/).
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness import aim
from harness.environment import git_commit
from specter_core.device_runtime import CudaRuntime
from specter_core.memory.host_registration import HostRegistration
from specter_core.memory.host_store import HostExpertStore
from specter_core.memory.link import Priority
from specter_core.memory.link_cuda import CudaLink
from specter_core.memory.payload import PayloadLayout
from specter_core.memory.slot_buffer import SlotBuffer
from specter_core.types import ExpertKey

ROOT = Path(__file__).resolve().parents[2]
LAYOUT = PayloadLayout(2048, 1408, torch.bfloat16)
FIELDS = ("row", "value", "unit", "note")
PAGE_LOCKING = "page-locking (touch + register)"
AIM_GIB_PER_S = 3.5


def ceiling_gb_per_s() -> float:
    """Best of ten copies of 256 MiB from pinned memory."""
    source = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda")
    times = []
    for _ in range(10):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source, non_blocking=True)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return source.nbytes / min(times) / 1e6


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values) or [float("nan")]
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def busy_python(seconds: float) -> None:
    """Holds the interpreter lock, as planning does."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        sum(i * i for i in range(2000))


def measure(total_gb: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def row(name: str, value: float, unit: str, note: str = "") -> None:
        rows.append({"row": name, "value": round(value, 4), "unit": unit, "note": note})
        print(f"{name:44s} {value:10.3f} {unit} {note}", flush=True)

    experts = max(32, int(total_gb * 1e9 / LAYOUT.entry_bytes))
    store = HostExpertStore.create(1, experts, LAYOUT)
    size = store.segment.numel()
    start = time.perf_counter()
    registration = HostRegistration(store.segment)
    elapsed = time.perf_counter() - start
    registration.close()
    row(PAGE_LOCKING, size / 2**30 / elapsed, "GiB/s", f"{size / 1e9:.1f} GB")
    slots = SlotBuffer(32, LAYOUT.entry_bytes, "cuda")
    runtime = CudaRuntime()  # one for every link: it keeps the store page-locked
    for pieces in (2, 3, 4):
        link = CudaLink(store, slots, runtime, pieces=pieces)
        row(f"standalone expert rate, {pieces} pieces in flight", link.rate_bytes_per_s / 1e9, "GB/s")
        link.take_gaps_us()
        start = time.perf_counter()
        for i in range(experts):
            link.submit(ExpertKey(0, i), i % 32, Priority.PREFETCH)
        issue_us = (time.perf_counter() - start) / experts * 1e6
        busy_python(experts * LAYOUT.entry_bytes / link.rate_bytes_per_s * 0.9)
        link.drain()
        elapsed = time.perf_counter() - start
        gaps = link.take_gaps_us()
        row("  beside a busy Python thread", experts * LAYOUT.entry_bytes / elapsed / 1e9, "GB/s")
        row("  submit", issue_us, "us")
        row("  gap between pieces, p99", percentile(gaps, 0.99), "us", f"max {max(gaps):.1f}, n {len(gaps)}")
        waits = []
        for _ in range(20):
            for j in range(8):
                link.submit(ExpertKey(0, j), j, Priority.PREFETCH)
            time.sleep(0.0005)
            start = time.perf_counter()
            transfer = link.submit(ExpertKey(0, 20), 20, Priority.DEMAND)
            while not link.done(transfer):
                pass
            waits.append((time.perf_counter() - start) * 1e3)
            link.drain()
        row("  demand behind 8 queued prefetches", statistics.median(waits), "ms", "one expert alone is the floor")
        link.close()
    for rate in (25e9, 12.5e9):
        link = CudaLink(store, slots, runtime, rate)
        start = time.perf_counter()
        for i in range(64):
            link.submit(ExpertKey(0, i % experts), i % 32, Priority.PREFETCH)
        link.drain()
        row(f"paced to {rate / 1e9:g}", 64 * LAYOUT.entry_bytes / (time.perf_counter() - start) / 1e9, "GB/s")
        link.close()
    runtime.close()
    store.close()
    store.unlink()
    return rows


def aims(rows: Sequence[dict[str, Any]], commit: str) -> list[aim.Aim]:
    return [
        aim.Aim("page-locking", row["value"], row["unit"], f">= {AIM_GIB_PER_S}", commit, row["note"])
        for row in rows
        if row["row"] == PAGE_LOCKING
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=4.0)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here; run this on a machine that has one", file=sys.stderr)
        return 2
    ceiling = ceiling_gb_per_s()
    print(f"link ceiling: {ceiling:.2f} GB/s (256 MiB pinned copy)")
    rows = measure(options.gb)
    out = Path(os.environ.get("OUT") or ROOT / "outputs")
    out.mkdir(parents=True, exist_ok=True)
    with (out / "link.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerow({"row": "ceiling", "value": round(ceiling, 3), "unit": "GB/s", "note": "256 MiB pinned copy"})
        writer.writerows(rows)
    aim.write(out / "link_aims.csv", aims(rows, git_commit()))
    print(json.dumps({"device": torch.cuda.get_device_name(), "ceiling_gb_per_s": ceiling, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
