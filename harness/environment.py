"""What a row was measured on: packages, CPU, GPU, memory, code version. Written beside the records."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from harness.catalogue import ROOT
from harness.gpu_info import gpus
from harness.link_probe import measured_gb_per_s
from specter_core.errors import UserError

NVIDIA_DRIVER = Path("/proc/driver/nvidia")


def git_commit(root: Path = ROOT) -> str:
    """Short commit, "-dirty" appended when tracked files differ from it; "unknown" outside a checkout.

    SPECTER_COMMIT states it where the source came without its history. The release's source has no repository around
    it: its SOURCE_COMMIT names the commit that it was made from.
    """
    if stated := os.environ.get("SPECTER_COMMIT"):
        return stated
    released = root / "SOURCE_COMMIT"
    if released.is_file():
        return released.read_text(encoding="utf-8").strip()[:12]
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        return head + ("-dirty" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def detect_device(asked: str) -> str:
    """ "auto" -> "cuda" where a GPU and a torch built for it are here, else "cpu"."""
    if asked != "auto":
        return asked
    return "cuda" if gpus() and "+cpu" not in metadata.version("torch") else "cpu"


def check_device(device: str) -> None:
    """UserError for a run on "cuda" where torch is built without it, or no GPU is in sight."""
    if device != "cuda":
        return
    torch = metadata.version("torch")
    if "+cpu" in torch:
        raise UserError(f"device=cuda, but torch {torch} is built without CUDA; install one with it or use device=cpu")
    if not gpus() and not NVIDIA_DRIVER.exists():
        raise UserError("device=cuda, but 0 NVIDIA GPUs are visible; install the driver or use device=cpu")


def capture(device: str, threads: int | None, weights: Mapping[str, str], commit: str) -> dict[str, Any]:
    """JSON-ready. weights: model name -> hash. link_gb_per_s: measured (GB = 1e9), None where there is no GPU."""
    return {
        "git_commit": commit,
        "device": device,
        "cpu": {"name": _cpu_name(), "cores": os.cpu_count(), "threads": threads or os.cpu_count()},
        "numa_nodes": numa_nodes(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpus() or None,
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "link_gb_per_s": measured_gb_per_s() if device == "cuda" else None,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "packages": dict(sorted((d.name, d.version) for d in metadata.distributions() if d.name)),
        "weights": dict(weights),
    }


def write(path: Path, environment: Mapping[str, Any]) -> None:
    """Writes atomically; models that an earlier run of the same folder recorded keep their weights hash."""
    merged = dict(environment)
    if path.exists():
        merged["weights"] = {**read(path).get("weights", {}), **merged["weights"]}
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(merged, indent=1) + "\n")
    temporary.replace(path)


def read(path: Path) -> dict[str, Any]:
    """What `write` wrote. UserError for a damaged file."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}); remove it, the next run writes it anew") from error


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def numa_nodes(sysfs: Path = Path("/sys/devices/system/node")) -> dict[str, str]:
    """CPUs of each NUMA node as Linux lists them, e.g. {"0": "0-15"}; empty elsewhere."""
    lists = sorted(sysfs.glob("node[0-9]*/cpulist"), key=lambda p: int(p.parent.name[4:]))
    return {p.parent.name[4:]: p.read_text().strip() for p in lists}


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
