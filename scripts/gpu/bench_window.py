"""Windows of full-size random models on CUDA: python -m scripts.gpu.bench_window --model deepseek_v2_lite

Per budget: exactness against the plain target (K = 0, every expert resident) by tokens, bits of the logits and of the
committed KV; then per window draft and verify ms, bytes moved and used, use of the link from b_1 on, the bound, and
what a demand-only LRU with the same slots would have moved; the device's memory, its growth and the budget.
Prints ceilings first; the last line is one JSON object. Writes window_MODEL.csv (one row per window),
window_MODEL_summary.csv and window_MODEL_aims.csv to $OUT (or outputs/), with --encoding nested under the name
MODEL_nested; SPECTER_COMMIT names the commit where there is no git.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness import aim
from harness.device_bytes import visible_gpu
from harness.device_meter import DeviceMeter
from harness.environment import git_commit
from scripts.gpu.bench_draft import hbm_ceiling_tb_per_s
from scripts.gpu.random_weights import random_model
from scripts.gpu.window_aims import GROWTH_WINDOWS, aims
from scripts.gpu.window_bench import COMPARED, Bench
from specter_core.options import ENCODINGS

ROOT = Path(__file__).resolve().parents[2]
BUDGETS_GB = {"deepseek_v2_lite": (24.0, 18.0), "qwen1.5_moe": (20.0, 16.0)}
DEPTHS = {"deepseek_v2_lite": 16, "qwen1.5_moe": 8}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    if rows:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=tuple(BUDGETS_GB), default="deepseek_v2_lite")
    parser.add_argument("--depth", type=int, help="K; default the paper's")
    parser.add_argument("--tokens", type=int, default=512, help="new tokens of the exactness run")
    parser.add_argument("--branch", type=float, default=0.3, help="size of what layers add; smaller: more acceptance")
    parser.add_argument("--encoding", choices=ENCODINGS, default="plain", help="of the experts in host store and slots")
    parser.add_argument("--compare", nargs="*", choices=tuple(COMPARED), default=(), help="switches to measure beside")
    parser.add_argument(
        "--quick", nargs=2, type=float, metavar=("STEP_MS", "VERIFY_MS"),
        help="only the windows: compute alone as measured before, no exactness against the resident target, no profile",
    )  # fmt: skip
    parser.add_argument("--growth", action="store_true", help=f"run {GROWTH_WINDOWS} windows more per budget")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here; run this on a machine that has one", file=sys.stderr)
        return 2
    meter = DeviceMeter(visible_gpu()).open()  # before this process has a context
    ceiling = hbm_ceiling_tb_per_s()
    print(f"HBM ceiling (read): {ceiling:.2f} TB/s")
    failed = []
    with random_model(options.model, branch=options.branch, encoding=options.encoding) as model:
        bench = Bench(
            options.model, model, options.depth or DEPTHS[options.model], options.tokens, meter, options.compare,
            options.growth,
        )  # fmt: skip
        steps = [("resident", lambda: bench.resident(ceiling))]
        if options.quick:
            bench.step_ms, bench.verify_ms = options.quick
            bench.draft_ms = bench.step_ms * bench.depth
            steps = []
        steps += [(f"{gb:g} GB", lambda gb=gb: bench.budget(gb)) for gb in BUDGETS_GB[options.model]]  # type: ignore[misc]
        for name, run in steps:
            try:
                run()
            except KeyboardInterrupt:  # a time limit: what was measured is written
                failed.append(name)
                break
            except Exception:
                failed.append(name)
                traceback.print_exc(limit=-6)
    out = Path(os.environ.get("OUT") or ROOT / "outputs")
    out.mkdir(parents=True, exist_ok=True)
    nested = "" if options.encoding == "plain" else f"_{options.encoding}"
    write(out / f"window_{options.model}{nested}.csv", bench.rows)
    write(out / f"window_{options.model}{nested}_summary.csv", bench.summary)
    named = f"{options.model}{nested.replace('_', ', ')}"
    aim.write(out / f"window_{options.model}{nested}_aims.csv", aims(bench.summary, named, git_commit()))
    meter.close()
    print(json.dumps({"device": torch.cuda.get_device_name(), "failed": failed, "rows": bench.summary}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
