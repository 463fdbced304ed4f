"""What the engine's CUDA parts need of a device besides kernels: graphs, events, mapped host memory, the driver."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from specter_core.memory.host_registration import HostRegistration
from specter_core.memory.pin_limit import PinLimit

DRIVER = "libcuda.so.1"


def compact_allocator() -> None:
    """Before the first tensor: what loading a model takes in passing can be given back page by page, and does not stay
    as holes in half-used segments, which a budget would have to pay for.
    """
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection inside: one that finds a former engine's graphs would destroy them, and with them a capture
    that is under way, which the driver then invalidates.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class DeviceEvent(Protocol):
    def record(self) -> None:
        """Behind everything on the compute stream so far."""
        ...

    @property
    def handle(self) -> int:
        """CUevent, valid once recorded."""
        ...


class DeviceTimer(Protocol):
    """An event that knows its time."""

    def record(self) -> None:
        """Behind everything on the compute stream so far."""
        ...

    def ms_after(self, other: DeviceTimer) -> float:
        """Device time since `other`; both have passed."""
        ...


class DeviceRuntime(Protocol):
    """One compute stream: the calling thread's current one."""

    @property
    def driver(self) -> str:
        """Path of the driver library, for native code."""
        ...

    @property
    def pdl(self) -> bool:
        """Whether programmatic dependent launches work here: passes of one row gain, those of more rows lose by them
        (results/h200/kernels).
        """
        ...

    @property
    def context(self) -> int: ...

    @property
    def stream(self) -> int: ...

    def copy_stream(self) -> int:
        """A new stream beside the compute stream."""
        ...

    def register(self, segment: Tensor) -> None:
        """Page-lock a host segment, once, until `close`."""
        ...

    def close(self) -> None:
        """Unlock what was registered. No copy may be under way. Idempotent."""
        ...

    def mapped(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Zeroed host memory that kernels read and write in place."""
        ...

    def event(self) -> DeviceEvent: ...

    def timer(self) -> DeviceTimer: ...

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """The launches of `run` as one graph, to be replayed. `run` was called at least once before."""
        ...

    def synchronize(self) -> None:
        """Host waits for the compute stream."""
        ...


class _Event:
    def __init__(self) -> None:
        self._event = torch.cuda.Event()

    def record(self) -> None:
        self._event.record()

    @property
    def handle(self) -> int:
        return int(self._event.cuda_event)


class _Timer:
    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)

    def record(self) -> None:
        self._event.record()

    def ms_after(self, other: DeviceTimer) -> float:
        assert isinstance(other, _Timer)
        return float(other._event.elapsed_time(self._event))


class CudaRuntime:
    """The current CUDA device through torch. pin_limit: how much it may page-lock; None: as the process was told."""

    driver = DRIVER

    def __init__(self, pin_limit: PinLimit | None = None) -> None:
        self.pin_limit = pin_limit or PinLimit.of_process()
        torch.cuda.init()
        torch.zeros(1, device="cuda")  # makes the context current
        found = ctypes.c_void_p()
        status = ctypes.CDLL(DRIVER).cuCtxGetCurrent(ctypes.byref(found))
        assert status == 0 and found.value, status
        self.context = int(found.value)
        self.pdl = torch.cuda.get_device_capability() >= (9, 0)
        self._streams: list[torch.cuda.Stream] = []
        self._registered: dict[int, HostRegistration] = {}
        self._locked_bytes = 0

    @property
    def stream(self) -> int:
        return int(torch.cuda.current_stream().cuda_stream)

    def copy_stream(self) -> int:
        self._streams.append(torch.cuda.Stream())
        return int(self._streams[-1].cuda_stream)

    def register(self, segment: Tensor) -> None:
        if segment.data_ptr() not in self._registered:
            self.pin_limit.check(segment.numel(), self._locked_bytes)
            self._locked_bytes += segment.numel()
            self._registered[segment.data_ptr()] = HostRegistration(segment)

    def close(self) -> None:
        for registration in self._registered.values():
            registration.close()
        self._registered.clear()
        self._locked_bytes = 0

    def mapped(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, pin_memory=True)

    def event(self) -> DeviceEvent:
        return _Event()

    def timer(self) -> DeviceTimer:
        return _Timer()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with uncollected(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run()
        return graph.replay

    def synchronize(self) -> None:
        torch.cuda.current_stream().synchronize()
