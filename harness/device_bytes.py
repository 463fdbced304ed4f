"""Memory in use on the card that this process sees, by NVML, without touching CUDA."""

from __future__ import annotations

import os
from typing import NamedTuple

from harness.gpu_guard import gpu_handle


class DeviceBytes(NamedTuple):
    """Of the whole card, whoever uses it."""

    used: int
    total: int


def device_bytes() -> DeviceBytes:
    """Of the first card in CUDA_VISIBLE_DEVICES."""
    import pynvml as nvml

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    nvml.nvmlInit()
    try:
        found = nvml.nvmlDeviceGetMemoryInfo(gpu_handle(nvml, visible or None))
        return DeviceBytes(int(found.used), int(found.total))
    finally:
        nvml.nvmlShutdown()
