"""Puts an engine together: a loaded model, options and memory -> engine."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from specter_core.cpu_parts import CpuParts
from specter_core.device_runtime import DeviceRuntime
from specter_core.draft.draft_store import draft_bytes
from specter_core.engine import SpecterEngine
from specter_core.memory.budget import CONTEXT_BYTES, SlotPlan, fixed_slots, plan_slots
from specter_core.memory.eviction import POLICIES
from specter_core.memory.expert_cache import ExpertCache
from specter_core.memory.expert_loader import ExpertLoader
from specter_core.memory.link import Link
from specter_core.memory.slot_buffer import SlotBuffer
from specter_core.model.config import ModelConfig
from specter_core.opening import LoadedModel
from specter_core.options import EngineOptions
from specter_core.policies import Prefetching, Replacements, Residency
from specter_core.prefetch.elb import ELB
from specter_core.prefetch.need_history import NeedHistory
from specter_core.prefetch.need_planner import NeedPlanner
from specter_core.prefetch.pattern_analyzer import PatternAnalyzer
from specter_core.prefetch.planner import Planner, PrefetchPlanner
from specter_core.prefetch.prefetcher import Prefetcher
from specter_core.state.kv_cache import KVCache
from specter_core.trace import Trace
from specter_core.verify.expert_pass import ExpertPass
from specter_core.verify.residency import ResidencyManager

if TYPE_CHECKING:
    from specter_core.cuda_parts import CudaParts


def fixed_parts(model: LoadedModel, options: EngineOptions) -> dict[str, int]:
    """Device bytes of everything but the slots, by part, in the stored dtype: the CPU's float32 copies stand for it."""
    config, decoder = model.decoder.config, model.decoder
    copies = 1 if options.shared_kv or not options.depth else 2
    kv = KVCache.bytes_per_token(config, config.dtype) * options.context_tokens * options.max_batch * copies
    shared = decoder.shared_bytes // decoder.dtype.itemsize * config.dtype.itemsize
    wanted = options.depth or model.store.layout.encoding == "nested"
    draft = draft_bytes(config) if wanted and (model.draft or model.fused_draft) else 0
    parts = {"shared": shared, "draft": draft, "kv": kv}
    if options.depth and not options.shared_weights:
        parts["draft_shared"] = shared
    if decoder.device.type == "cuda":
        parts |= {"workspace": workspace_bytes(config, options), "context": CONTEXT_BYTES}
    return parts


def workspace_bytes(config: ModelConfig, options: EngineOptions) -> int:
    """Device bytes of a pass's own buffers: rows of the longer of prefill and verification, and logits."""
    rows = max(options.context_tokens, options.max_batch * (options.depth + 1))
    per_row = config.top_k * (4 * config.hidden + 2 * config.expert_width) + 24 * config.hidden
    return rows * per_row + options.max_batch * (options.depth + 2) * config.vocab_size * 8


def slot_plan(
    model: LoadedModel, options: EngineOptions, slots_per_layer: int | None, budget_bytes: int | None
) -> SlotPlan:
    """Slots from M or from a budget. Raises UserError for M < 1 or a budget below one slot per layer.

    M slots per layer are a pool of L x M, of which staging slots take their part unless slots are uniform.
    """
    config, parts = model.decoder.config, fixed_parts(model, options)
    entry_bytes, layers = model.store.layout.entry_bytes, len(config.moe_layers)
    if budget_bytes is not None:
        whole_bytes = budget_bytes
    else:
        slots = config.num_experts if slots_per_layer is None else slots_per_layer
        whole_bytes = fixed_slots(slots, layers, config.num_experts, entry_bytes, parts).total
    return plan_slots(
        whole_bytes, parts, entry_bytes, layers, config.num_experts, options.uniform_slots, options.staging_slots
    )


def build_engine(
    model: LoadedModel,
    options: EngineOptions,
    *,
    slots_per_layer: int | None = None,
    budget_bytes: int | None = None,
    rate_bytes_per_s: float | None = None,
    trace: Trace | None = None,
    runtime: DeviceRuntime | None = None,
    replacements: Replacements | None = None,
) -> SpecterEngine:
    """An engine on a loaded model; close it before the next one is built on the same slots.

    slots_per_layer: M (None and no budget: every expert resident). rate_bytes_per_s paces the link; None: native.
    runtime: makes the device's parts run on another runtime than the current CUDA device's (tests). replacements:
    parts that another system builds in the place of Specter's.
    """
    trace, own = trace or Trace(enabled=False), replacements or Replacements()
    options = replace(options, experts_encoding=model.store.layout.encoding)
    plan = slot_plan(model, options, slots_per_layer, budget_bytes)
    config = model.decoder.config
    cache = own.cache(plan) if own.cache else ExpertCache(plan.slots_per_layer, plan.staging)
    slots = SlotBuffer(cache.slots, model.store.layout.entry_bytes, model.decoder.device)
    parts = _parts(model, options, trace, runtime)
    link: Link = parts.link(slots, rate_bytes_per_s)
    loader = ExpertLoader(cache, own.link(link, slots, cache) if own.link else link)
    history = NeedHistory(len(config.moe_layers), config.num_experts, config.top_k)
    prefetcher = (own.prefetcher or partial(_prefetcher, options, history))(loader)
    residency = (own.residency or partial(_residency, options, history))(cache)
    experts = ExpertPass(
        loader, prefetcher, residency, parts.executor(slots, loader), order=options.verify, trace=trace, history=history
    )
    analyzer = None
    if options.depth and (model.draft or model.fused_draft):
        analyzer = PatternAnalyzer(ELB(len(config.moe_layers), config.num_experts, model.decoder.device))
    return SpecterEngine(
        decoder=model.decoder,
        target=parts.target(experts),
        experts=experts,
        draft=parts.draft(analyzer) if analyzer else None,
        analyzer=analyzer,
        prefetcher=prefetcher,
        slots=plan,
        options=options,
        trace=trace,
        depth_policy=own.depth,
    )


def _prefetcher(options: EngineOptions, history: NeedHistory, loader: ExpertLoader) -> Prefetching:
    planner: Planner = PrefetchPlanner(options.initial_chunk_tokens)
    if options.planning == "need":
        planner = NeedPlanner(options.initial_chunk_tokens, history)
    ahead = options.stage_ahead and options.verify == "expertwise"
    return Prefetcher(planner, loader, under_verify=options.prefetch_under_verify, stage_ahead=ahead)


def _residency(options: EngineOptions, history: NeedHistory, cache: ExpertCache) -> Residency:
    if options.eviction == "need":
        return ResidencyManager(cache, hit_first=options.hit_first, history=history)
    return ResidencyManager(cache, hit_first=options.hit_first, policy=POLICIES[options.eviction])


def _parts(
    model: LoadedModel, options: EngineOptions, trace: Trace, runtime: DeviceRuntime | None
) -> CpuParts | CudaParts:
    """What differs between devices; Triton is imported only where it runs."""
    if runtime is None and model.decoder.device.type != "cuda":
        return CpuParts(model, options, trace)
    from specter_core.cuda_parts import CudaParts

    return CudaParts(model, options, trace, runtime)
