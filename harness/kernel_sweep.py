"""python run.py sweep=kernels: the benches of the INT4 kernels where there is a GPU, a line that says so elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pandas as pd

from harness import environment
from harness.catalogue import ROOT
from harness.entries import RunConfig
from harness.runner import write_csv
from specter_core.errors import UserError

BENCHES = ("scripts.gpu.bench_kernel", "scripts.gpu.bench_comparison")
FUSED_FORMS = ("both launches", "both launches, dependent launch", "per choice")


def run(config: RunConfig) -> dict[str, Any]:
    """Runs the benches with the output folder as their $OUT and adds kernels.csv in the figures' columns. On a CPU
    nothing is measured, and that is no failure."""
    device = environment.detect_device(config.device)
    outcome: dict[str, Any] = {
        "sweep": config.sweep,
        "output": config.output,
        "device": device,
        "rows": 0,
        "skipped": 0,
    }
    if device != "cuda":
        told = f"need a CUDA device, this is a {device}; on one: python -m {BENCHES[0]}"
        print(f"skipped: kernels: {told}", file=sys.stderr)
        return outcome | {"skipped": 1}
    out = ROOT / config.output
    out.mkdir(parents=True, exist_ok=True)
    for bench in BENCHES:
        done = subprocess.run(
            [sys.executable, "-m", bench], cwd=ROOT, env=dict(os.environ, OUT=str(out)), stdout=sys.stderr
        )
        if done.returncode:
            raise UserError(f"python -m {bench} ended with exit code {done.returncode}; what it printed says why")
    captured = environment.capture(device, config.threads, {}, environment.git_commit())
    environment.write(out / "environment.json", captured)
    table = pd.concat([kernels_table(pd.read_csv(out / "kernel.csv")), pd.read_csv(out / "comparison.csv")])
    write_csv(out / "kernels.csv", table)
    return outcome | {"rows": len(table)}


def kernels_table(bench: pd.DataFrame) -> pd.DataFrame:
    """The bench's kernel.csv in the columns of figures/results.py: Specter's two launches of a MoE layer, in the
    fastest form at each number of tokens."""
    own = bench[bench["form"].isin(FUSED_FORMS) & bench["us"].notna()].sort_values("us")
    best = own.drop_duplicates(["model", "tokens"]).sort_values(["model", "tokens"])
    return pd.DataFrame(
        {
            "shape": "moe " + best["model"],
            "tokens": best["tokens"],
            "backend": "specter",
            "variant": "fused",
            "launches": 2,
            "us": best["us"],
            "tb_per_s": best["tb_per_s"],
            "share_of_ceiling": best["share_of_ceiling"],
            "device": "cuda",
            "weights": "synthetic",
            "reason": "",
        }
    )
