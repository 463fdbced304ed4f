"""The link of `device=cpu`: an I/O thread that copies store entries into slots at a given rate."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from specter_core.memory.host_store import HostExpertStore
from specter_core.memory.link import BusyInterval, LinkCounters, Priority, Transfer, TransferState
from specter_core.memory.link_thread import LinkThread
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
        self._queue = TransferQueue(piece_bytes, in_flight=1)
        self._thread = LinkThread(self._queue, self._start, self._finish, in_flight=1)

    @property
    def entry_bytes(self) -> int:
        return self._slots.entry_bytes

    @property
    def rate_bytes_per_s(self) -> float:
        return self._rate

    def submit(self, key: ExpertKey, slot: int, priority: Priority) -> Transfer:
        self._thread.raise_error()
        assert not self._thread.closed, "link is closed"
        transfer = Transfer(key, slot, self._slots.entry_bytes, priority, queued_ns=self._clock_ns())
        self._queue.submit(transfer)
        return transfer

    def submit_all(self, loads: Sequence[tuple[ExpertKey, int]], priority: Priority) -> list[Transfer]:
        return [self.submit(key, slot, priority) for key, slot in loads]

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

    def queued(self, transfers: Iterable[Transfer]) -> list[Transfer]:
        self._thread.raise_error()
        return [t for t in transfers if t.state is TransferState.QUEUED]

    def arrivals(self, transfers: Collection[Transfer]) -> list[Transfer]:
        return [t for t in transfers if self.done(t)]

    def wait(self, transfer: Transfer) -> int:
        start_ns = self._clock_ns()
        self._thread.wait(transfer)
        return self._clock_ns() - start_ns

    def idle(self) -> bool:
        return self._queue.idle()

    def drain(self) -> None:
        """Wait until everything submitted has arrived."""
        self._thread.drain()

    def close(self) -> None:
        """Stop after the piece under way and join the thread. Idempotent."""
        self._thread.close()

    def _start(self, piece: Piece) -> None:
        """Reserve the piece's time on the link; the copy itself happens in `_finish`."""
        transfer = piece.transfer
        self._started_ns = self._deadline_ns = self._clock_ns()
        if self._bucket is not None:
            self._deadline_ns = self._bucket.reserve(piece.bytes, transfer.queued_ns, self._started_ns)

    def _finish(self, piece: Piece) -> None:
        transfer = piece.transfer
        if self._delay is not None and piece.offset == 0:
            self._sleep_s(self._delay(transfer))
        self._copy(piece)
        while (left_ns := self._deadline_ns - self._clock_ns()) > 0:
            self._sleep_s(left_ns / 1e9)
        end_ns = self._clock_ns()
        self._account(piece, self._started_ns, end_ns)
        if piece.last:
            self._check(transfer)

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
            transfer = piece.transfer
            interval = BusyInterval(start_ns, end_ns, transfer.key, transfer.priority, piece.bytes)
            self.counters.intervals.append(interval)

    def _measure_rate(self) -> float:
        """Best of five copies of one entry into slot 0 (before the link is used)."""
        size = self._slots.entry_bytes
        probe = Piece(Transfer(ExpertKey(0, 0), 0, size, Priority.DEMAND), 0, size)
        best_ns = min(self._timed_copy(probe) for _ in range(5))
        return size * 1e9 / max(1, best_ns)

    def _timed_copy(self, piece: Piece) -> int:
        start_ns = self._clock_ns()
        self._copy(piece)
        return self._clock_ns() - start_ns
