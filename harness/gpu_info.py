"""What NVML says about the GPUs of this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

SYSFS = Path("/sys/bus/pci/devices")


def gpus() -> list[dict[str, Any]]:
    """One entry per NVIDIA GPU: name, uuid, memory, driver, CUDA version of the driver, power limit, clocks in MHz
    (running, highest, set for applications), PCIe generation and width (now, highest), NUMA node. A field that
    the driver does not tell is None. Empty without a driver."""
    import pynvml as nvml

    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        return [_one(nvml, nvml.nvmlDeviceGetHandleByIndex(i)) for i in range(nvml.nvmlDeviceGetCount())]
    finally:
        nvml.nvmlShutdown()


def _one(nvml: Any, handle: Any) -> dict[str, Any]:
    def ask(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except nvml.NVMLError:
            return None

    bus = ask(nvml.nvmlDeviceGetPciInfo, handle)
    limit = ask(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    domains = {"sm": nvml.NVML_CLOCK_SM, "memory": nvml.NVML_CLOCK_MEM}
    cuda = ask(nvml.nvmlSystemGetCudaDriverVersion)
    return {
        "name": text(nvml.nvmlDeviceGetName(handle)),
        "uuid": text(ask(nvml.nvmlDeviceGetUUID, handle)),
        "memory_bytes": int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        "driver": text(nvml.nvmlSystemGetDriverVersion()),
        "cuda_driver": None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        "power_limit_w": None if limit is None else limit / 1000,
        "clocks_mhz": {
            name: {
                "now": ask(nvml.nvmlDeviceGetClockInfo, handle, domain),
                "highest": ask(nvml.nvmlDeviceGetMaxClockInfo, handle, domain),
                "applications": ask(nvml.nvmlDeviceGetApplicationsClock, handle, domain),
            }
            for name, domain in domains.items()
        },
        "pcie": {
            "generation": ask(nvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
            "width": ask(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
            "highest_generation": ask(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
            "highest_width": ask(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        },
        "numa_node": None if bus is None else numa_node(text(bus.busId) or ""),
    }


def numa_node(bus_id: str, sysfs: Path = SYSFS) -> int | None:
    """Of a PCI device (NVML's 00000000:3B:00.0 or the short form); None where the machine does not say."""
    domain, _, rest = bus_id.lower().partition(":")
    path = sysfs / f"{domain[-4:]}:{rest}" / "numa_node"
    try:
        node = int(path.read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def text(value: str | bytes | None) -> str | None:
    return value.decode() if isinstance(value, bytes) else value
