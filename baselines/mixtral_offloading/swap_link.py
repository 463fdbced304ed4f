"""Swapping as released: what a load replaces is written back to the host, and copies take turns with computation."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence

import torch

from specter_core.device_runtime import CudaRuntime
from specter_core.memory.expert_cache import ExpertCache
from specter_core.memory.link import Link, LinkCounters, Priority, Transfer, TransferState
from specter_core.memory.link_cuda import CudaLink
from specter_core.memory.slot_buffer import SlotBuffer
from specter_core.types import ExpertKey


class SwapLink:
    """`Link` around the device's own, with the compute stream's order: nothing is computed beside a copy.

    A load is remembered when it is submitted. The first computation that waits for one makes all of them happen, one
    after the other, as in a stream they would lie before it. Before a load, the slot's former expert crosses the link
    to the host (`counters.d2h_bytes`), paced like every transfer. The host store is shared between processes and holds
    the same bytes already, so they go to a buffer of the same size instead.
    """

    def __init__(self, link: Link, slots: SlotBuffer, cache: ExpertCache, rate_bytes_per_s: float | None) -> None:
        self._link = link
        self._slots = slots
        self._cache = cache
        self._rate_bytes_per_s = rate_bytes_per_s
        self._pending: deque[Transfer] = deque()
        self._runtime = CudaRuntime() if isinstance(link, CudaLink) else None
        self._host = torch.empty(slots.entry_bytes, dtype=torch.uint8, pin_memory=self._runtime is not None)

    @property
    def counters(self) -> LinkCounters:
        return self._link.counters

    @property
    def entry_bytes(self) -> int:
        return self._link.entry_bytes

    @property
    def rate_bytes_per_s(self) -> float:
        return self._link.rate_bytes_per_s

    def submit(self, key: ExpertKey, slot: int, priority: Priority) -> Transfer:
        transfer = Transfer(key, slot, self.entry_bytes, priority, queued_ns=time.perf_counter_ns())
        self._pending.append(transfer)
        return transfer

    def submit_all(self, loads: Sequence[tuple[ExpertKey, int]], priority: Priority) -> list[Transfer]:
        return [self.submit(key, slot, priority) for key, slot in loads]

    def promote(self, transfer: Transfer) -> None:
        """A stream has one order."""

    def reorder(self, transfers: Sequence[Transfer]) -> None:
        """A stream has one order."""

    def cancel(self, transfer: Transfer) -> bool:
        """What is in a stream cannot be taken back."""
        return False

    def done(self, transfer: Transfer) -> bool:
        return transfer.state is TransferState.DONE

    def queued(self, transfers: Iterable[Transfer]) -> list[Transfer]:
        return [t for t in transfers if t.state is TransferState.QUEUED]

    def arrivals(self, transfers: Collection[Transfer]) -> list[Transfer]:
        return [t for t in transfers if self.done(t)]

    def wait(self, transfer: Transfer) -> int:
        start_ns = time.perf_counter_ns()
        self._flush()
        assert self.done(transfer), transfer
        return time.perf_counter_ns() - start_ns

    def idle(self) -> bool:
        return not self._pending and self._link.idle()

    def drain(self) -> None:
        self._flush()
        self._link.drain()

    def close(self) -> None:
        self._link.close()

    def _flush(self) -> None:
        while self._pending:
            transfer = self._pending.popleft()
            if self._cache.previous(transfer.slot) is not None:
                self._write_back(transfer.slot)
            self._follow_computation(transfer.slot)
            transfer.issued_as = transfer.priority
            self._link.wait(self._link.submit(transfer.key, transfer.slot, Priority.DEMAND))
            transfer.state = TransferState.DONE

    def _write_back(self, slot: int) -> None:
        start_ns = time.perf_counter_ns()
        self._host.copy_(self._slots.view(slot), non_blocking=True)
        self.counters.d2h_bytes += self.entry_bytes
        if self._rate_bytes_per_s is None:
            return
        if self._runtime is not None:
            self._runtime.synchronize()
        deadline_ns = start_ns + round(self.entry_bytes * 1e9 / self._rate_bytes_per_s)
        while (left_ns := deadline_ns - time.perf_counter_ns()) > 0:
            time.sleep(left_ns / 1e9)

    def _follow_computation(self, slot: int) -> None:
        """On a device the copy stream waits for everything on the compute stream so far."""
        if self._runtime is not None and isinstance(self._link, CudaLink):
            event = self._runtime.event()
            event.record()
            self._link.free_after(slot, event)
