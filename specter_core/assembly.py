"""Puts an engine together: model folder -> shared instance, host store, draft; then options and memory -> engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specter_core.cpu_parts import CpuParts
from specter_core.device_runtime import CudaRuntime, DeviceRuntime
from specter_core.draft.draft_store import DraftExperts, draft_bytes, load_draft, quantize_rtn
from specter_core.engine import SpecterEngine
from specter_core.errors import UserError
from specter_core.memory.budget import CONTEXT_BYTES, SlotPlan, fixed_slots, plan_slots
from specter_core.memory.eviction import POLICIES
from specter_core.memory.expert_cache import ExpertCache
from specter_core.memory.expert_loader import ExpertLoader
from specter_core.memory.host_store import HostExpertStore, StoreHandle
from specter_core.memory.link import Link
from specter_core.memory.payload import PayloadLayout
from specter_core.memory.pin_limit import PinLimit
from specter_core.memory.slot_buffer import SlotBuffer
from specter_core.model.checkpoint import Checkpoint
from specter_core.model.config import ModelConfig
from specter_core.model.decoder import Decoder
from specter_core.model.experts_loader import expert_dtype, fill_store
from specter_core.nested.disk import load_nested, save_nested, source_of
from specter_core.nested.nesting import nested_store
from specter_core.options import EngineOptions
from specter_core.passes import DraftExpertsPath
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

COMPUTE_DTYPES = {"cpu": torch.float32, "cuda": None}


@dataclass(slots=True)
class LoadedModel:
    """A model in memory: the shared instance on the device, all experts in the host store, the INT4 draft."""

    decoder: Decoder
    store: HostExpertStore
    draft: DraftExperts | None
    fused_draft: DraftExpertsPath | None = None  # `draft` in the CUDA kernels' layout, made at first use
    runtime: DeviceRuntime | None = None  # of device "cuda"; keeps the store page-locked
    fused_kind: str = "none"  # the method behind `fused_draft` where it was made without `draft`

    @property
    def draft_kind(self) -> str:
        return self.draft.kind if self.draft else self.fused_kind

    def close(self) -> None:
        """Unmaps the store, and removes it when this process made it."""
        if self.runtime:
            self.runtime.close()
        self.store.close()
        if self.store.owner:
            self.store.unlink()

    def __enter__(self) -> LoadedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_model(
    model_dir: Path,
    draft_dir: Path | None = None,
    *,
    device: str = "cpu",
    store: StoreHandle | None = None,
    need_draft: bool = True,
    rtn_if_missing: bool = False,
    noise: float = 0.0,
    encoding: str = "plain",
    nested_dir: Path | None = None,
    pin_limit: PinLimit | None = None,
    numa_node: int | None = None,
) -> LoadedModel:
    """Loads a Hugging Face folder and its draft (default: its subfolder `draft`).

    store: attach to a host store that another process filled, else fill one. rtn_if_missing: quantize a
    round-to-nearest draft in memory where there is no draft folder. noise: sigma added to the draft's codes (tests).
    encoding "nested": the host store then holds residuals to the draft's codes, which are needed at depth 0 too;
    nested_dir: a folder that keeps them, so that the next start with this checkpoint and draft folder does not encode.
    pin_limit: how much host memory device "cuda" may page-lock. numa_node: of a store that is filled here, instead of
    the GPU's. Raises UserError for anything wrong with the folders, the device or the draft.
    """
    if device not in COMPUTE_DTYPES:
        raise UserError(f"device {device!r} is unknown, known are {', '.join(COMPUTE_DTYPES)}; choose one of these")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "device 'cuda' was asked for and 0 CUDA devices are visible; use device 'cpu' or install a driver"
        )
    decoder = Decoder.load(model_dir, device=device, compute_dtype=COMPUTE_DTYPES[device])
    folder = draft_dir or model_dir / "draft"
    need_draft = need_draft or encoding == "nested"
    if need_draft and not folder.is_dir() and not (rtn_if_missing and draft_dir is None):
        raise UserError(
            f"draft folder {folder} does not exist; make it with initialization/quantize_draft.py or use depth 0"
        )
    runtime = CudaRuntime(pin_limit) if device == "cuda" else None
    draft: DraftExperts | None = None
    kept = encoding == "nested" and nested_dir is not None and folder.is_dir() and not noise
    if kept and nested_dir is not None:
        draft = load_draft(folder, decoder.config)
        found = load_nested(nested_dir, draft, source_of((model_dir, folder)))
        if found is not None:
            return LoadedModel(decoder, found, draft, runtime=runtime)
    if store:
        host = HostExpertStore.attach(store)
    else:
        limit = runtime.pin_limit if runtime and encoding == "plain" else None  # a nested store is smaller
        host = fill_host_store(model_dir, decoder.config, pin_limit=limit, numa_node=numa_node)
    draft = None
    if need_draft and folder.is_dir():
        draft = load_draft(folder, decoder.config)
    elif need_draft:
        draft = quantize_rtn(lambda key: host.layout.views(host.entry(key)), decoder.config)
    if draft and noise:
        draft = draft.with_noise(noise, seed=0)
    if encoding == "nested":
        assert draft is not None
        host = _nested(host, draft, device)
        if kept and nested_dir is not None:
            save_nested(nested_dir, host, draft, source_of((model_dir, folder)))
    return LoadedModel(decoder, host, draft, runtime=runtime)


def _nested(plain: HostExpertStore, draft: DraftExperts, device: str) -> HostExpertStore:
    """The store of residuals in the place of `plain`, which is given back."""
    try:
        store, report = nested_store(plain, draft, device=device)
    finally:
        plain.close()
        if plain.owner:
            plain.unlink()
    logging.getLogger(__name__).info("%s", report)
    return store


def fill_host_store(
    model_dir: Path,
    config: ModelConfig,
    *,
    threads: int = 4,
    progress: Callable[[int, int], None] | None = None,
    pin_limit: PinLimit | None = None,
    numa_node: int | None = None,
) -> HostExpertStore:
    """A new shared host store with every routed expert of the checkpoint, ready to be attached to. UserError when it
    would have to be page-locked and is larger than pin_limit."""
    with Checkpoint(model_dir) as checkpoint:
        layout = PayloadLayout(config.hidden, config.expert_width, expert_dtype(checkpoint, config))
        if pin_limit:
            pin_limit.check(len(config.moe_layers) * config.num_experts * layout.entry_bytes)
        store = HostExpertStore.create(len(config.moe_layers), config.num_experts, layout, numa_node=numa_node)
        try:
            fill_store(checkpoint, config, store, threads=threads, progress=progress)
        except BaseException:
            store.close()
            store.unlink()
            raise
    store.mark_ready()
    return store


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
