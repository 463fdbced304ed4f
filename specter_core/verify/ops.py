"""The Residency Manager's op list: what the compute and I/O queues do for one layer, in order. Two
executors run it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from specter_core.types import ExpertKey


class Source(Enum):
    """Where an expert's weights come from. HIT: resident. LATE, MISS: compute waits for the arrival of its
    transfer.
    """

    HIT = "hit"
    LATE = "late"
    MISS = "miss"


@dataclass(frozen=True, slots=True)
class WaitSlotFree:
    """I/O waits until nothing computes from `slot` and no earlier load moves into it."""

    slot: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Demand load of `key` into `slot`, replacing its content; protected from here until its Release."""

    key: ExpertKey
    slot: int


@dataclass(frozen=True, slots=True)
class Gemm:
    """Compute all rows routed to `key` from `slot`."""

    key: ExpertKey
    slot: int
    source: Source


@dataclass(frozen=True, slots=True)
class Release:
    """All rows of the slot's expert are computed: unprotect it (a staging slot is emptied too)."""

    slot: int


Op: TypeAlias = WaitSlotFree | Copy | Gemm | Release
