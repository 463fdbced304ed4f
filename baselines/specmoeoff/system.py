"""SpecMoEOff (arXiv 2508.21706) on Specter's decoder, kernels, cache and link: adapted, or streaming as published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from baselines.specmoeoff.cost_model import GRID, CostModel, Overlap
from baselines.specmoeoff.draft_length import CostModelDepth
from baselines.specmoeoff.frequency_prefetch import FRACTIONS, FrequencyPrefetch
from baselines.specmoeoff.layer_streaming import LayerStreaming, RingCache
from harness.system import MemorySpec, ModelSpec, RequestRecord
from harness.systems.engine_system import EngineSystem
from specter_core.assembly import build_engine, fixed_parts, slot_plan
from specter_core.engine import SpecterEngine
from specter_core.errors import UserError
from specter_core.memory.expert_loader import ExpertLoader
from specter_core.opening import LoadedModel
from specter_core.options import EngineOptions
from specter_core.policies import Prefetching, Replacements
from specter_core.prefetch.prefetcher import Prefetcher
from specter_core.types import Request

VARIANTS = ("adapted", "shared_weights", "streaming")
CALIBRATION_PROMPT_TOKENS = 8
CALIBRATION_RUNS = 16


class SpecMoEOff(EngineSystem):
    """Speculative decoding with offloaded experts; the draft length comes from a cost model.

    adapted: INT4 draft with weights and KV of its own, prefetch by draft routing frequencies, per-layer LRU.
    shared_weights: the same algorithm with Specter's shared tensors and KV. streaming: every expert of the next layer
    crosses the link while a layer computes. Two micro-batches when B > 1.
    """

    def __init__(self, *, variant: str, grid: Sequence[int], fractions: Sequence[float]) -> None:
        streaming, shared = variant == "streaming", variant == "shared_weights"
        options = EngineOptions(
            depth=max(grid),
            prefetch=not streaming,
            prefetch_under_verify=False,
            shared_kv=shared,
            shared_weights=shared,
            uniform_slots=not streaming,
            staging_slots=0,
            eviction="lru",
        )
        super().__init__(options, variant=variant)
        self._streaming = streaming
        self._grid = tuple(grid)
        self._fractions = tuple(fractions)
        self._batch, self._max_sequence = 1, 1

    def load(self, model: ModelSpec, memory: MemorySpec) -> None:
        """Loads and measures the costs that the simulator starts from, on text of the model's own."""
        self._batch, self._max_sequence = memory.batch, memory.max_sequence
        super().load(model, memory)
        self._calibrate()

    def build(self, model: LoadedModel, options: EngineOptions, memory: MemorySpec) -> SpecterEngine:
        """Specter's total bytes, of which a draft that shares nothing takes more."""
        options = replace(options, verify="microbatches" if memory.batch > 1 else "expertwise")
        budget = memory.budget_bytes
        if budget is None:
            specter = replace(options, shared_kv=True, shared_weights=True)
            budget = slot_plan(model, specter, memory.slots_per_layer, None).total
        if self._streaming:
            budget = _ring_bytes(model, options, budget)
        config, entry_bytes = model.decoder.config, model.store.layout.entry_bytes
        layers, experts = len(config.moe_layers), config.num_experts
        slots = slot_plan(model, options, None, budget).slots
        overlap = Overlap(1.0, slots, streaming=True) if self._streaming else Overlap(1.0 - min(self._fractions), slots)
        self.policy = CostModelDepth(CostModel(0.0, overlap), layers * config.top_k, entry_bytes, self._grid)

        def streaming(loader: ExpertLoader) -> Prefetching:
            self.stream = LayerStreaming(loader, layers, experts)
            return self.stream

        def by_frequency(loader: ExpertLoader) -> Prefetching:
            return Prefetcher(FrequencyPrefetch(self._fractions), loader, under_verify=True)

        if self._streaming:
            own = Replacements(cache=lambda plan: RingCache(plan, experts), prefetcher=streaming, depth=self.policy)
        else:
            own = Replacements(prefetcher=by_frequency, depth=self.policy)
        engine = build_engine(
            model,
            options,
            budget_bytes=budget,
            rate_bytes_per_s=memory.link_rate_bytes_per_s,
            replacements=own,
        )
        self.policy.model.entry_ms = engine.experts.loader.entry_ms
        if self._streaming:
            engine.install_hook(self.stream)
        return engine

    def generate(self, requests: Sequence[Request]) -> list[RequestRecord]:
        """`depth` of the records is the mean of the lengths that were chosen, rounded."""
        self.policy.chosen.clear()
        found = super().generate(requests)
        chosen = self.policy.chosen
        depth = round(sum(chosen) / len(chosen)) if chosen else 0
        return [replace(record, depth=depth) for record in found]

    def _calibrate(self) -> None:
        """Runs batches of arbitrary short prompts until the calibration windows are through."""
        assert self._engine is not None
        vocab = self._engine.decoder.config.vocab_size
        length = max(1, min(CALIBRATION_PROMPT_TOKENS, self._max_sequence // 2))
        for run in range(CALIBRATION_RUNS):
            if self.policy.calibrated:
                break
            prompts = [tuple((97 * (run + b) + 13 * i) % vocab for i in range(length)) for b in range(self._batch)]
            new_tokens = max(1, self._max_sequence - length)
            self._engine.reset_cache()
            self._engine.generate(
                [Request(f"calibration {b}", p, new_tokens, ignore_eos=True) for b, p in enumerate(prompts)]
            )


def _ring_bytes(model: LoadedModel, options: EngineOptions, budget_bytes: int) -> int:
    """What streaming spends: at most two layers of experts. UserError below one layer."""
    config, entry_bytes = model.decoder.config, model.store.layout.entry_bytes
    fixed = sum(fixed_parts(model, options).values())
    fitting = (budget_bytes - fixed) // entry_bytes
    least = max(config.num_experts, len(config.moe_layers))
    if fitting < least:
        raise UserError(
            f"budget {budget_bytes / 1e9:.3g} GB leaves {max(0, fitting)} slots, streaming needs {least} for a whole"
            f" layer; raise the budget to at least {(fixed + least * entry_bytes) / 1e9:.6f} GB"
        )
    return fixed + min(fitting, 2 * config.num_experts) * entry_bytes


def create(options: Mapping[str, Any]) -> SpecMoEOff:
    """options: variant (adapted | shared_weights | streaming), depth (the longest draft), grid (draft lengths to choose
    from, as far as they are not longer), fractions (of the draft, at which experts are prefetched).
    """
    known = ("variant", "grid", "fractions", "depth", "named")
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise UserError(f"unknown option {unknown[0]!r}, known are {', '.join(known)}; correct it")
    variant = str(options.get("variant", "adapted"))
    if variant not in VARIANTS:
        raise UserError(f"variant {variant!r} is unknown, known are {', '.join(VARIANTS)}; choose one of these")
    longest = int(options.get("depth", max(GRID)))
    grid = [int(k) for k in options.get("grid", GRID) if 1 <= int(k) <= longest]
    if not grid:
        raise UserError(
            f"grid has no draft length of 1 … {longest} (depth); give for example grid={list(GRID)} depth=32"
        )
    return SpecMoEOff(variant=variant, grid=grid, fractions=[float(f) for f in options.get("fractions", FRACTIONS)])
