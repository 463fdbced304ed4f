#!/usr/bin/env python3
"""What this machine has for Specter, and what each missing thing disables: python3 scripts/doctor.py

One line per thing, the last line on stdout is one JSON object. Always exit code 0: nothing is an error before
someone needs it. Standard library only and Python >= 3.8, since it may run before anything is installed.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, List, Optional, Tuple  # noqa: UP035 (evaluated by Python 3.8 too)

ROOT = Path(__file__).resolve().parents[1]
LARGEST_STORE_GB = 80.5  # the experts of Phi-3.5-MoE in 16 bits
DISK_GB = 70.0  # DeepSeek-V2-Lite: the two archives and what they unpack to
CUDA_FOLDERS = ("/usr/local/cuda",)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for. found: what is there, None when it is missing or does not suffice."""

    name: str
    found: Optional[str]  # noqa: UP045
    disables: str

    def line(self) -> str:
        if self.found is not None:
            return f"  ok       {self.name:14} {self.found}"
        return f"  missing  {self.name:14} disables: {self.disables}"


def first_line(*command: str, line: int = 0) -> Optional[str]:  # noqa: UP045
    """The first (or another) line that a command prints; None when it is absent, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.decode(errors="replace").strip().splitlines()
    return lines[line % len(lines)].strip() if done.returncode == 0 and lines else None


def gb(count: float) -> str:
    return f"{count / 1e9:,.1f} GB"


def driver() -> Finding:
    query = "--query-gpu=name,memory.total,driver_version"
    found = first_line("nvidia-smi", query, "--format=csv,noheader")
    return Finding("CUDA driver", found, "device=cuda; on the CPU the reference models show behaviour only")


def toolkit() -> Finding:
    homes = [os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"), *CUDA_FOLDERS]
    places = [shutil.which("nvcc"), *(str(Path(home) / "bin" / "nvcc") for home in homes if home)]
    nvcc = next((p for p in places if p and os.access(p, os.X_OK)), None)
    found = None
    if nvcc is not None and (text := first_line(nvcc, "--version", line=-2)) is not None:
        found = f"{text}, {nvcc}"
    return Finding(
        "CUDA toolkit",
        found,
        "compiling GPTQModel's and llama.cpp's own kernels; Specter's are Triton's, which needs no toolkit",
    )


def compiler(name: str, variable: str, known: Tuple[str, ...], disables: str) -> Finding:  # noqa: UP006
    wanted = os.environ.get(variable, "").split()[:1]
    path = next(filter(None, (shutil.which(c) for c in (*wanted, *known))), None)
    return Finding(name, f"{first_line(path, '--version') or 'version unknown'}, {path}" if path else None, disables)


def python() -> Finding:
    version = platform.python_version()
    return Finding(
        "Python",
        f"{version}, {sys.executable}" if sys.version_info >= (3, 11) else None,
        f"everything but the download tools (here: {version}); 3.11 is needed: make PYTHON=python3.11 …",
    )


def tool(name: str, disables: str) -> Finding:
    path = shutil.which(name)
    return Finding(name, path, disables)


def space(name: str, folder: Path, needed_gb: float, disables: str) -> Finding:
    """Free bytes of the file system that `folder` is or will be on, against what is wanted."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(str(place)).free
    enough = free >= needed_gb * 1e9
    text = f"{gb(free)} free in {place}"
    return Finding(name, text if enough else None, f"{disables} ({text}, {needed_gb:g} GB are wanted)")


def shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    disables = (
        "keeping all experts in shared memory; a file in the temporary folder takes its place, maybe on a slow disk"
    )
    if not (folder.is_dir() and os.access(str(folder), os.W_OK)):
        return Finding("/dev/shm", None, disables)
    free = shutil.disk_usage(str(folder)).free
    if free < LARGEST_STORE_GB * 1e9:
        sizes = f"DeepSeek-V2-Lite 28.8, Qwen1.5-MoE 24.9, Phi-3.5-MoE {LARGEST_STORE_GB} GB"
        return Finding("/dev/shm", None, f"{disables} ({gb(free)} free; {sizes})")
    return Finding("/dev/shm", f"{gb(free)} free", disables)


def memory() -> Finding:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return Finding("host memory", None, "its size is not known here; offloaded experts live in it")
    enough = total >= (LARGEST_STORE_GB + 8) * 1e9
    return Finding(
        "host memory",
        gb(total) if enough else None,
        f"full-size models whose experts exceed it ({gb(total)} here; the paper's platform has 256 GB)",
    )


def workspace() -> Path:
    return Path(os.environ.get("SPECTER_WORK") or ROOT / "downloads")


def checks() -> List[Callable[[], Finding]]:  # noqa: UP006
    cxx = "building GPTQModel's extensions (quantize_draft.py --method gptq)"
    cc = "device=cuda; the link's copy worker and Triton's launchers are compiled at first use"
    return [
        driver,
        toolkit,
        lambda: compiler("C++ compiler", "CXX", ("c++", "g++", "clang++"), cxx),
        lambda: compiler("C compiler", "CC", ("cc", "gcc", "clang"), cc),
        python,
        lambda: tool("curl", "fetching the release's files from the command line; a browser does as well"),
        lambda: tool("tar", "extracting the release's archives"),
        lambda: tool("unzip", "extracting GPQA; Specter reads the encrypted archive itself"),
        lambda: tool("sha256sum", "verifying the release, make verify-assets, and wheels in install.sh"),
        lambda: tool("git", "naming the commit in every row, building a release"),
        lambda: space("free space", workspace(), DISK_GB, "downloading and extracting DeepSeek-V2-Lite"),
        shared_memory,
        memory,
    ]


def main() -> int:
    findings = [check() for check in checks()]
    for finding in findings:
        print(finding.line(), file=sys.stderr)
    missing = [f.name for f in findings if f.found is None]
    state = "nothing is missing" if not missing else "the rest works, and make main-run needs none of what is missing"
    if any(name in missing for name in ("Python",)):
        state = "make main-run needs Python 3.11 or newer"
    print(state, file=sys.stderr)
    print(json.dumps({"ok": [f.name for f in findings if f.found is not None], "missing": missing}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
