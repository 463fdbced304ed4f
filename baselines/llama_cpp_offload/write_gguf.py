"""Writes the GGUF file of a model in a process of its own, so that the one that measures has never touched the GPU.

python -m baselines.llama_cpp_offload.write_gguf TARGET DTYPE DEVICE THREADS < pickled ModelSpec
"""

from __future__ import annotations

import fcntl
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

from baselines.llama_cpp_offload.gguf_file import write_gguf
from baselines.llama_cpp_offload.gguf_plan import gguf_plan
from baselines.llama_cpp_offload.gguf_sources import source
from harness.catalogue import ROOT
from harness.system import ModelSpec
from specter_core.errors import UserError


def gguf_file(model: ModelSpec, folder: Path, dtype: torch.dtype, device: str, threads: int) -> Path:
    """The model's GGUF file, written unless it is there or another process is writing it. UserError with the last line
    of what went wrong."""
    kind = str(dtype).removeprefix("torch.")
    path = folder / f"{model.name}-{model.weights_hash.strip('~')}-{kind}.gguf"
    folder.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _write(model, path, kind, device, threads)
    return path


def _write(model: ModelSpec, path: Path, kind: str, device: str, threads: int) -> None:
    command = [sys.executable, "-m", "baselines.llama_cpp_offload.write_gguf", str(path), kind, device, str(threads)]
    sent = pickle.dumps(replace(model, store=None))
    done = subprocess.run(command, cwd=ROOT, input=sent, capture_output=True)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise UserError(f"llama_cpp: {path.name} could not be written: {lines[-1][:300]}")


def main(target: str, kind: str, device: str, threads: str) -> None:
    model: ModelSpec = pickle.load(sys.stdin.buffer)
    config, raw, tensors = source(model, device)
    size = write_gguf(Path(target), gguf_plan(config, raw, getattr(torch, kind)), tensors, int(threads))
    print(f"{target}: {size / 1e9:.2f} GB")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:5])
    except UserError as error:
        sys.exit(str(error))
