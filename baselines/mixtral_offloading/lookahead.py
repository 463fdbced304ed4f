"""Speculative expert loading of Mixtral-Offloading (Eliseev and Mazur, arXiv 2312.17238, section 3.2)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from specter_core.memory.expert_cache import SlotState
from specter_core.memory.expert_loader import ExpertLoader
from specter_core.memory.link import Priority
from specter_core.model.layer import DecoderLayer
from specter_core.types import ExpertKey


class SpeculativeLoading:
    """After a layer's experts are in place, the next layer's gate is applied to this layer's hidden state and its
    likeliest absent experts are loaded into the spare buffers, outside the LRU. When the next layer uses one, the
    spare buffer replaces that layer's least recently used slot.
    """

    def __init__(self, loader: ExpertLoader, likeliest: int) -> None:
        self._loader = loader
        self._cache = loader.cache
        self._likeliest = likeliest

    def before_plan(self, moe_index: int, needed: Collection[int]) -> None:
        """Spare buffers whose expert this layer needs join its LRU."""
        for slot in list(self._cache.staging_slots):
            key = self._cache.key(slot)
            if key is None or key.layer != moe_index or key.expert not in needed:
                continue
            victim = self._lru_victim(moe_index, needed)
            if victim is not None:
                self._cache.adopt(slot, moe_index, victim)

    def after_layer(self, moe_index: int, hidden: Tensor, upcoming: Sequence[DecoderLayer]) -> None:
        """hidden [R, H]: this layer's output; the experts of the next MoE layer are guessed from it."""
        layer = next((candidate for candidate in upcoming if candidate.moe_index is not None), None)
        if layer is None or layer.moe_index is None:
            return
        scores = layer.gate(hidden)  # [R, E]
        chosen = scores.topk(min(self._likeliest, scores.shape[1]), dim=1).indices  # [R, likeliest]
        self._loader.reap()
        for expert in dict.fromkeys(chosen.T.reshape(-1).tolist()):
            key = ExpertKey(layer.moe_index, expert)
            if self._cache.lookup(key) is not None:
                continue
            slot = self._free_spare()
            if slot is None:
                return
            self._loader.load(key, slot, Priority.PREFETCH)

    def _free_spare(self) -> int | None:
        """A spare buffer that nothing is loading into or computing from; a wrong guess in it is dropped."""
        for state in (SlotState.EMPTY, SlotState.RESIDENT):
            for slot in self._cache.staging_slots:
                if self._cache.state(slot) is state:
                    return slot
        return None

    def _lru_victim(self, layer: int, needed: Collection[int]) -> int | None:
        candidates = []
        for slot in self._cache.layer_slots(layer):
            key = self._cache.key(slot)
            if self._cache.state(slot) is SlotState.EMPTY:
                return slot
            if self._cache.state(slot) is SlotState.RESIDENT and key is not None and key.expert not in needed:
                candidates.append((self._cache.recency(slot), slot))
        return min(candidates)[1] if candidates else None


def likeliest_of(top_k: int) -> int:
    """The paper prefetches one to two experts of a top-2 model."""
    return min(2, top_k)
