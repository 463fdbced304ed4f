"""Runs a kernel check in a process of its own: Triton decides once whether it interprets or compiles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def run(script: str, mode: str, *arguments: str) -> dict[str, Any]:
    """The JSON object on the last line of `script mode arguments`; a mode that begins with "compile" compiles."""
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths}
    env.pop("TRITON_INTERPRET", None)
    if not mode.startswith("compile"):
        env["TRITON_INTERPRET"] = "1"
    command = [sys.executable, script, mode, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
