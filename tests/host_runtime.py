"""The CUDA engine's parts on the CPU: Triton's interpreter for kernels, a stub driver for copies, no graphs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from specter_core.memory.native import build

STUB = Path(__file__).with_name("driver_stub.c")


class HostEvent:
    """Computation runs at once, so every event has passed when it is recorded."""

    handle = 0

    def record(self) -> None:
        pass


class HostTimer:
    def __init__(self) -> None:
        self.at_ns = 0

    def record(self) -> None:
        self.at_ns = time.perf_counter_ns()

    def ms_after(self, other: HostTimer) -> float:
        return (self.at_ns - other.at_ns) / 1e6


class HostRuntime:
    """`DeviceRuntime` on host memory; kernels run when they are launched."""

    context = 1
    stream = 1
    pdl = False

    def __init__(self, folder: Path) -> None:
        self.driver = str(build(STUB, folder))
        self.captured = 0

    def copy_stream(self) -> int:
        return 2

    def register(self, segment: Tensor) -> None:
        pass

    def close(self) -> None:
        pass

    def mapped(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype)

    def event(self) -> HostEvent:
        return HostEvent()

    def timer(self) -> HostTimer:
        return HostTimer()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1
        return run

    def synchronize(self) -> None:
        pass
