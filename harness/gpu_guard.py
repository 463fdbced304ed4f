"""Refuses to measure on a card that somebody else is using."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import psutil

from specter_core.errors import UserError

PATIENCE_S = 6.0
"""How long a process that is just ending may still be listed."""


class GpuProcess(NamedTuple):
    """A process with memory on a card; used_bytes None where the driver does not tell."""

    pid: int
    used_bytes: int | None


def gpu_handle(nvml: Any, gpu: str | None) -> Any:
    """The card that CUDA_VISIBLE_DEVICES=gpu selects (an index or a UUID); None: the first. After nvmlInit."""
    if gpu is not None and not gpu.isdigit():
        return nvml.nvmlDeviceGetHandleByUUID(gpu)
    return nvml.nvmlDeviceGetHandleByIndex(int(gpu or 0))


def gpu_processes(gpu: str | None) -> list[GpuProcess]:
    """Who has memory on the card, as far as NVML tells; empty without NVML."""
    import pynvml as nvml

    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        found = nvml.nvmlDeviceGetComputeRunningProcesses(gpu_handle(nvml, gpu))
    except nvml.NVMLError:
        return []
    finally:
        nvml.nvmlShutdown()
    return [GpuProcess(int(p.pid), p.usedGpuMemory) for p in found]


def check_free(
    gpu: str | None,
    *,
    own: Collection[int] | None = None,
    processes: Callable[[str | None], list[GpuProcess]] = gpu_processes,
    patience_s: float = PATIENCE_S,
) -> None:
    """UserError naming pid and MiB when a process that is not ours has memory on the card, after waiting a little for
    one that ends. own: pids that may; default: this process and its children."""
    deadline = time.monotonic() + patience_s
    while True:
        ours = set(own) if own is not None else family()
        others = [p for p in processes(gpu) if p.pid not in ours]
        if not others:
            return
        if time.monotonic() >= deadline:
            break
        time.sleep(0.2)
    first = others[0]
    used = "an unknown amount" if first.used_bytes is None else f"{first.used_bytes / 2**20:.0f} MiB"
    raise UserError(
        f"GPU {gpu or 0} is in use by process {first.pid} ({used}), so nothing measured on it would be true; "
        "end it, or choose another card with CUDA_VISIBLE_DEVICES"
    )


def wait_for_rest(
    used_bytes: Callable[[], int], *, still_s: float = 1.0, patience_s: float = 10.0, pause_s: float = 0.1
) -> int:
    """The memory in use once it has not fallen for still_s, or after patience_s: a process that was just ended holds
    its memory a little longer, which must not count as the level that the next one starts from.
    """
    level, since, deadline = used_bytes(), time.monotonic(), time.monotonic() + patience_s
    while time.monotonic() - since < still_s and time.monotonic() < deadline:
        time.sleep(pause_s)
        now = used_bytes()
        if now < level:
            since = time.monotonic()
        level = now
    return level


def family() -> set[int]:
    """This process and everything that it started."""
    return {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
