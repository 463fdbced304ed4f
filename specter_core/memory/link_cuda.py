"""The link of `device=cuda`: asynchronous copies from registered host memory, issued by a native worker."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from specter_core.device_runtime import DeviceEvent, DeviceRuntime
from specter_core.memory.host_store import HostExpertStore
from specter_core.memory.link import BusyInterval, LinkCounters, Priority, Transfer, TransferState
from specter_core.memory.native import library
from specter_core.memory.slot_buffer import SlotBuffer
from specter_core.memory.transfer_queue import PIECE_BYTES, PIECES_IN_FLIGHT
from specter_core.types import ExpertKey

_STATES = (TransferState.QUEUED, TransferState.ISSUED, TransferState.DONE, TransferState.CANCELLED)
_PRIORITIES = (Priority.DEMAND, Priority.PREFETCH)  # as the worker numbers them
_PROBE_COPIES = 32
_PROBES = 4
_COUNTERS = 7


class CudaLink:
    """`Link` over PCIe. At most `pieces` pieces are on the copy stream; the rest waits in the worker's queue.

    rate_bytes_per_s paces every transfer (None: the link's own rate). `wait` blocks the host only until the transfer's
    last piece is on the copy stream, and orders later work of the compute stream behind its arrival. `free_after`
    lets the next copy into a slot wait on the device for the computation that still reads it (WaitSlotFree).
    Trailers are checked by the kernels that admit slots to computation, not here. Raises RuntimeError for a driver
    error, at the next call.
    """

    def __init__(
        self,
        store: HostExpertStore,
        slots: SlotBuffer,
        runtime: DeviceRuntime,
        rate_bytes_per_s: float | None = None,
        *,
        piece_bytes: int = PIECE_BYTES,
        pieces: int = PIECES_IN_FLIGHT,
        record_intervals: bool = False,
    ) -> None:
        assert slots.entry_bytes == store.layout.entry_bytes, (slots.entry_bytes, store.layout.entry_bytes)
        self._lib = library()
        self._store = store
        self._runtime = runtime
        self._slots = slots
        runtime.register(store.segment)
        stream = runtime.copy_stream()
        args = (runtime.driver.encode(), runtime.context, stream, piece_bytes, pieces)
        probe = self._lib.worker_create(*args, 0.0, 1.0, 0)
        assert probe, "the driver library has no usable copy functions"
        self._worker: int | None = probe
        self._source, self._target = store.segment.data_ptr(), slots.data.data_ptr()
        self._open: dict[int, Transfer] = {}
        self._readers: dict[int, DeviceEvent] = {}
        self._view_states()
        self._native_rate = self._measure_rate()
        self._reported = self._arrivals.value
        self._paced_rate = rate_bytes_per_s
        self._record = record_intervals
        if rate_bytes_per_s is not None or record_intervals:
            self._lib.worker_close(probe)
            self._worker = self._lib.worker_create(
                *args, rate_bytes_per_s or 0.0, self._native_rate, int(record_intervals)
            )
            assert self._worker
            self._view_states()
        self._counters = LinkCounters()
        self._base = self._totals()

    @property
    def entry_bytes(self) -> int:
        return self._slots.entry_bytes

    @property
    def rate_bytes_per_s(self) -> float:
        """Paced, or the best that was seen so far: a first measurement can come out at half of what follows."""
        if self._paced_rate is not None:
            return self._paced_rate
        if self._worker is not None:
            self._native_rate = max(self._native_rate, self._lib.worker_best_rate(self._worker))
        return self._native_rate

    @property
    def counters(self) -> LinkCounters:
        """Totals as of now; every open transfer's state is brought up to date too."""
        if self._worker is None:
            return self._counters
        self._refresh()
        totals = [a - b for a, b in zip(self._totals(), self._base, strict=True)]
        found = self._counters
        found.bytes, found.transfers, found.cancelled, found.promoted, found.busy_ns = totals[:5]
        if self._record:
            self._take_intervals()
        return found

    def free_after(self, slot: int, event: DeviceEvent) -> None:
        """The next load into `slot` starts only after `event`; call before submitting it."""
        self._readers[slot] = event

    def free_all_after(self, slots: Collection[int], event: DeviceEvent) -> None:
        """`free_after` for several slots."""
        self._readers.update(dict.fromkeys(slots, event))

    def forget_readers(self) -> None:
        """The compute stream is idle: nothing reads a slot any more."""
        self._readers.clear()

    def submit(self, key: ExpertKey, slot: int, priority: Priority) -> Transfer:
        transfer = Transfer(key, slot, self.entry_bytes, priority, queued_ns=time.perf_counter_ns())
        reader = self._readers.pop(slot, None)
        entry = (key.layer * self._store.experts + key.expert) * self.entry_bytes
        number = self._lib.worker_submit(
            self._live(),
            self._source + entry,
            self._target + slot * self.entry_bytes,
            self.entry_bytes,
            priority.value,
            None if reader is None else reader.handle,
        )
        transfer.order = number
        self._open[number] = transfer
        return transfer

    def submit_all(self, loads: Sequence[tuple[ExpertKey, int]], priority: Priority) -> list[Transfer]:
        """One call into the worker."""
        if not loads:
            return []
        now_ns, size, experts, count = time.perf_counter_ns(), self.entry_bytes, self._store.experts, len(loads)
        sources = np.array([key[0] * experts + key[1] for key, _ in loads], np.uint64) * size + self._source
        targets = np.array([slot for _, slot in loads], np.uint64) * size + self._target
        readers = [self._readers.pop(slot, None) for _, slot in loads] if self._readers else []
        after = np.zeros(count, np.uint64)
        for i, reader in enumerate(readers):
            after[i] = 0 if reader is None else reader.handle
        addresses = (sources.ctypes.data, targets.ctypes.data, after.ctypes.data)
        first = self._lib.worker_submit_many(self._live(), count, *addresses, size, priority.value)
        made = [Transfer(key, slot, size, priority, queued_ns=now_ns) for key, slot in loads]
        for number, transfer in enumerate(made, first):
            transfer.order = number
            self._open[number] = transfer
        return made

    def promote(self, transfer: Transfer) -> None:
        if self._lib.worker_promote(self._live(), transfer.order):
            transfer.priority = Priority.DEMAND

    def reorder(self, transfers: Sequence[Transfer]) -> None:
        numbers = np.array([t.order for t in transfers], np.int64)
        self._lib.worker_reorder(self._live(), numbers.ctypes.data, len(transfers))

    def cancel(self, transfer: Transfer) -> bool:
        cancelled = bool(self._lib.worker_cancel(self._live(), transfer.order))
        self._update(transfer)
        return cancelled

    def done(self, transfer: Transfer) -> bool:
        """Arrived, as seen by the host; work enqueued from now on may read it."""
        self._update(transfer)
        return transfer.state is TransferState.DONE

    def queued(self, transfers: Iterable[Transfer]) -> list[Transfer]:
        states, table = self._states, self._table
        return [t for t in transfers if not states[t.order % table]]

    def arrivals(self, transfers: Collection[Transfer]) -> list[Transfer]:
        """See `Link`; costs next to nothing while nothing has arrived."""
        self._live()
        count = self._arrivals.value
        if count == self._reported:
            return []
        if count - self._reported > self._table:
            self._reported = count
            return [t for t in transfers if self.done(t)]
        fresh = {self._arrived_ids[i % self._table] for i in range(self._reported, count)}
        self._reported = count
        found = [t for t in transfers if t.order in fresh]
        for transfer in found:
            self._update(transfer)
        return found

    def wait(self, transfer: Transfer) -> int:
        start_ns = time.perf_counter_ns()
        status = self._lib.worker_fence(self._live(), transfer.order, self._runtime.stream)
        self._raise(status)
        self._update(transfer)
        return time.perf_counter_ns() - start_ns

    def idle(self) -> bool:
        return self._totals()[5] == 0

    def drain(self) -> None:
        """Wait until everything submitted has arrived."""
        self._raise(self._lib.worker_drain(self._live()))
        self._refresh()

    def take_gaps_us(self) -> list[float]:
        """Time that queued work waited on an empty copy stream, per piece since the last call, in µs."""
        buffer = (ctypes.c_int32 * self._lib.worker_table())()
        count = self._lib.worker_take_gaps(self._live(), buffer)
        return [value / 1e3 for value in buffer[:count]]

    def close(self) -> None:
        """Stop after the pieces under way and end the worker. Idempotent."""
        if self._worker is not None:
            self._counters = self.counters
            self._lib.worker_close(self._worker)
            self._worker = None

    def _live(self) -> int:
        assert self._worker is not None, "link is closed"
        return self._worker

    def _raise(self, status: int) -> None:
        if status:
            raise RuntimeError(f"the link's copies failed with CUDA driver error {status}")

    def _view_states(self) -> None:
        """The worker's table, read in place."""
        table = ctypes.c_int32 * self._lib.worker_table()
        self._states = table.from_address(self._lib.worker_states(self._worker))
        self._issued_as = table.from_address(self._lib.worker_issued_as(self._worker))
        self._table = self._lib.worker_table()
        self._arrivals = ctypes.c_int64.from_address(self._lib.worker_arrivals(self._worker))
        self._arrived_ids = (ctypes.c_int64 * self._table).from_address(self._lib.worker_arrived_ids(self._worker))
        self._reported = self._arrivals.value

    def _update(self, transfer: Transfer) -> None:
        at = transfer.order % self._table
        state = self._states[at]
        if not state:
            return
        if transfer.issued_as is None and self._issued_as[at] >= 0:
            transfer.issued_as = _PRIORITIES[self._issued_as[at]]
        transfer.state = _STATES[state]
        if state >= 2:
            if not self._record:
                self._open.pop(transfer.order, None)
            if state == 2:
                transfer.arrived_bytes = transfer.sent_bytes = transfer.bytes

    def _refresh(self) -> None:
        if self._worker is not None:
            self._raise(self._lib.worker_error(self._worker))
            for transfer in list(self._open.values()):
                self._update(transfer)

    def _totals(self) -> list[int]:
        out = (ctypes.c_int64 * _COUNTERS)()
        if self._worker is not None:
            self._lib.worker_counters(self._worker, out)
        return list(out)

    def _take_intervals(self) -> None:
        buffer = (ctypes.c_int64 * (4 * self._table))()
        count = self._lib.worker_take_intervals(self._live(), buffer)
        for i in range(count):
            start_ns, end_ns, number, size = buffer[4 * i : 4 * i + 4]
            transfer = self._open[number]
            self._counters.intervals.append(BusyInterval(start_ns, end_ns, transfer.key, transfer.priority, size))

    def _measure_rate(self) -> float:
        """Best of some runs of back-to-back copies of entries all over the store, before the link is used.

        The first copies into fresh memory, and one entry again and again, can go at half the rate.
        """
        self._runtime.synchronize()  # clearing fresh slots would slow the copies
        entries, slots = self._store.layers * self._store.experts, self._slots.slots
        best = 0.0
        for probe in range(_PROBES + 1):
            count = _PROBE_COPIES if probe else 2
            start_ns = time.perf_counter_ns()
            for i in range(count):
                number = self._lib.worker_submit(
                    self._worker,
                    self._source + ((i * entries // count + probe) % entries) * self.entry_bytes,
                    self._target + i % slots * self.entry_bytes,
                    self.entry_bytes,
                    Priority.DEMAND.value,
                    None,
                )
            self._raise(self._lib.worker_wait(self._worker, number))
            elapsed_ns = time.perf_counter_ns() - start_ns
            best = max(best, count * self.entry_bytes * 1e9 / max(elapsed_ns, 1))
        return best
