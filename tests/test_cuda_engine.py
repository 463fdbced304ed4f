"""The CUDA engine: on a GPU with the reference models, and slowly, on the CPU, through Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("deepseek_v2_mini", "qwen2_moe_mini", "phimoe_mini")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("model", MODELS)
def test_speculation_on_the_device_equals_its_plain_target(model: str) -> None:
    command = [
        sys.executable, "scripts/check_exactness.py", "--model", f"reference/{model}", "--device", "cuda",
        "--depths", "1,8", "--slots", "1,4", "--batches", "1,3", "--tokens", "24", "--prompts", "3",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["mismatches"] == 0 and report["tokens"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("family", "depth", "slots", "batch"), [("qwen2_moe", 2, 1, 2), ("deepseek_v2", 2, 2, 1)])
def test_interpreted_kernels_give_the_cpu_engines_tokens(
    family: str, depth: int, slots: int, batch: int, tmp_path: Path
) -> None:
    """Float32 weights, so that both engines round alike often enough to agree token by token."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable, "-W", "ignore", str(Path(__file__).with_name("interpreted_engine.py")),
        family, str(depth), str(slots), str(batch), str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["device"] == report["plain"] == report["cpu"]
    assert report["misses"] > 0 and report["graphs"] > 0


@pytest.mark.slow
def test_interpreted_kernels_verify_row_by_row_and_half_by_half(tmp_path: Path) -> None:
    """Plans for some rows of a pass, each with launches of its own, give the tokens of the plain target."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    cases = ("verify=tokenwise, B 2", "verify=microbatches, B 2", "shared_kv off, B 1")
    script = str(Path(__file__).with_name("interpreted_switches.py"))
    command = [sys.executable, "-W", "ignore", script, "qwen2_moe", str(tmp_path), *cases]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    assert len(rows) == len(cases) and all(row["tokens"] for row in rows)
    assert not any(row["mismatches"] or row["failed"] for row in rows), done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("model", MODELS)
def test_every_switch_and_baseline_on_the_device_equals_the_plain_target(model: str) -> None:
    command = [sys.executable, "-m", "scripts.gpu.check_switches", "--model", f"reference/{model}", "--tokens", "24"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
