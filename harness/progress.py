"""What a person sees on stderr while a run goes on: a bar with ETA on a terminal, a line per cell group
elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class RunProgress:
    """Counts requests. Nothing is printed while a request is measured except the bar's own refresh (parent
    side)."""

    def __init__(self, total: int, console: Console | None = None) -> None:
        self.console = console or Console(file=sys.stderr, soft_wrap=True)
        self._total, self._done = total, 0
        self._start = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=self.console,
            disable=not self.console.is_terminal,
            refresh_per_second=2,
        )
        self._task = self._bar.add_task("starting", total=total)

    def __enter__(self) -> RunProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begin(self, what: str) -> None:
        """A cell group starts."""
        self._bar.update(self._task, description=what)
        if not self.console.is_terminal:
            self.notice(f"[{self._done}/{self._total}] {what}{self._eta()}")

    def advance(self, requests: int) -> None:
        self._done += requests
        self._bar.advance(self._task, requests)

    def notice(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)

    def _eta(self) -> str:
        if not self._done:
            return ""
        left = (time.monotonic() - self._start) / self._done * (self._total - self._done)
        return f" (ETA {int(left) // 60}:{int(left) % 60:02d})"
