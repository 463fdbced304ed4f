"""The Residency Manager's op list: what the compute and I/O queues do for one layer, in order. Two
executors run it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias, overload

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
class Adopt:
    """The staging slot `slot` joins the layer with its expert; the layer's `victim`, no longer worth keeping, becomes
    an empty staging slot. No byte moves.
    """

    slot: int
    victim: int


@dataclass(frozen=True, slots=True)
class Release:
    """All rows of the slot's expert are computed: unprotect it (a staging slot is emptied too)."""

    slot: int


Op: TypeAlias = WaitSlotFree | Copy | Gemm | Adopt | Release


class OpList(Sequence[Op]):
    """Ops that are made when they are first looked at. Equal to any sequence of the same ops."""

    def __init__(self, source: Iterator[Op]) -> None:
        self._made: list[Op] = []
        self._source = source

    def finish(self) -> None:
        """Make them all."""
        self._made.extend(self._source)

    def __iter__(self) -> Iterator[Op]:
        at = 0
        while True:
            if at == len(self._made):
                op = next(self._source, None)
                if op is None:
                    return
                self._made.append(op)
            yield self._made[at]
            at += 1

    @overload
    def __getitem__(self, index: int) -> Op: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Op]: ...
    def __getitem__(self, index: int | slice) -> Op | Sequence[Op]:
        self.finish()
        return self._made[index]

    def __len__(self) -> int:
        self.finish()
        return len(self._made)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]
