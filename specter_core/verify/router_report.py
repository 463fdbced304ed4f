"""The host's side of `report_ids`: waiting for a router's choice in mapped memory."""

from __future__ import annotations

from torch import Tensor

from specter_core.device_runtime import DeviceRuntime
from specter_core.memory.native import library

_TIMEOUT_NS = 20_000_000_000


def wait_for_router(flag: Tensor, j: int, runtime: DeviceRuntime) -> None:
    """Returns when flag int32 [≥ 1], mapped, has become 1: MoE layer j's ids are there. RuntimeError after 20 s, or the
    device's own error if there is one.
    """
    if library().wait_flag(flag.data_ptr(), 1, _TIMEOUT_NS):
        runtime.synchronize()  # raises the device's own error
        raise RuntimeError(f"no router output of MoE layer {j} within {_TIMEOUT_NS / 1e9:.0f} s")
