"""The host-to-device link as the engine sees it: one software queue, demands before prefetches."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from specter_core.types import ExpertKey


class Priority(Enum):
    """DEMAND: the target's router asked for it. PREFETCH: the planner did."""

    DEMAND = 0
    PREFETCH = 1


class TransferState(Enum):
    QUEUED = "queued"
    ISSUED = "issued"
    DONE = "done"
    CANCELLED = "cancelled"


@dataclass(slots=True, eq=False)
class Transfer:
    """One expert on its way into a slot. `priority` is the present one; queued_ns: perf_counter_ns."""

    key: ExpertKey
    slot: int
    bytes: int
    priority: Priority
    state: TransferState = TransferState.QUEUED
    queued_ns: int = 0
    issued_as: Priority | None = None
    sent_bytes: int = 0
    arrived_bytes: int = 0
    order: int = 0


class BusyInterval(NamedTuple):
    """One piece on the link."""

    start_ns: int
    end_ns: int
    key: ExpertKey
    priority: Priority
    bytes: int


@dataclass(slots=True)
class LinkCounters:
    """Totals since the link was made. `intervals` is filled only when the link records them (trace).
    d2h_bytes: moved the other way, by a system that writes experts back.
    """

    bytes: int = 0
    d2h_bytes: int = 0
    transfers: int = 0
    cancelled: int = 0
    promoted: int = 0
    busy_ns: int = 0
    intervals: list[BusyInterval] = field(default_factory=list)


class Link(Protocol):
    """Moves store entries into slots. Calls come from one thread; errors of the transport are raised by the
    next call.
    """

    @property
    def counters(self) -> LinkCounters: ...

    @property
    def entry_bytes(self) -> int:
        """Bytes of one expert's transfer."""
        ...

    @property
    def rate_bytes_per_s(self) -> float:
        """Standalone rate: what one busy link moves with nothing else running."""
        ...

    def submit(self, key: ExpertKey, slot: int, priority: Priority) -> Transfer: ...

    def submit_all(self, loads: Sequence[tuple[ExpertKey, int]], priority: Priority) -> list[Transfer]:
        """Several at once, (expert, slot) each, in this order."""
        ...

    def promote(self, transfer: Transfer) -> None:
        """PREFETCH -> DEMAND for what has not been sent yet; no effect on a demand or a finished transfer."""
        ...

    def reorder(self, transfers: Sequence[Transfer]) -> None:
        """Give the still queued prefetches among `transfers` this order."""
        ...

    def cancel(self, transfer: Transfer) -> bool:
        """True when the transfer was still queued: no byte of it has moved or will."""
        ...

    def done(self, transfer: Transfer) -> bool: ...

    def queued(self, transfers: Iterable[Transfer]) -> list[Transfer]:
        """Those of which nothing has moved yet: `cancel` would take them back, unless they are issued before it."""
        ...

    def arrivals(self, transfers: Collection[Transfer]) -> list[Transfer]:
        """Those that have arrived since the last call; `transfers` are all whose arrival was not reported yet."""
        ...

    def wait(self, transfer: Transfer) -> int:
        """Block until the expert is in its slot and its trailer was checked; returns the nanoseconds spent
        waiting.
        """
        ...

    def idle(self) -> bool: ...

    def drain(self) -> None: ...

    def close(self) -> None: ...
