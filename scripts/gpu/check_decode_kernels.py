"""Check the decode kernels on CUDA at real shapes: python -m scripts.gpu.check_decode_kernels [--quick]

Values against float64, and bits: a row must have the same bits for any number of rows from 1 to 33, at any place, in
any company, bucket and grouping. Each task runs in a process of its own, so that a fault in one hides no other. Prints
one line per failed check and per task, one JSON object last; exit code 1 when anything failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

Task = tuple[str, str, tuple[Any, ...]]
"""(name, dtype, arguments of `run_task`)"""

COUNTS = tuple(range(1, 34))


def tasks(quick: bool) -> list[Task]:
    """The longest first, so that the pool ends evenly."""
    few = (1, 2, 15, 16, 17, 31, 32, 33)
    counts = few if quick else COUNTS
    found: list[Task] = []
    linears = [(3648, 2048, 1), (2048, 2048, 1), (576, 2048, 2), (64, 2048, 4), (61, 2048, 4), (2816, 2048, 1)]
    linears += [(2048, 10944, 1), (6144, 4096, 1), (1001, 1000, 1), (32064, 4096, 1)]
    for n, k, split in linears:
        for rows in (16, 32):
            found.append(("linear", "bfloat16", (n, k, rows, split, counts if k <= 4096 else few)))
    for n, k in ((3648, 2048), (2048, 2816), (2048, 10944), (2816, 2048), (1001, 1000), (4099, 4096)):
        found.append(("gemv", "bfloat16", (n, k, (1, 2, 4, 7))))
    found.append(("gemv", "float16", (2048, 2816, (1, 4))))
    found.append(("linear", "float16", (2048, 2048, 32, 1, few)))
    table = [(3648, 2048, False), (64, 2048, False), (102400, 2048, False), (2816, 2048, True), (2048, 5632, False)]
    found += [("table", "bfloat16", (*shape, few)) for shape in table]
    for dtype in ("bfloat16", "float16"):
        for batch, steps, start in ((1, 33, 100), (3, 17, 40), (1, 5, 508), (2, 4, 1500), (4, 1, 60)):
            found.append(("mla", dtype, (batch, steps, start)))
            found.append(("gqa", dtype, (16, 16, False, batch, steps, start)))
            found.append(("gqa", dtype, (32, 8, True, batch, steps, start)))
        for shape in ((64, 6, 2048, 1408, 17), (60, 4, 2048, 1408, 33), (16, 2, 4096, 6400, 9), (7, 3, 200, 136, 40)):
            found.append(("grouped", dtype, shape))
        found.append(("small", dtype, ()))
    found += [("routing", "bfloat16", shape) for shape in ((64, 6, 1), (60, 4, 1), (16, 2, 3))]
    found += [("gqa_row", "bfloat16", (16, 16, None)), ("gqa_row", "float16", (32, 8, 63))]
    found += [("shared", "bfloat16", shape) for shape in ((64, 6, 2816, 1), (60, 4, 5632, 1), (60, 4, 5632, 3))]
    found += [("rebuild", "bfloat16", (2816, 2048))]
    found += [("nested", "bfloat16", shape) for shape in ((16, 6, 2048, 1408, 17), (4, 2, 4096, 6400, 9))]
    found += [("pass", "bfloat16", (index,)) for index in range(3)]
    found.append(("graph", "bfloat16", ()))
    return found


def run_task(task: Task, seed: int) -> tuple[str, list[tuple[str, float, float]], str]:
    """(name, [(check, value, limit)], traceback or "")."""
    kind, dtype, arguments = task
    name = f"{kind} {dtype} {arguments if kind != 'linear' else arguments[:4]}"
    done: list[tuple[str, float, float]] = []
    try:
        from scripts.gpu.decode_checks import Env

        env = Env.make("cuda", getattr(torch, dtype), seed)
        for check in TASKS[kind](env, *arguments):
            done.append((check.name, check.value, check.limit))
        torch.cuda.synchronize()
    except Exception:
        return name, done, traceback.format_exc(limit=4)
    return name, done, ""


def linear_task(env: Any, n: int, k: int, rows: int, split: int, counts: tuple[int, ...]) -> Iterator[Any]:
    from scripts.gpu.decode_checks_linear import linear_checks
    from specter_core.model.kernels.tiles import LinearTile

    values = tuple(c for c in (1, 17, 33) if c in counts)
    tile = LinearTile(rows, 16, 128, split)
    yield from linear_checks(env, n, k, tile, counts, values)


def gemv_task(env: Any, n: int, k: int, counts: tuple[int, ...]) -> Iterator[Any]:
    from scripts.gpu.decode_checks_linear import gemv_checks
    from specter_core.model.kernels.tiles import gemv_tile

    for pair in (False, True):
        yield from gemv_checks(env, n, k, 64, gemv_tile(n, k, pair=pair), counts)


def table_task(env: Any, n: int, k: int, pair: bool, counts: tuple[int, ...]) -> Iterator[Any]:
    """The tiles that the table really chooses."""
    from scripts.gpu.decode_checks_linear import linear_checks
    from specter_core.model.kernels.tiles import Preset, linear_tile

    for preset in Preset:
        tile = linear_tile(n, k, pair=pair, preset=preset)
        yield from linear_checks(env, n, k, tile, counts, ())


def mla_task(env: Any, batch: int, steps: int, start: int) -> Iterator[Any]:
    from scripts.gpu.decode_checks_attention import Sequences, mla_checks

    starts = tuple(start + 37 * b for b in range(batch))
    counts = tuple(max(1, steps - b) for b in range(batch))
    sequences = Sequences(starts, steps, counts)
    for row_tile in (16, 32):
        yield from mla_checks(env, 16, 128, 64, 512, 128, sequences, 2048, (1, 2, 4), row_tile)


def gqa_task(env: Any, heads: int, kv: int, long: bool, batch: int, steps: int, start: int) -> Iterator[Any]:
    from scripts.gpu.decode_checks_attention import Sequences, gqa_checks

    starts = tuple(start + 37 * b for b in range(batch))
    counts = tuple(max(1, steps - b) for b in range(batch))
    switch = start + 2 if long else None
    yield from gqa_checks(env, heads, kv, 128, Sequences(starts, steps, counts), 2048, switch=switch)


def rebuild_task(env: Any, rows: int, inputs: int) -> Iterator[Any]:
    from scripts.gpu.nested_checks import rebuild_checks

    yield from rebuild_checks(env, rows, inputs)


def nested_task(env: Any, experts: int, top_k: int, hidden: int, width: int, count: int) -> Iterator[Any]:
    from scripts.gpu.nested_checks import nested_checks

    yield from nested_checks(env, experts, top_k, hidden, width, count)


def grouped_task(env: Any, experts: int, top_k: int, hidden: int, width: int, count: int) -> Iterator[Any]:
    from scripts.gpu.decode_checks_moe import grouped_checks

    yield from grouped_checks(env, experts, top_k, hidden, width, count)


def routing_task(env: Any, experts: int, top_k: int, count: int) -> Iterator[Any]:
    from scripts.gpu.draft_fusion_checks import routing_checks
    from specter_core.model.kernels.tiles import gemv_tile

    yield from routing_checks(env, 2816, 2048, experts, top_k, gemv_tile(2816, 2048, pair=True), count)


def gqa_row_task(env: Any, heads: int, kv: int, switch: int | None) -> Iterator[Any]:
    from scripts.gpu.draft_fusion_checks import gqa_row_checks

    yield from gqa_row_checks(env, heads, kv, 128, (100, 3, 0, 511, 160), 512, switch)


def shared_task(env: Any, experts: int, top_k: int, shared: int, count: int) -> Iterator[Any]:
    from scripts.gpu.draft_fusion_checks import shared_checks
    from scripts.gpu.int4_checks import Case

    yield from shared_checks(env, Case(2048, 1408, experts, top_k, count, env.dtype), shared)


def small_task(env: Any) -> Iterator[Any]:
    from scripts.gpu.decode_checks_linear import head_linear_checks, norm_checks
    from scripts.gpu.decode_checks_moe import router_checks, token_checks
    from scripts.gpu.draft_ends_checks import draft_ends_checks

    for hidden in (64, 2048, 4096):
        yield from norm_checks(env, hidden, (1, 5, 33))
    yield from head_linear_checks(env, 16, 128, 512, (1, 2, 16, 17, 33))
    yield from head_linear_checks(env, 16, 512, 128, (1, 2, 16, 17, 33))
    for experts, k in ((64, 6), (60, 4), (16, 2), (13, 3)):
        yield from router_checks(env, experts, k, 33)
    for vocab, hidden in ((102400, 2048), (151936, 2048), (777, 40)):
        yield from token_checks(env, vocab, hidden, 9)
    for batch in (2, 9):
        yield from draft_ends_checks(env, batch, 16)


def pass_task(env: Any, index: int) -> Iterator[Any]:
    from scripts.gpu.decode_shapes import SHAPES
    from scripts.gpu.decode_steps import pass_checks

    yield from pass_checks(SHAPES[index], env)


def graph_task(env: Any) -> Iterator[Any]:
    from scripts.gpu.decode_checks_attention import graph_checks

    yield from graph_checks(env)


TASKS: dict[str, Callable[..., Iterator[Any]]] = {
    "linear": linear_task,
    "gemv": gemv_task,
    "table": table_task,
    "mla": mla_task,
    "gqa": gqa_task,
    "grouped": grouped_task,
    "nested": nested_task,
    "rebuild": rebuild_task,
    "small": small_task,
    "routing": routing_task,
    "gqa_row": gqa_row_task,
    "shared": shared_task,
    "pass": pass_task,
    "graph": graph_task,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="eight row counts instead of all of 1 to 33")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31, help="default: a fresh one")
    parser.add_argument("--only", default="", help="only tasks of this kind")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here; run this on a machine that has one", file=sys.stderr)
        return 2
    begin = time.perf_counter()
    chosen = [t for t in tasks(options.quick) if options.only in ("", t[0])]
    failed: list[str] = []
    worst: dict[str, float] = {}
    checks = 0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, mp_context=context, max_tasks_per_child=4) as pool:
        waiting = {pool.submit(run_task, t, options.seed + i): t for i, t in enumerate(chosen)}
        for future in as_completed(waiting):
            try:
                name, done, error = future.result()
            except Exception as problem:
                name, done, error = str(waiting[future]), [], f"process died: {problem}"
            bad = [c for c in done if not c[1] <= c[2]]
            checks += len(done)
            kind = waiting[future][0]
            shares = [c[1] / c[2] for c in done if c[2] > 0]
            worst[kind] = max([worst.get(kind, 0.0), *shares])
            print(f"{'FAIL' if bad or error else 'ok':4s} {name}: {len(done) - len(bad)} of {len(done)}", flush=True)
            for check, value, limit in bad[:6]:
                print(f"     {check}: {value:.3g} > {limit:.3g}")
            if error:
                print("     " + error.strip().replace("\n", "\n     ")[-1500:])
            failed += [f"{name}: {c[0]} = {c[1]:.3g}" for c in bad] + ([f"{name}: {error[-200:]}"] if error else [])
    summary = {
        "device": torch.cuda.get_device_name(),
        "seed": options.seed,
        "tasks": len(chosen),
        "checks": checks,
        "failed": len(failed),
        "worst_error_share_of_limit": {k: round(v, 3) for k, v in sorted(worst.items())},
        "failures": failed[:20],
        "seconds": round(time.perf_counter() - begin, 1),
    }
    print(json.dumps(summary))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
