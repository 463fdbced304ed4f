"""Spans of the compute stream in device time, for the trace: recorded as event pairs, read after the window."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from specter_core.device_runtime import DeviceRuntime, DeviceTimer


class DeviceSpan(NamedTuple):
    """Times in perf_counter_ns."""

    name: str
    start_ns: int
    end_ns: int
    args: dict[str, Any]


class DeviceTimeline:
    """Spans between work on the compute stream. Device and host clock are aligned by one synchronised event, anew
    after each `resolve`, so that they cannot drift apart.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._free: list[DeviceTimer] = []
        self._open: list[tuple[str, DeviceTimer, DeviceTimer, dict[str, Any]]] = []
        self._anchor = runtime.timer()
        self._align()

    @contextmanager
    def span(self, name: str, **args: Any) -> Iterator[dict[str, Any]]:
        """Around launches on the compute stream: from the end of the work before to the end of theirs."""
        start, end = self._timer(), self._timer()
        start.record()
        try:
            yield args
        finally:
            end.record()
            self._open.append((name, start, end, args))

    def resolve(self) -> list[DeviceSpan]:
        """Waits for the compute stream; the spans since the last call."""
        self._runtime.synchronize()
        found = []
        for name, start, end, args in self._open:
            found.append(DeviceSpan(name, self._host_ns(start), self._host_ns(end), args))
            self._free += (start, end)
        self._open.clear()
        self._align()
        return found

    def _host_ns(self, timer: DeviceTimer) -> int:
        return self._anchor_ns + round(timer.ms_after(self._anchor) * 1e6)

    def _timer(self) -> DeviceTimer:
        return self._free.pop() if self._free else self._runtime.timer()

    def _align(self) -> None:
        """The stream is idle, so the event passes at once: half way between asking and seeing it."""
        self._runtime.synchronize()
        before_ns = time.perf_counter_ns()
        self._anchor.record()
        self._runtime.synchronize()
        self._anchor_ns = (before_ns + time.perf_counter_ns()) // 2
