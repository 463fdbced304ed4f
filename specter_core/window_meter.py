"""What a window moved over the link: differences of running counters between its begin and its end."""

from __future__ import annotations

import time

from specter_core.memory.expert_loader import ExpertLoader
from specter_core.types import WindowStats


class WindowMeter:
    """begin, optionally open_link at b_1, end; reads counters only, so it costs no synchronisation."""

    def __init__(self, loader: ExpertLoader) -> None:
        self._loader = loader

    def begin(self) -> None:
        counters = self._loader.link.counters
        self._bytes, self._busy_ns, self._d2h_bytes = counters.bytes, counters.busy_ns, counters.d2h_bytes
        self._used_bytes = self._loader.counters.used_bytes
        self._open_ns: int | None = None

    def open_link(self) -> None:
        """The first load of the window may be submitted from now on."""
        self._open_ns = self._open_ns or time.perf_counter_ns()

    def end(self, stats: WindowStats) -> None:
        counters = self._loader.link.counters
        stats.h2d_bytes = counters.bytes - self._bytes
        stats.d2h_bytes = counters.d2h_bytes - self._d2h_bytes
        stats.h2d_bytes_used = self._loader.counters.used_bytes - self._used_bytes
        stats.link_busy_ms = (counters.busy_ns - self._busy_ns) / 1e6
        if self._open_ns is not None:
            stats.link_span_ms = (time.perf_counter_ns() - self._open_ns) / 1e6
