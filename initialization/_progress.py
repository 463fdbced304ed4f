"""What the user sees while files arrive: a bar on a terminal, a line now and then in a log. Python >= 3.8."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from typing import TextIO

RATE_WINDOW_S = 15.0
BAR_CELLS = 24


def human_bytes(count: float) -> str:
    """Decimal units (GB = 1e9), three significant digits."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}" if count < 1000 * scale else f"{count / scale:,.0f} {unit}"
    return f"{count:.0f} B"


def human_seconds(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Progress:
    """Thread-safe counters of one run and their rendering. The rate counts bytes from the network alone."""

    def __init__(self, stream: TextIO | None = None, log_every_s: float = 10.0) -> None:
        self.received_bytes = 0
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._interval_s = 0.2 if self._terminal else log_every_s
        self._lock = threading.Lock()
        self._totals: dict[str, int] = {}
        self._done: dict[str, int] = {}
        self._finished = 0
        self._samples: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])
        self._last_draw = time.monotonic()
        self._drawn = False

    def expect(self, label: str, total_bytes: int | None) -> None:
        """Announces a file; an unknown size (None) is learnt from the server's answer."""
        with self._lock:
            self._totals[label] = total_bytes or 0
            self._done.setdefault(label, 0)

    def at(self, label: str, done_bytes: int) -> None:
        """`done_bytes` of this file are on disk now (fewer than before after a restart)."""
        with self._lock:
            self._done[label] = done_bytes
            self._totals[label] = max(self._totals.get(label, 0), done_bytes)

    def received(self, count: int) -> None:
        with self._lock:
            self.received_bytes += count

    def finish(self, label: str) -> None:
        with self._lock:
            self._finished += 1
            self._done[label] = self._totals.get(label, 0)

    def note(self, text: str) -> None:
        """One line that stays, above the bar."""
        with self._lock:
            self._clear()
            print(text, file=self._stream, flush=True)

    def line(self, now_s: float) -> str:
        """The bar as text: share, bytes, MB/s over the last 15 s, time left, files."""
        with self._lock:
            self._samples.append((now_s, self.received_bytes))
            while len(self._samples) > 2 and now_s - self._samples[0][0] > RATE_WINDOW_S:
                self._samples.popleft()
            then_s, then_bytes = self._samples[0]
            done, total = sum(self._done.values()), sum(self._totals.values())
            rate = (self.received_bytes - then_bytes) / (now_s - then_s) if now_s > then_s else 0.0
            share = done / total if total else 0.0
            cells = int(BAR_CELLS * share)
            eta = human_seconds((total - done) / rate) if rate > 0 else "unknown"
            bar = "#" * cells + "." * (BAR_CELLS - cells)
            return (
                f"[{bar}] {share:4.0%}  {human_bytes(done)} of {human_bytes(total)}"
                f"  {rate / 1e6:.1f} MB/s  ETA {eta}  {self._finished}/{len(self._totals)} files"
            )

    def draw(self, force: bool = False) -> None:
        """Redraws when it is time to; `force` also draws the last state and ends the line."""
        now_s = time.monotonic()
        if not force and now_s - self._last_draw < self._interval_s:
            return
        self._last_draw = now_s
        text = self.line(now_s)
        with self._lock:
            self._clear()
            self._stream.write(text if self._terminal and not force else text + "\n")
            self._stream.flush()
            self._drawn = self._terminal and not force

    def _clear(self) -> None:
        if self._drawn:
            self._stream.write("\r\x1b[2K")
            self._drawn = False
