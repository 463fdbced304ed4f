"""Mixtral-Offloading (arXiv 2312.17238) on Specter's decoder, cache and link: MO-SC and MO-SM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baselines.mixtral_offloading.lookahead import SpeculativeLoading, likeliest_of
from baselines.mixtral_offloading.lru_residency import LruResidency
from baselines.mixtral_offloading.swap_link import SwapLink
from baselines.mixtral_offloading.swap_residency import SwapResidency
from harness.system import MemorySpec
from harness.systems.engine_system import EngineSystem
from specter_core.assembly import build_engine, fixed_parts
from specter_core.engine import SpecterEngine
from specter_core.errors import UserError
from specter_core.opening import LoadedModel
from specter_core.options import EngineOptions
from specter_core.policies import Replacements

SPARE_BUFFERS = 4
_CAPACITIES = ("same_cache", "same_memory")
_VARIANTS = ("improved", "as_released")


class MixtralOffloading(EngineSystem):
    """Per-layer LRU of full-precision experts, no draft.

    variant improved: speculative loading into spare buffers, victims dropped. as_released: no speculative loading,
    victims written back, copies and computation take turns.

    capacity same_cache: Specter's number of slots, the spare buffers on top. same_memory: Specter's total bytes, the
    draft's share spent on slots and spare buffers.
    """

    def __init__(
        self,
        options: EngineOptions,
        *,
        variant: str,
        capacity: str,
        spare_buffers: int,
        likeliest: int | None,
        named: str | None = None,
    ) -> None:
        super().__init__(options, variant=named or variant)
        self._algorithm = variant
        self._capacity = capacity
        self._spare = spare_buffers
        self._likeliest = likeliest

    def build(self, model: LoadedModel, options: EngineOptions, memory: MemorySpec) -> SpecterEngine:
        entry_bytes = model.store.layout.entry_bytes
        guesses = self._guesses(model)
        spare = self._spare if guesses or self._algorithm == "as_released" else 0
        options = replace(options, staging_slots=spare)
        if self._capacity == "same_cache":
            budget = sum(fixed_parts(model, options).values()) + spare * entry_bytes
            budget += self._specter_slots(model, options, memory) * entry_bytes
        elif memory.budget_bytes is None:
            raise UserError("capacity 'same_memory' needs a budget and 0 were given; choose a memory setting with one")
        else:
            budget = memory.budget_bytes
        rate = memory.link_rate_bytes_per_s
        if self._algorithm == "as_released":
            swapping = Replacements(
                link=lambda link, slots, cache: SwapLink(link, slots, cache, rate),
                residency=lambda cache: SwapResidency(cache, self._spare),
            )
            return build_engine(model, options, budget_bytes=budget, rate_bytes_per_s=rate, replacements=swapping)
        lru = Replacements(residency=LruResidency)
        engine = build_engine(model, options, budget_bytes=budget, rate_bytes_per_s=rate, replacements=lru)
        if guesses:
            engine.install_hook(SpeculativeLoading(engine.experts.loader, guesses))
        return engine

    def _guesses(self, model: LoadedModel) -> int:
        """Experts per layer to load speculatively. Not on a CUDA device unless asked for: there, between a layer's end
        and the next one's router lies a tenth of a millisecond, less than the gate and a third of a load take."""
        if self._likeliest is not None:
            return self._likeliest
        return 0 if model.decoder.device.type == "cuda" else likeliest_of(model.decoder.config.top_k)

    def _specter_slots(self, model: LoadedModel, options: EngineOptions, memory: MemorySpec) -> int:
        """Slots over all layers that Specter has in this memory setting."""
        config, entry_bytes = model.decoder.config, model.store.layout.entry_bytes
        layers = len(config.moe_layers)
        if memory.slots_per_layer is not None:
            return memory.slots_per_layer * layers
        assert memory.budget_bytes is not None, "a memory setting gives slots or a budget"
        draft_bytes = layers * config.num_experts * config.expert_params * 33 // 64
        free = memory.budget_bytes - sum(fixed_parts(model, options).values()) - draft_bytes
        return max(layers, free // entry_bytes)


def create(options: Mapping[str, Any]) -> MixtralOffloading:
    """options: capacity (same_cache | same_memory), variant (improved | as_released), spare_buffers, likeliest
    (experts guessed per layer; 0: none), named (what the rows call it, if not the variant)."""
    variant, capacity = str(options.get("variant", "improved")), str(options.get("capacity", "same_memory"))
    if variant not in _VARIANTS:
        raise UserError(f"variant {variant!r} is unknown, known are {', '.join(_VARIANTS)}; choose one of these")
    if capacity not in _CAPACITIES:
        raise UserError(f"capacity {capacity!r} is unknown, known are {', '.join(_CAPACITIES)}; choose one of these")
    return MixtralOffloading(
        EngineOptions(depth=0, prefetch=False, eviction="lru"),
        variant=variant,
        capacity=capacity,
        spare_buffers=int(options.get("spare_buffers", SPARE_BUFFERS)),
        likeliest=options.get("likeliest"),
        named=options.get("named"),
    )
