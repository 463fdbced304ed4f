"""Time what the fused INT4 kernel is compared with (figures 10 and 11): python -m scripts.gpu.bench_comparison
[--models a,b] [--no-dense]

FP16 stands for 16-bit weights (bfloat16) in cuBLAS; INT4 runs on Marlin (scripts/gpu/marlin.py) and on our own kernels.
Dense and single-expert shapes: one call at 1 to 4,096 tokens. The routed experts of one layer: expert by expert (gate,
up and down each by itself, as a model's modules do it) and fused, at 1 to 16 tokens. Every time is device time within
a CUDA graph with fixed routing, weights rotated beyond the L2; eager_us is the time of the same calls launched one by
one. Values are checked against float64 first, at the fewest tokens. Prints the HBM ceiling, then rows; writes
comparison.csv to $OUT (or outputs/); what cannot be measured is a row that says why; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from harness.environment import git_commit
from scripts.gpu.bench_decode_kernels import ceiling_tb_per_s
from scripts.gpu.bench_kernel import ROOT, write_csv
from scripts.gpu.comparison_experts import moe_rows
from scripts.gpu.comparison_products import call_rows
from scripts.gpu.int4_checks import SHAPES

DENSE = ((73728, 18432), (18432, 18432), (8192, 8192), (4096, 4096))  # inputs x outputs
EXPERT = ((2048, 1408), (4096, 6400))
FIELDS = (
    "shape", "tokens", "backend", "variant", "launches", "us", "eager_us", "tb_per_s", "share_of_ceiling", "device",
    "weights", "dtype", "git_commit", "reason",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--no-dense", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here; run this on a machine that has one", file=sys.stderr)
        return 2
    begin = time.perf_counter()
    ceilings = ceiling_tb_per_s()
    ceiling = max(ceilings.values())
    torch.cuda.empty_cache()
    print(f"HBM ceiling: copy {ceilings['copy']:.2f}, read {ceilings['read']:.2f} TB/s")
    out = Path(os.environ.get("OUT") or ROOT / "outputs")
    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []

    def record(found: Iterator[dict[str, Any]]) -> None:
        for row in found:
            row |= {"device": "cuda", "weights": "synthetic", "dtype": "bfloat16", "git_commit": git_commit()}
            rows.append(row)
            text = row.get("reason") or f"{row['us']:9.2f} µs, eager {row.get('eager_us', '-')}"
            print(f"{row['shape']:22s} {row['tokens']:5d} {row['backend']:8s} {row['variant']:8s} {text}", flush=True)
            write_csv(out / "comparison.csv", rows, FIELDS)

    for model in options.models.split(","):
        record(moe_rows(model, ceiling))
    if not options.no_dense:
        for inputs, outputs in EXPERT:
            record(call_rows("expert", inputs, outputs, ceiling))
        for inputs, outputs in DENSE:
            record(call_rows("dense", inputs, outputs, ceiling))
    measured = sum(1 for row in rows if row.get("us") is not None)
    seconds = round(time.perf_counter() - begin, 1)
    print(json.dumps({"device": torch.cuda.get_device_name(), "rows": len(rows), "measured": measured, "s": seconds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
