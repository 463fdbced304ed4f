"""The host-to-device rate of this machine's link, in a process of its own: python -m harness.link_probe

Pinned host memory, pieces of 256 MiB for about half a second after a warm-up. The last line on stdout is one JSON
object; without a CUDA device its rate is null.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

from harness.catalogue import ROOT

PIECE_BYTES, LEAST_S, TIMEOUT_S = 1 << 28, 0.5, 120


def measured_gb_per_s() -> float | None:
    """GB/s (1e9) from a fresh process, so that this one holds no CUDA context; None where it cannot be measured."""
    command = [sys.executable, "-m", "harness.link_probe"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
        rate = json.loads(done.stdout.splitlines()[-1])["h2d_gb_per_s"]
    except (subprocess.SubprocessError, OSError, ValueError, IndexError, KeyError):
        return None
    return None if rate is None else float(rate)


def probe() -> float | None:
    import torch

    if not torch.cuda.is_available():
        return None
    host = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    device.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    start, pieces = time.perf_counter(), 0
    while time.perf_counter() - start < LEAST_S:
        for _ in range(8):
            device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        pieces += 8
    return pieces * PIECE_BYTES / (time.perf_counter() - start) / 1e9


if __name__ == "__main__":
    print(json.dumps({"h2d_gb_per_s": probe()}))
