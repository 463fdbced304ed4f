"""Whole-layer streaming: every expert of layer i + 1 crosses the link while layer i computes (as published)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from specter_core.memory.budget import SlotPlan
from specter_core.memory.expert_cache import ExpertCache, SlotState
from specter_core.memory.expert_loader import ExpertLoader
from specter_core.memory.link import Priority, Transfer
from specter_core.model.layer import DecoderLayer
from specter_core.prefetch.planner import PrefetchPlan, Timings
from specter_core.prefetch.prefetcher import PrefetchCounters
from specter_core.types import ExpertKey


class RingCache(ExpertCache):
    """E ≤ S ≤ 2 E slots that all layers use in turn: expert e of layer l has slot (l E + e) mod S, so with S = 2 E
    two layers take turns in two buffers.
    """

    def __init__(self, plan: SlotPlan, experts: int) -> None:
        super().__init__(plan.slots_per_layer, plan.staging)
        assert experts <= self.slots, (experts, self.slots)
        layers = len(plan.slots_per_layer)
        self._ring = [[(layer * experts + e) % self.slots for e in range(experts)] for layer in range(layers)]

    def layer_slots(self, layer: int) -> Sequence[int]:
        return self._ring[layer]

    def serves(self, layer: int, slot: int) -> bool:
        return slot in self._ring[layer] or self.is_staging(slot)


class LayerStreaming:
    """`Prefetching` and `LayerHook`: no routing is looked at, no expert is left out, nothing is kept.

    A layer's experts go into the ring's empty slots in ascending order; a layer that is complete is dropped, after
    the last of its experts has arrived. Drafting covers the first layers as far as the ring holds them.
    """

    wants_snapshot = False

    def __init__(self, loader: ExpertLoader, layers: int, experts: int) -> None:
        self._loader = loader
        self._cache = loader.cache
        self._layers = layers
        self._experts = experts
        self._issued: list[Transfer] = []

    def begin_window(self, depth: int) -> int:
        self._issued = []
        self._loader.reap()
        self._stream(0)
        self._stream(1)
        return depth

    def on_boundary(self, counters: Tensor, drafted: int, timings: Timings) -> PrefetchPlan:
        raise AssertionError("streaming takes no snapshots")

    def shorten_window(self, depth: int) -> None:
        """No transfer depends on it."""

    def end_of_draft(self) -> None:
        self._loader.reap()

    def prepare_layer(self, layer: int) -> None:
        """Nothing is predicted here."""

    def before_layer(self, layer: int, needed: Collection[int]) -> tuple[int, ...]:
        """Starts the next layer's transfers. Returns the needed experts of this layer that are still on their way."""
        self._loader.reap()
        self._stream(layer)
        self._stream(layer + 1)
        return tuple(key.expert for key in self._loader.open_keys(layer) if key.expert in needed)

    def before_plan(self, moe_index: int, needed: Collection[int]) -> None:
        """Every expert of the layer is in a slot or on its way to one."""

    def after_layer(self, moe_index: int, hidden: Tensor, upcoming: Sequence[DecoderLayer]) -> None:
        """Drops the layer and fills its slots with what is still missing of the next one."""
        for slot in self._cache.layer_slots(moe_index):
            key = self._cache.key(slot)
            if key is not None and key.layer == moe_index:
                if self._loader.is_open(key):
                    self._loader.wait(key)
                self._cache.evict(slot)
        self._stream(moe_index + 1)

    def end_window(self, useful: Collection[tuple[int, int]]) -> PrefetchCounters:
        """Precision: the share of streamed experts that served a committed token. There is no recall: nothing is
        predicted.
        """
        used = sum(t.key in useful for t in self._issued)
        return PrefetchCounters(
            chunks=1,
            planned=len(self._issued),
            planned_used=used,
            issued=len(self._issued),
            used=used,
            promoted=0,
            cancelled=0,
            absent=0,
            absent_planned=0,
        )

    def _stream(self, layer: int) -> None:
        """Queue what is missing of a layer, as far as there are empty slots. After the last layer comes the first."""
        layer %= self._layers
        for expert, slot in enumerate(self._cache.layer_slots(layer)):
            key = ExpertKey(layer, expert)
            if self._cache.lookup(key) is None and self._cache.state(slot) is SlotState.EMPTY:
                self._issued.append(self._loader.load(key, slot, Priority.PREFETCH))
