"""`all`: train every model at the same time, one process each, and pack the folders for the way home."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import torch

from .settings import model_names

PACKING_S = 10.0


def _follow(process: subprocess.Popen[str], log: list[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        log.append(line)
        print(line, end="", flush=True)


def train_all(args: argparse.Namespace) -> int:
    """Returns 1 when a model failed; the others are packed all the same.

    Processes share the GPUs that are visible, round robin. Each stops by itself when the minutes are over.
    """
    started_s = time.monotonic()
    names = args.configs or model_names()
    args.output.mkdir(parents=True, exist_ok=True)
    models = args.work / "models"
    models.mkdir(parents=True, exist_ok=True)
    script = Path(sys.argv[0]).resolve()
    gpus = torch.cuda.device_count()
    seconds = args.minutes_total * 60
    minutes = max(0.5 * seconds, seconds - PACKING_S) / 60
    running, logs = [], []
    for i, name in enumerate(names):
        command = [sys.executable, str(script), "train", "--config", name, "--work", str(args.work)]
        command += ["--output", str(models / name), "--minutes", f"{minutes:.4f}"]
        for flag in ("device", "batch_rows", "sequence_tokens"):
            if getattr(args, flag) is not None:
                command += [f"--{flag.replace('_', '-')}", str(getattr(args, flag))]
        command += ["--no-compile"] if args.no_compile else []
        env = {**os.environ, "PYTHONUNBUFFERED": "1"}
        env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // (2 * len(names)))))
        env.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, (os.cpu_count() or 1) // len(names))))
        env["REFERENCE_STARTED_AGO_S"] = f"{time.monotonic() - started_s:.2f}"
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = str(i % gpus)
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        log: list[str] = []
        thread = threading.Thread(target=_follow, args=(process, log), daemon=True)
        thread.start()
        running.append((name, process, thread))
        logs.append(log)
    for _, process, thread in running:
        process.wait()
        thread.join()
    (args.output / "train.log").write_text("".join(line for log in logs for line in log))
    reports, failed = [], []
    for name, process, _ in running:
        if process.returncode:
            failed.append(name)
            continue
        reports.append(json.loads((models / f"{name}.json").read_text()))
        with tarfile.open(args.output / f"{name}.tar", "w") as tar:
            tar.add(models / name, arcname=name)
    (args.output / "report.json").write_text(json.dumps(reports, indent=1) + "\n")
    columns = ("model", "steps", "M tokens", "perplexity", "bits/byte", "load", "bytes", "with draft")
    print("\n" + "".join(f"{c:>12}" if i else f"{c:18}" for i, c in enumerate(columns)))
    for r in reports:
        held, sizes = r["held_out"], r["sizes"]
        cells = (
            str(r["steps"]),
            f"{r['tokens'] / 1e6:.1f}",
            f"{held['perplexity']:.2f}",
            f"{held['bits_per_byte']:.3f}",
            f"{held['load_min']:.2f}-{held['load_max']:.2f}",
            str(sizes["files_bytes"]),
            str(sizes["total_bytes"]),
        )
        print(f"{r['name']:18}" + "".join(f"{c:>12}" for c in cells))
    if failed:
        print(f"failed: {', '.join(failed)} (see train.log)")
    print(f"{time.monotonic() - started_s:.0f} s in all")
    return 1 if failed else 0
