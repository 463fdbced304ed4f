"""Timeline of compute and link, written as a Chrome trace (chrome://tracing, ui.perfetto.dev)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from specter_core.device_timeline import DeviceTimeline
from specter_core.memory.link import BusyInterval

COMPUTE = "compute"
LINK = "link"
HOST = "host"
JOINED_NS = 5_000


class Event(NamedTuple):
    """One interval; times in perf_counter_ns."""

    name: str
    track: str
    start_ns: int
    end_ns: int
    args: dict[str, Any]


class Trace:
    """Collects events. A disabled trace costs one attribute test per span.

    device: the compute stream's own clock, where computation runs apart from the host; what the host does then lies
    on a track of its own.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.events: list[Event] = []
        self.device: DeviceTimeline | None = None

    def add(self, name: str, track: str, start_ns: int, end_ns: int, **args: Any) -> None:
        if self.enabled:
            self.events.append(Event(name, track, start_ns, end_ns, args))

    def span(self, name: str, **args: Any) -> AbstractContextManager[dict[str, Any]]:
        """Records the host time spent inside the block, which may add to what it is given: the event's args."""
        return self._recorded(name, args) if self.enabled else nullcontext(args)

    @contextmanager
    def _recorded(self, name: str, args: dict[str, Any]) -> Iterator[dict[str, Any]]:
        track = COMPUTE if self.device is None else HOST
        start = time.perf_counter_ns()
        try:
            yield args
        finally:
            self.events.append(Event(name, track, start, time.perf_counter_ns(), args))

    def compute(self, name: str, **args: Any) -> AbstractContextManager[dict[str, Any]]:
        """Records the time that the block's computation takes: on a device between events of its stream."""
        if self.enabled and self.device is not None:
            return self.device.span(name, **args)
        return self.span(name, **args)

    def on_device(self, name: str, **args: Any) -> AbstractContextManager[dict[str, Any]]:
        """Records what the block puts on the compute stream; nothing where the host computes."""
        if self.enabled and self.device is not None:
            return self.device.span(name, **args)
        return nullcontext(args)

    def settle(self) -> None:
        """After a window: takes over what was recorded on the device, waiting for it."""
        if self.enabled and self.device is not None:
            self.events += [Event(s.name, COMPUTE, s.start_ns, s.end_ns, s.args) for s in self.device.resolve()]

    def add_link(self, intervals: Iterable[BusyInterval]) -> None:
        """What a link has recorded, on its track: layer, expert, bytes, and why it was sent. Pieces of one expert that
        follow each other are one event."""
        for i in joined(intervals):
            why = i.priority.name.lower()
            args = {"priority": why, "layer": i.key.layer, "expert": i.key.expert, "bytes": i.bytes}
            self.add(f"{why} {i.key.layer}.{i.key.expert}", LINK, i.start_ns, i.end_ns, **args)

    def write(self, path: Path, **metadata: Any) -> None:
        """Writes {"traceEvents": […], "otherData": metadata}; complete ("X") events, microseconds from the first."""
        origin = min((e.start_ns for e in self.events), default=0)
        tracks = list(dict.fromkeys([COMPUTE, LINK, *(e.track for e in self.events)]))
        rows: list[dict[str, Any]] = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": i, "args": {"name": t}} for i, t in enumerate(tracks)
        ]
        for e in sorted(self.events, key=lambda e: e.start_ns):
            rows.append(
                {
                    "name": e.name,
                    "ph": "X",
                    "pid": 0,
                    "tid": tracks.index(e.track),
                    "ts": round((e.start_ns - origin) / 1e3, 2),
                    "dur": round((e.end_ns - e.start_ns) / 1e3, 2),
                    "args": e.args,
                }
            )
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(json.dumps({"traceEvents": rows, "otherData": metadata}, separators=(",", ":")))
        temporary.replace(path)


def joined(intervals: Iterable[BusyInterval]) -> Iterator[BusyInterval]:
    """Successive pieces of the same transfer, at most 5 µs apart, as one."""
    last: BusyInterval | None = None
    for piece in intervals:
        if last is not None and piece[2:4] == last[2:4] and piece.start_ns - last.end_ns <= JOINED_NS:
            last = last._replace(end_ns=piece.end_ns, bytes=last.bytes + piece.bytes)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last
