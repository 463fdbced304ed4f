"""Time the decode kernels on CUDA: python -m scripts.gpu.bench_decode_kernels [--models a,b] [--sweep] [--only PATTERN]

Prints the HBM ceiling first (measured here), then per kernel the time under CUDA graphs with weights rotated beyond the
L2, the floor (its bytes over the ceiling) and their ratio; the last line is one JSON object. Writes decode_kernels.csv
and verification_aims.csv to $OUT (or outputs/). A case that fails is a row that says why. --sweep times candidate tiles
of the linear layers; --only "grouped experts *" what the aim on the MoE part of a verification needs.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness import aim
from harness.environment import git_commit

ROOT = Path(__file__).resolve().parents[2]
L2_BYTES = 200_000_000
MIN_LAUNCHES = 48
FIELDS = ("model", "kernel", "rows", "us", "floor_us", "ratio", "tb_per_s", "bytes", "note")
VERIFIED_ROWS = 17
AIM_RATIO = 1.5


def ceiling_tb_per_s() -> dict[str, float]:
    """Best of a large copy (read + write) and a large read, in 1e12 bytes/s."""
    data = torch.empty(2_000_000_000 // 4, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(data)
    copy_us = event_us(lambda: target.copy_(data), 10)
    read_us = event_us(lambda: torch.amax(data), 10)
    return {"copy": 2 * data.nbytes / copy_us / 1e6, "read": data.nbytes / read_us / 1e6}


def event_us(run: Any, repeats: int) -> float:
    """Median device time of one call in microseconds."""
    for _ in range(2):
        run()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return statistics.median(times)


def graph_us(turns: Sequence[Callable[[], object]], repeats: int = 9) -> float:
    """Median device microseconds of one turn, all turns in one graph: they touch different weights."""
    turns[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in turns:
            turn()
    return event_us(graph.replay, repeats) / len(turns)


def time_case(case: Any) -> float:
    """Microseconds per launch, many launches in one graph."""
    copies = max(1, min(64, -(-L2_BYTES // max(case.bytes, 1)))) if case.bytes > 1_000_000 else 8
    launches = case.build(copies)
    for launch in launches[:1]:
        launch()
    torch.cuda.synchronize()
    rounds = 4 if case.bytes > 1_000_000_000 else max(1, -(-MIN_LAUNCHES // len(launches)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for launch in launches:
                launch()
    return event_us(graph.replay, 15) / (rounds * len(launches))


def cases(name: str, sweep: bool, device: str, only: str = "*") -> Iterator[Any]:
    """only: a pattern of the case's name."""
    return (case for case in _cases(name, sweep, device) if fnmatch(case.name, only))


def _cases(name: str, sweep: bool, device: str) -> Iterator[Any]:
    from scripts.gpu.decode_cases import model_cases, sweep_cases
    from scripts.gpu.decode_shapes import SHAPES, Maker

    shape = next(s for s in SHAPES if s.name == name)
    make = Maker(device, torch.bfloat16)
    if sweep:
        yield from sweep_cases(shape, make)
        return
    yield from model_cases(shape, make)
    if device != "meta":
        from scripts.gpu.decode_steps import step_cases

        yield from step_cases(shape, make)


def compile_case(name: str, sweep: bool, only: str, index: int, workers: int) -> None:
    """Fill Triton's cache on the disk with every workers-th case; needs no GPU."""
    from scripts.gpu.offline_sm90 import compile_only

    with compile_only():
        for number, case in enumerate(cases(name, sweep, "meta", only)):
            if number % workers == index:
                try:
                    for launch in case.build(1):
                        launch()
                except Exception as problem:
                    print(f"compile {case.name}: {problem}", file=sys.stderr)


def child(name: str, sweep: bool, only: str, start: int) -> None:
    """One JSON line per case from `start` on; a CUDA error ends the process after its line."""
    for number, case in enumerate(cases(name, sweep, "cuda", only)):
        if number < start:
            continue
        row: dict[str, Any] = {"number": number, "kernel": case.name, "rows": case.rows, "bytes": case.bytes}
        broken = False
        try:
            row["us"] = time_case(case)
        except Exception as problem:
            row["note"] = f"{type(problem).__name__}: {problem}".splitlines()[0][:200]
            broken = "CUDA" in row["note"] or "cuda" in row["note"]
        print(json.dumps(row), flush=True)
        if broken:
            os._exit(3)
        torch.cuda.empty_cache()
    if not sweep and only == "*":
        profile(name)


def profile(name: str) -> None:
    """One line per kernel of a whole pass: its share, as seen by the profiler (launches one by one, no graph)."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    from scripts.gpu.decode_shapes import SHAPES, Maker
    from scripts.gpu.decode_steps import step_cases

    shape = next(s for s in SHAPES if s.name == name)
    for case in step_cases(shape, Maker("cuda", torch.bfloat16)):
        if "PDL" in case.name or "4096" in case.name:
            continue
        launch = case.build(1)[0]
        launch()
        torch.cuda.synchronize()
        with record(activities=[ProfilerActivity.CUDA]) as recorded:
            launch()
            torch.cuda.synchronize()
        for event in recorded.key_averages():
            row = {
                "number": 10_000,
                "kernel": f"profile: {event.key[:24]} x{event.count}",
                "rows": case.rows,
                "bytes": 0,
            }
            print(json.dumps(row | {"us": float(event.device_time_total)}), flush=True)


def aims(rows: Sequence[dict[str, Any]], commit: str) -> list[aim.Aim]:
    """The MoE part of a verification with every expert resident, as a multiple of reading its experts once."""
    return [
        aim.Aim(
            f"MoE part of a {VERIFIED_ROWS}-token verification at full residency over reading its experts once, "
            f"{row['model']}",
            row["ratio"], "ratio", f"<= {AIM_RATIO}", commit, f"{row['kernel']}: {row['us']:.1f} µs",
        )
        for row in rows
        if row["rows"] == VERIFIED_ROWS and re.fullmatch(r"grouped experts \d+ of \d+", row["kernel"]) and "us" in row
    ]  # fmt: skip


def measure(name: str, sweep: bool, only: str = "*") -> Iterator[dict[str, Any]]:
    """Rows of one model; its child process is started again behind a case that broke it."""
    start, tries = 0, 0
    while tries < 8:
        command = [sys.executable, __file__, "--child", name, "--start", str(start), *(["--sweep"] if sweep else [])]
        command += ["--only", only]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            row = json.loads(line)
            start = row["number"] + 1
            yield row
        if process.wait() == 0:
            return
        if start > 10_000:
            return
        if process.returncode != 3:
            yield {"kernel": f"case {start}", "rows": 0, "bytes": 0, "note": f"exit code {process.returncode}"}
            start += 1
        tries += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="deepseek_v2_lite,qwen1.5_moe,phi3.5_moe")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="of the kernels' names")
    parser.add_argument("--child", default="")
    parser.add_argument("--start", type=int, default=0)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here; run this on a machine that has one", file=sys.stderr)
        return 2
    if options.child:
        child(options.child, options.sweep, options.only, options.start)
        return 0
    begin = time.perf_counter()
    models = options.models.split(",")
    workers = max(1, (os.cpu_count() or 2) // len(models))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers * len(models), mp_context=context) as pool:
        jobs = [(m, options.sweep, options.only, i, workers) for m in models for i in range(workers)]
        for future in [pool.submit(compile_case, *job) for job in jobs]:
            if future.exception() is not None:
                print(f"compile worker: {future.exception()}", file=sys.stderr)
    compiled_s = time.perf_counter() - begin
    ceilings = ceiling_tb_per_s()
    ceiling = max(ceilings.values())
    torch.cuda.empty_cache()
    print(
        f"HBM ceiling: copy {ceilings['copy']:.2f}, read {ceilings['read']:.2f} TB/s (compiled in {compiled_s:.0f} s)"
    )
    print(f"{'model':17s} {'kernel':38s} {'rows':>4s} {'µs':>8s} {'floor':>7s} {'ratio':>6s} {'TB/s':>5s}")
    rows: list[dict[str, Any]] = []
    for model in models:
        for row in measure(model, options.sweep, options.only):
            row["model"] = model
            if "us" in row:
                row["floor_us"] = row["bytes"] / ceiling / 1e6
                row["ratio"] = row["us"] / row["floor_us"] if row["floor_us"] else 0.0
                row["tb_per_s"] = row["bytes"] / row["us"] / 1e6 if row["us"] else 0.0
                text = f"{row['us']:8.2f} {row['floor_us']:7.2f} {row['ratio']:6.2f} {row['tb_per_s']:5.2f}"
            else:
                text = row.get("note", "")
            print(f"{model:17s} {row['kernel']:38s} {row['rows']:4d} {text}", flush=True)
            rows.append(row)
    out = Path(os.environ.get("OUT") or ROOT / "outputs")
    out.mkdir(parents=True, exist_ok=True)
    name = "decode_tiles.csv" if options.sweep else "decode_kernels.csv" if options.only == "*" else "decode_chosen.csv"
    with (out / name).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    aim.write(out / "verification_aims.csv", aims(rows, git_commit()))
    failed = [r["kernel"] for r in rows if "us" not in r]
    compact = [[r["model"], r["kernel"], r["rows"], round(r["us"], 2), round(r["ratio"], 2)] for r in rows if "us" in r]
    summary = {
        "device": torch.cuda.get_device_name(),
        "ceiling_tb_per_s": ceilings,
        "failed": failed,
        "seconds": round(time.perf_counter() - begin, 1),
        "rows": compact,
    }
    print(json.dumps(summary))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
