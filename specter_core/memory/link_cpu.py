"""The link of `device=cpu`: an I/O thread that copies store entries into slots at a given rate."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence

from specter_core.memory.host_store import HostExpertStore
from specter_core.memory.link import BusyInterval, LinkCounters, Priority, Transfer, TransferState
from specter_core.memory.slot_buffer import SlotBuffer
from specter_core.memory.token_bucket import TokenBucket
from specter_core.memory.transfer_queue import PIECE_BYTES, Piece, TransferQueue
from specter_core.types import ExpertKey


class CpuLink:
    """`Link` over memory copies.

    rate_bytes_per_s paces every transfer (None: as fast as the machine copies). `delay(transfer)` returns
    extra seconds that a transfer spends on the link (tests). With `record_intervals` every piece is kept
    for the trace. The thread sleeps while nothing is queued; what goes wrong in it is raised by the
    caller's next submit, done, wait or drain.
    """

    def __init__(
        self,
        store: HostExpertStore,
        slots: SlotBuffer,
        rate_bytes_per_s: float | None = None,
        *,
        piece_bytes: int = PIECE_BYTES,
        delay: Callable[[Transfer], float] | None = None,
        verify_crc: bool = False,
        record_intervals: bool = False,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        sleep_s: Callable[[float], None] = time.sleep,
    ) -> None:
        assert slots.entry_bytes == store.layout.entry_bytes, (slots.entry_bytes, store.layout.entry_bytes)
        self.counters = LinkCounters()
        self._store = store
        self._slots = slots
        self._bucket = None if rate_bytes_per_s is None else TokenBucket(rate_bytes_per_s)
        self._delay = delay
        self._verify_crc = verify_crc
        self._record = record_intervals
        self._clock_ns = clock_ns
        self._sleep_s = sleep_s
        self._rate = rate_bytes_per_s if rate_bytes_per_s is not None else self._measure_rate()
        self._queue = TransferQueue(piece_bytes)
        self._error: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="specter-link", daemon=True)
        self._thread.start()

    @property
    def entry_bytes(self) -> int:
        return self._slots.entry_bytes

    @property
    def rate_bytes_per_s(self) -> float:
        return self._rate

    def submit(self, key: ExpertKey, slot: int, priority: Priority) -> Transfer:
        self._raise_error()
        assert not self._closing, "link is closed"
        transfer = Transfer(key, slot, self._slots.entry_bytes, priority, queued_ns=self._clock_ns())
        self._queue.submit(transfer)
        return transfer

    def promote(self, transfer: Transfer) -> None:
        if self._queue.promote(transfer):
            self.counters.promoted += 1

    def reorder(self, transfers: Sequence[Transfer]) -> None:
        self._queue.reorder(transfers)

    def cancel(self, transfer: Transfer) -> bool:
        cancelled = self._queue.cancel(transfer)
        self.counters.cancelled += cancelled
        return cancelled

    def done(self, transfer: Transfer) -> bool:
        self._raise_error()
        return transfer.state is TransferState.DONE

    def wait(self, transfer: Transfer) -> int:
        assert transfer.state is not TransferState.CANCELLED, transfer
        start_ns = self._clock_ns()
        if transfer.state is not TransferState.DONE:
            with self._queue.ready:
                self._queue.ready.wait_for(lambda: transfer.state is TransferState.DONE or self._error is not None)
        self._raise_error()
        return self._clock_ns() - start_ns

    def idle(self) -> bool:
        return self._queue.idle()

    def drain(self) -> None:
        """Wait until everything submitted has arrived."""
        with self._queue.ready:
            self._queue.ready.wait_for(lambda: self._queue.idle() or self._error is not None)
        self._raise_error()

    def close(self) -> None:
        """Stop after the piece under way and join the thread. Idempotent."""
        with self._queue.ready:
            self._closing = True
            self._queue.ready.notify_all()
        self._thread.join()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while (piece := self._take()) is not None:
                self._move(piece)
        except BaseException as error:  # handed to the caller's next call
            with self._queue.ready:
                self._error = error
                self._queue.ready.notify_all()

    def _take(self) -> Piece | None:
        """Sleep until there is a piece; None when the link closes."""
        with self._queue.ready:
            while not self._closing:
                piece = self._queue.next_piece()
                if piece is not None:
                    return piece
                self._queue.ready.wait()
        return None

    def _move(self, piece: Piece) -> None:
        transfer = piece.transfer
        start_ns = self._clock_ns()
        deadline_ns = start_ns
        if piece.offset == 0:
            transfer.issued_ns = start_ns
        if self._bucket is not None:
            deadline_ns = self._bucket.reserve(piece.bytes, transfer.queued_ns, start_ns)
        if self._delay is not None and piece.offset == 0:
            self._sleep_s(self._delay(transfer))
        self._copy(piece)
        while (left_ns := deadline_ns - self._clock_ns()) > 0:
            self._sleep_s(left_ns / 1e9)
        end_ns = self._clock_ns()
        self._account(piece, start_ns, end_ns)
        if piece.last:
            self._check(transfer)
            transfer.done_ns = end_ns
        self._queue.piece_arrived(piece)

    def _copy(self, piece: Piece) -> None:
        source = self._store.entry(piece.transfer.key).data_ptr() + piece.offset
        target = self._slots.view(piece.transfer.slot).data_ptr() + piece.offset
        ctypes.memmove(target, source, piece.bytes)  # releases the GIL; one thread, no OpenMP pool

    def _check(self, transfer: Transfer) -> None:
        entry = self._slots.view(transfer.slot)
        self._store.layout.check(entry, transfer.key)
        if self._verify_crc:
            self._store.layout.verify_crc(entry)

    def _account(self, piece: Piece, start_ns: int, end_ns: int) -> None:
        self.counters.bytes += piece.bytes
        self.counters.transfers += piece.last
        self.counters.busy_ns += end_ns - start_ns
        if self._record:
            interval = BusyInterval(start_ns, end_ns, piece.transfer.key, piece.transfer.priority, piece.bytes)
            self.counters.intervals.append(interval)

    def _measure_rate(self) -> float:
        """Best of five copies of one entry into slot 0 (before the link is used)."""
        probe = Piece(
            Transfer(ExpertKey(0, 0), 0, self._slots.entry_bytes, Priority.DEMAND), 0, self._slots.entry_bytes
        )
        best_ns = min(self._timed_copy(probe) for _ in range(5))
        return self._slots.entry_bytes * 1e9 / max(1, best_ns)

    def _timed_copy(self, piece: Piece) -> int:
        start_ns = self._clock_ns()
        self._copy(piece)
        return self._clock_ns() - start_ns
