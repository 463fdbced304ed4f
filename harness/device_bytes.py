"""Memory in use on the card that this process sees, of everybody or of one process, by NVML, without touching CUDA."""

from __future__ import annotations

import os
from typing import NamedTuple

import psutil

from harness.gpu_guard import gpu_handle, gpu_processes


class DeviceBytes(NamedTuple):
    """Of the whole card, whoever uses it."""

    used: int
    total: int


def device_bytes() -> DeviceBytes:
    """Of the first card in CUDA_VISIBLE_DEVICES."""
    import pynvml as nvml

    nvml.nvmlInit()
    try:
        found = nvml.nvmlDeviceGetMemoryInfo(gpu_handle(nvml, visible_gpu()))
        return DeviceBytes(int(found.used), int(found.total))
    finally:
        nvml.nvmlShutdown()


def process_bytes(pid: int) -> int | None:
    """Of a process and everything that it started; None where the driver does not tell."""
    try:
        family = {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    except psutil.NoSuchProcess:
        return None
    found = [p.used_bytes for p in gpu_processes(visible_gpu()) if p.pid in family]
    return None if not found or None in found else sum(b for b in found if b is not None)


def visible_gpu() -> str | None:
    """The first card in CUDA_VISIBLE_DEVICES."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or None
