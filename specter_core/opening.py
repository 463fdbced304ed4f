"""Opens a model: folder -> shared instance on the device, experts in the host store, INT4 draft."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from specter_core.device_runtime import CudaRuntime, DeviceRuntime
from specter_core.draft.draft_store import CARD_NAME, DraftExperts, load_draft, quantize_rtn
from specter_core.errors import UserError
from specter_core.memory.host_store import HostExpertStore, StoreHandle
from specter_core.memory.payload import PayloadLayout
from specter_core.memory.pin_limit import PinLimit
from specter_core.model.checkpoint import Checkpoint
from specter_core.model.config import ModelConfig
from specter_core.model.decoder import Decoder
from specter_core.model.experts_loader import expert_dtype, fill_store
from specter_core.nested.disk import load_nested, save_nested, source_of
from specter_core.nested.nesting import nested_store
from specter_core.passes import DraftExpertsPath

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
        self.store.discard()

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
    _check_device(device)
    decoder = Decoder.load(model_dir, device=device, compute_dtype=COMPUTE_DTYPES[device])
    folder = draft_dir or model_dir / "draft"
    need_draft = need_draft or encoding == "nested"
    if need_draft and not folder.is_dir() and not (rtn_if_missing and draft_dir is None):
        raise UserError(
            f"draft folder {folder} does not exist; make it with initialization/quantize_draft.py or use depth 0"
        )
    if need_draft:
        _check_family(folder, decoder.config.family)
    runtime = CudaRuntime(pin_limit) if device == "cuda" else None
    draft = load_draft(folder, decoder.config) if need_draft and folder.is_dir() else None
    kept = nested_dir if encoding == "nested" and draft and not noise else None
    if kept and draft:
        found = load_nested(kept, draft, source_of((model_dir, folder)))
        if found is not None:
            return LoadedModel(decoder, found, draft, runtime=runtime)
    if store:
        host = HostExpertStore.attach(store)
    else:
        limit = runtime.pin_limit if runtime and encoding == "plain" else None  # a nested store is smaller
        host = fill_host_store(model_dir, decoder.config, pin_limit=limit, numa_node=numa_node)
    if need_draft and draft is None:
        draft = quantize_rtn(lambda key: host.layout.views(host.entry(key)), decoder.config)
    if draft and noise:
        draft = draft.with_noise(noise, seed=0)
    if encoding == "nested" and draft:
        host = _nested(host, draft, device)
        if kept:
            save_nested(kept, host, draft, source_of((model_dir, folder)))
    return LoadedModel(decoder, host, draft, runtime=runtime)


def _check_device(device: str) -> None:
    if device not in COMPUTE_DTYPES:
        raise UserError(f"device {device!r} is unknown, known are {', '.join(COMPUTE_DTYPES)}; choose one of these")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "device 'cuda' was asked for and 0 CUDA devices are visible; use device 'cpu' or install a driver"
        )


def _check_family(draft_dir: Path, family: str) -> None:
    """UserError for a draft whose card says that it was made of a model of another family. Without a card, or with a
    damaged one, `load_draft` has the say."""
    try:
        made_of = json.loads((draft_dir / CARD_NAME).read_text(encoding="utf-8"))["family"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if made_of != family:
        raise UserError(f"draft {draft_dir} was made of a {made_of} model, not of a {family}; name the target's own")


def _nested(plain: HostExpertStore, draft: DraftExperts, device: str) -> HostExpertStore:
    """The store of residuals in the place of `plain`, which is given back."""
    try:
        store, report = nested_store(plain, draft, device=device)
    finally:
        plain.discard()
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
        with store.filling():
            fill_store(checkpoint, config, store, threads=threads, progress=progress)
    return store
