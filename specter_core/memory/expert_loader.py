"""Cache and link kept in step: every load under way is one LOADING slot and one open transfer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from specter_core.memory.expert_cache import ExpertCache, SlotState
from specter_core.memory.link import Link, Priority, Transfer
from specter_core.types import ExpertKey


@dataclass(slots=True)
class LoadCounters:
    """Totals since the loader was made. used_bytes: loads whose expert was computed from at least once."""

    loads: int = 0
    used_bytes: int = 0


class ExpertLoader:
    """Begins, hastens, cancels and finishes loads; the only place where cache state follows the link.

    A transfer that has arrived becomes RESIDENT when `reap` or `wait` sees it, on the calling thread, so
    the cache changes only between the caller's own statements.
    """

    def __init__(self, cache: ExpertCache, link: Link) -> None:
        self.cache = cache
        self.link = link
        self.counters = LoadCounters()
        self._open: dict[ExpertKey, Transfer] = {}  # in order of submission
        layers = len(cache.slots_per_layer)
        self._open_in: list[dict[ExpertKey, Transfer]] = [{} for _ in range(layers)]  # the same by layer
        self._unused: list[dict[int, int]] = [{} for _ in range(layers)]  # bytes of what is not computed from yet

    @property
    def entry_ms(self) -> float:
        """Time of one expert on the otherwise idle link, ms."""
        return self.link.entry_bytes / self.link.rate_bytes_per_s * 1e3

    def load(self, key: ExpertKey, slot: int, priority: Priority) -> Transfer:
        """Begin loading `key` into `slot`, evicting what is resident there."""
        assert self.cache.can_load(key, slot), (key, slot, self.cache.state(slot), self.cache.lookup(key))
        transfer = self.link.submit(key, slot, priority)
        self._begin(transfer)
        return transfer

    def load_all(self, loads: Sequence[tuple[ExpertKey, int]], priority: Priority) -> list[Transfer]:
        """Begin several loads, (expert, slot) each; as one `load` after the other."""
        transfers = self.link.submit_all(loads, priority)
        for transfer in transfers:
            self._begin(transfer)
        return transfers

    def is_open(self, key: ExpertKey) -> bool:
        return key in self._open

    def open_keys(self, layer: int | None = None) -> list[ExpertKey]:
        """Experts being loaded, issued ones first, else in order of submission."""
        opened = self._opened(layer)
        if not opened:
            return []
        queued = self.queued_keys(layer)
        behind = frozenset(queued)
        return [key for key in opened if key not in behind] + queued

    def queued_keys(self, layer: int | None = None) -> list[ExpertKey]:
        """Experts whose load could still be cancelled, in order of submission."""
        opened = self._opened(layer)
        return [transfer.key for transfer in self.link.queued(opened.values())] if opened else []

    def promote(self, key: ExpertKey) -> None:
        """Make a load that is under way a demand."""
        self.link.promote(self._open[key])

    def reorder(self, keys: Iterable[ExpertKey]) -> None:
        """Let the still queued prefetches among `keys` go in this order."""
        self.link.reorder([self._open[k] for k in keys if k in self._open])

    def cancel(self, key: ExpertKey) -> bool:
        """Undo a load of which nothing has moved; the slot's former expert is resident again. False when
        too late.
        """
        transfer = self._open[key]
        if not self.link.cancel(transfer):
            return False
        self.cache.abort_load(transfer.slot)
        del self._open[key], self._open_in[key.layer][key], self._unused[key.layer][key.expert]
        self.counters.loads -= 1
        return True

    def reap(self) -> list[ExpertKey]:
        """Make every expert that has arrived resident, without waiting."""
        arrived = [t.key for t in self.link.arrivals(self._open.values())]
        for key in arrived:
            self._finish(key)
        return arrived

    def wait(self, key: ExpertKey) -> int:
        """Wait until `key` has arrived (promoted first, so that nothing goes ahead of it needlessly); stall
        in ns.
        """
        transfer = self._open[key]
        self.link.promote(transfer)
        stall_ns = self.link.wait(transfer)
        self._finish(key)
        return stall_ns

    def wait_free(self, slot: int) -> int:
        """Wait until no load moves into `slot`, which nobody protects; stall in ns."""
        key = self.cache.key(slot)
        assert not self.cache.is_protected(slot), (slot, key)
        if key is None or self.cache.state(slot) is not SlotState.LOADING:
            return 0
        return self.wait(key)

    def drain(self) -> None:
        """Wait until everything under way has arrived."""
        self.link.drain()
        self.reap()
        assert not self._open, self._open

    def mark_used(self, key: ExpertKey) -> None:
        """Account for a computation from `key`."""
        used_bytes = self._unused[key.layer].pop(key.expert, None)
        if used_bytes is not None:
            self.counters.used_bytes += used_bytes

    def mark_all_used(self, layer: int, experts: Collection[int]) -> None:
        """`mark_used` for these experts of a layer."""
        for expert in [e for e in self._unused[layer] if e in experts]:
            self.mark_used(ExpertKey(layer, expert))

    def _opened(self, layer: int | None) -> dict[ExpertKey, Transfer]:
        return self._open if layer is None else self._open_in[layer]

    def _begin(self, transfer: Transfer) -> None:
        key = transfer.key
        self.cache.begin_load(key, transfer.slot)
        self._open[key] = self._open_in[key.layer][key] = transfer
        self._unused[key.layer][key.expert] = transfer.bytes
        self.counters.loads += 1

    def _finish(self, key: ExpertKey) -> None:
        self.cache.finish_load(self._open.pop(key).slot)
        del self._open_in[key.layer][key]
