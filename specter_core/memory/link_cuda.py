"""The link of `device=cuda`: asynchronous copies from registered host memory on a stream of their own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from specter_core.memory.host_registration import HostRegistration
from specter_core.memory.host_store import HostExpertStore
from specter_core.memory.link import BusyInterval, LinkCounters, Priority, Transfer, TransferState
from specter_core.memory.link_thread import LinkThread
from specter_core.memory.payload import TRAILER_BYTES
from specter_core.memory.slot_buffer import SlotBuffer
from specter_core.memory.token_bucket import TokenBucket
from specter_core.memory.transfer_queue import PIECE_BYTES, PIECES_IN_FLIGHT, Piece, TransferQueue
from specter_core.types import ExpertKey

_PROBE_COPIES = 8


class _Flight(NamedTuple):
    """A piece on the stream: host time of issue, paced deadline, event behind the copy (and, last piece,
    its trailer).
    """

    started_ns: int
    deadline_ns: int
    arrived: torch.cuda.Event


class CudaLink:
    """`Link` over PCIe. At most two pieces are on the copy stream; the rest waits in the software queue.

    rate_bytes_per_s paces every transfer (None: the link's own rate). The trailer of each expert comes back
    with its last piece and is checked on the host before the transfer is DONE. `free_after(slot, event)`
    makes the next copy into a slot wait on the device for the computation that still reads it (the op
    list's WaitSlotFree), without blocking the host.
    """

    def __init__(
        self,
        store: HostExpertStore,
        slots: SlotBuffer,
        rate_bytes_per_s: float | None = None,
        *,
        piece_bytes: int = PIECE_BYTES,
        record_intervals: bool = False,
    ) -> None:
        assert slots.entry_bytes == store.layout.entry_bytes, (slots.entry_bytes, store.layout.entry_bytes)
        assert slots.data.device.type == "cuda", slots.data.device
        self.counters = LinkCounters()
        self._store = store
        self._slots = slots
        self._device = slots.data.device
        self._record = record_intervals
        self._busy_until_ns = 0
        with torch.cuda.device(self._device):
            self._registration = HostRegistration(store.segment)
            self._stream = torch.cuda.Stream()
            self._trailers = torch.empty(slots.slots, TRAILER_BYTES, dtype=torch.uint8, pin_memory=True)
        self._bucket = None if rate_bytes_per_s is None else TokenBucket(rate_bytes_per_s)
        self._rate = rate_bytes_per_s if rate_bytes_per_s is not None else self._measure_rate()
        self._flights: dict[Piece, _Flight] = {}
        self._free_events: dict[int, torch.cuda.Event] = {}
        self._queue = TransferQueue(piece_bytes, PIECES_IN_FLIGHT)
        self._thread = LinkThread(self._queue, self._start, self._finish, PIECES_IN_FLIGHT)

    @property
    def entry_bytes(self) -> int:
        return self._slots.entry_bytes

    @property
    def rate_bytes_per_s(self) -> float:
        return self._rate

    def free_after(self, slot: int, event: torch.cuda.Event) -> None:
        """Let the next load into `slot` start only after `event`; call before submitting it."""
        self._free_events[slot] = event

    def submit(self, key: ExpertKey, slot: int, priority: Priority) -> Transfer:
        self._thread.raise_error()
        assert not self._thread.closed, "link is closed"
        transfer = Transfer(key, slot, self._slots.entry_bytes, priority, queued_ns=time.perf_counter_ns())
        self._queue.submit(transfer)
        return transfer

    def promote(self, transfer: Transfer) -> None:
        self.counters.promoted += self._queue.promote(transfer)

    def reorder(self, transfers: Sequence[Transfer]) -> None:
        self._queue.reorder(transfers)

    def cancel(self, transfer: Transfer) -> bool:
        cancelled = self._queue.cancel(transfer)
        self.counters.cancelled += cancelled
        return cancelled

    def done(self, transfer: Transfer) -> bool:
        self._thread.raise_error()
        return transfer.state is TransferState.DONE

    def wait(self, transfer: Transfer) -> int:
        start_ns = time.perf_counter_ns()
        self._thread.wait(transfer)
        return time.perf_counter_ns() - start_ns

    def idle(self) -> bool:
        return self._queue.idle()

    def drain(self) -> None:
        """Wait until everything submitted has arrived."""
        self._thread.drain()

    def close(self) -> None:
        """Stop after the pieces under way, join the thread and unregister the host memory. Idempotent."""
        self._thread.close()
        self._stream.synchronize()
        self._registration.close()

    def _start(self, piece: Piece) -> None:
        """Issue the copy; never blocks on the device."""
        transfer, started_ns = piece.transfer, time.perf_counter_ns()
        if piece.offset == 0:
            transfer.issued_ns = started_ns
            free = self._free_events.pop(transfer.slot, None)
            if free is not None:
                self._stream.wait_event(free)
        arrived = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self._stream):
            self._copy(piece)
            if piece.last:
                self._trailers[transfer.slot].copy_(self._slots.view(transfer.slot)[-TRAILER_BYTES:], non_blocking=True)
            arrived.record(self._stream)
        deadline_ns = started_ns
        if self._bucket is not None:
            deadline_ns = self._bucket.reserve(piece.bytes, transfer.queued_ns, started_ns)
        self._flights[piece] = _Flight(started_ns, deadline_ns, arrived)

    def _finish(self, piece: Piece) -> None:
        flight, transfer = self._flights.pop(piece), piece.transfer
        flight.arrived.synchronize()
        while (left_ns := flight.deadline_ns - time.perf_counter_ns()) > 0:
            time.sleep(left_ns / 1e9)
        end_ns = time.perf_counter_ns()
        self._account(piece, flight.started_ns, end_ns)
        if piece.last:
            self._store.layout.check_trailer(self._trailers[transfer.slot], transfer.key)
            transfer.done_ns = end_ns

    def _copy(self, piece: Piece) -> None:
        part = slice(piece.offset, piece.offset + piece.bytes)
        source = self._store.entry(piece.transfer.key)[part]
        self._slots.view(piece.transfer.slot)[part].copy_(source, non_blocking=True)

    def _account(self, piece: Piece, started_ns: int, end_ns: int) -> None:
        """Two pieces overlap: the link is busy from the later of this issue and the last arrival."""
        busy_from_ns = max(started_ns, self._busy_until_ns)
        self._busy_until_ns = end_ns
        self.counters.bytes += piece.bytes
        self.counters.transfers += piece.last
        self.counters.busy_ns += max(0, end_ns - busy_from_ns)
        if self._record:
            transfer = piece.transfer
            interval = BusyInterval(busy_from_ns, end_ns, transfer.key, transfer.priority, piece.bytes)
            self.counters.intervals.append(interval)

    def _measure_rate(self) -> float:
        """Back-to-back copies of one entry into slot 0 (before the link is used), after one to warm up."""
        size = self._slots.entry_bytes
        probe = Piece(Transfer(ExpertKey(0, 0), 0, size, Priority.DEMAND), 0, size)
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._stream):
            self._copy(probe)
            first.record(self._stream)
            for _ in range(_PROBE_COPIES):
                self._copy(probe)
            last.record(self._stream)
        last.synchronize()
        return _PROBE_COPIES * size * 1e3 / first.elapsed_time(last)
