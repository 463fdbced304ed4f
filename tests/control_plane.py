"""Shared helpers of the control-plane tests: a filled store, a link that moves on command, a plain expert
FFN.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from specter_core.memory.expert_cache import CacheView
from specter_core.memory.host_store import HostExpertStore
from specter_core.memory.link import LinkCounters, Priority, Transfer, TransferState
from specter_core.memory.payload import PayloadLayout
from specter_core.memory.slot_buffer import SlotBuffer
from specter_core.memory.transfer_queue import TransferQueue
from specter_core.types import ExpertKey


def residents(cache: CacheView, layer: int) -> list[ExpertKey]:
    """Experts of `layer` in its own slots that have arrived, in slot order."""
    return [ExpertKey(layer, expert) for expert in cache.resident_slots(layer)]


def expert_ffn(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """SwiGLU in float32, one row at a time, so that the result of a row does not depend on the others."""
    rows = [
        functional.linear(
            functional.silu(functional.linear(r, gate.float())) * functional.linear(r, up.float()),
            down.float(),
        )
        for r in x.float()
    ]
    return torch.stack(rows)


def filled_store(layers: int, experts: int, layout: PayloadLayout, directory: str | None = None) -> HostExpertStore:
    """A ready store of seeded random experts."""
    generator = torch.Generator().manual_seed(7)
    store = HostExpertStore.create(layers, experts, layout, directory)
    for layer in range(layers):
        for expert in range(experts):
            gate, up, down = (torch.randn(*s, generator=generator) for s in shapes(layout))
            key = ExpertKey(layer, expert)
            layout.write(store.entry(key), key, *(m.to(layout.dtype) for m in (gate, up, down)))
    store.mark_ready()
    return store


def shapes(layout: PayloadLayout) -> list[tuple[int, int]]:
    up = (layout.width, layout.hidden)
    return [up, up, (layout.hidden, layout.width)]


class ManualLink:
    """A `Link` without a thread: pieces move when `step` is called, or while somebody waits."""

    def __init__(self, entry_bytes: int, store: HostExpertStore | None = None, slots: SlotBuffer | None = None) -> None:
        self.counters = LinkCounters()
        self.queue = TransferQueue(piece_bytes=max(1, entry_bytes // 2), in_flight=1)
        self.submitted: list[Transfer] = []
        self._entry_bytes = entry_bytes
        self._store = store
        self._slots = slots

    @property
    def entry_bytes(self) -> int:
        return self._entry_bytes

    @property
    def rate_bytes_per_s(self) -> float:
        return 1e9

    def submit(self, key: ExpertKey, slot: int, priority: Priority) -> Transfer:
        transfer = Transfer(key, slot, self._entry_bytes, priority)
        self.queue.submit(transfer)
        self.submitted.append(transfer)
        return transfer

    def submit_all(self, loads: Sequence[tuple[ExpertKey, int]], priority: Priority) -> list[Transfer]:
        return [self.submit(key, slot, priority) for key, slot in loads]

    def promote(self, transfer: Transfer) -> None:
        self.queue.promote(transfer)

    def reorder(self, transfers: Sequence[Transfer]) -> None:
        self.queue.reorder(transfers)

    def cancel(self, transfer: Transfer) -> bool:
        return self.queue.cancel(transfer)

    def done(self, transfer: Transfer) -> bool:
        return transfer.state is TransferState.DONE

    def queued(self, transfers: Iterable[Transfer]) -> list[Transfer]:
        return [t for t in transfers if t.state is TransferState.QUEUED]

    def arrivals(self, transfers: Collection[Transfer]) -> list[Transfer]:
        return [t for t in transfers if self.done(t)]

    def step(self) -> bool:
        """Move one piece; False when there is none."""
        piece = self.queue.next_piece()
        if piece is None:
            return False
        if self.queue.piece_arrived(piece):
            self.counters.transfers += 1
            if self._store is not None and self._slots is not None:
                self._slots.view(piece.transfer.slot).copy_(self._store.entry(piece.transfer.key))
        self.counters.bytes += piece.bytes
        return True

    def wait(self, transfer: Transfer) -> int:
        while transfer.state is not TransferState.DONE:
            assert self.step(), f"{transfer} will never arrive"
        return 0

    def idle(self) -> bool:
        return self.queue.idle()

    def drain(self) -> None:
        while self.step():
            pass

    def close(self) -> None:
        pass
