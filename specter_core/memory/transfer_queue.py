"""The one software queue of the link: which piece of which transfer goes next. Thread-safe, no clock."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from specter_core.memory.link import Priority, Transfer, TransferState

PIECE_BYTES = 8_000_000
PIECES_IN_FLIGHT = 2


class Piece(NamedTuple):
    """Bytes [offset, offset + bytes) of a transfer's entry; `last` is the one that ends in the trailer."""

    transfer: Transfer
    offset: int
    bytes: int

    @property
    def last(self) -> bool:
        return self.offset + self.bytes == self.transfer.bytes


class TransferQueue:
    """Demands before prefetches, first come first served inside each; pieces of at most `piece_bytes`, at
    most `in_flight` of them on the link. A transfer whose first piece was taken is ISSUED and can no longer
    be cancelled, but a demand still goes ahead of the rest of an issued prefetch.

    `ready` is a condition on the queue's lock, notified at every change: the link's thread and waiters
    sleep on it.
    """

    def __init__(self, piece_bytes: int = PIECE_BYTES, in_flight: int = PIECES_IN_FLIGHT) -> None:
        assert piece_bytes > 0 and in_flight > 0, (piece_bytes, in_flight)
        self.ready = threading.Condition()
        self._piece_bytes = piece_bytes
        self._limit = in_flight
        self._waiting: list[Transfer] = []  # not fully sent; ordered on demand, short
        self._flying = 0
        self._open = 0  # neither done nor cancelled
        self._orders = 0

    def submit(self, transfer: Transfer) -> None:
        with self.ready:
            assert transfer.state is TransferState.QUEUED and transfer.sent_bytes == 0, transfer
            for other in self._waiting:
                assert other.key != transfer.key, f"{transfer.key} is already queued"
                assert other.slot != transfer.slot, f"slot {transfer.slot} is already the target of {other.key}"
            transfer.order = self._next_order()
            self._waiting.append(transfer)
            self._open += 1
            self.ready.notify_all()

    def promote(self, transfer: Transfer) -> bool:
        """Make a prefetch a demand, behind the demands already there. False when there is nothing left to
        hasten.
        """
        with self.ready:
            if transfer.priority is Priority.DEMAND or transfer not in self._waiting:
                return False
            transfer.priority = Priority.DEMAND
            transfer.order = self._next_order()
            self.ready.notify_all()
            return True

    def cancel(self, transfer: Transfer) -> bool:
        """Take a transfer out, only while no piece of it was taken."""
        with self.ready:
            if transfer.state is not TransferState.QUEUED:
                return False
            transfer.state = TransferState.CANCELLED
            self._waiting.remove(transfer)
            self._open -= 1
            self.ready.notify_all()
            return True

    def reorder(self, transfers: Sequence[Transfer]) -> None:
        """Let those of `transfers` that are still queued prefetches go in the given order, after other
        prefetches.
        """
        with self.ready:
            for transfer in transfers:
                if transfer.state is TransferState.QUEUED and transfer.priority is Priority.PREFETCH:
                    transfer.order = self._next_order()

    def next_piece(self) -> Piece | None:
        """Take the next piece, or None when nothing waits or `in_flight` pieces are out."""
        with self.ready:
            if self._flying >= self._limit or not self._waiting:
                return None
            transfer = min(self._waiting, key=lambda t: (t.priority.value, t.order))
            offset = transfer.sent_bytes
            size = min(self._piece_bytes, transfer.bytes - offset)
            if offset == 0:
                transfer.state = TransferState.ISSUED
                transfer.issued_as = transfer.priority
            transfer.sent_bytes += size
            if transfer.sent_bytes == transfer.bytes:
                self._waiting.remove(transfer)
            self._flying += 1
            return Piece(transfer, offset, size)

    def piece_arrived(self, piece: Piece) -> bool:
        """Account for a piece that has arrived; True when its transfer is complete (now DONE)."""
        with self.ready:
            assert self._flying > 0, "a piece arrived that was not sent"
            transfer = piece.transfer
            self._flying -= 1
            transfer.arrived_bytes += piece.bytes
            complete = transfer.arrived_bytes == transfer.bytes
            if complete:
                transfer.state = TransferState.DONE
                self._open -= 1
            self.ready.notify_all()
            return complete

    @property
    def in_flight(self) -> int:
        with self.ready:
            return self._flying

    def queued(self) -> list[Transfer]:
        """Transfers not yet issued, in the order in which they would go."""
        with self.ready:
            waiting = [t for t in self._waiting if t.state is TransferState.QUEUED]
            return sorted(waiting, key=lambda t: (t.priority.value, t.order))

    def idle(self) -> bool:
        """Nothing queued, issued or in flight."""
        with self.ready:
            return self._open == 0

    def _next_order(self) -> int:
        self._orders += 1
        return self._orders
