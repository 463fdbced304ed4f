"""A synthetic model in memory, and as a stream of named tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from harness.synthetic.experts import expert
from harness.synthetic.nested import nest
from harness.synthetic.source import EMBEDDING, HEAD, SyntheticSource
from harness.synthetic.spec import SyntheticSpec
from harness.synthetic.store import create_store, draft_from_store, draft_layers, fill_store
from specter_core.device_runtime import DeviceRuntime
from specter_core.errors import UserError
from specter_core.memory.host_store import HostExpertStore, StoreHandle
from specter_core.model.decoder import Decoder, ops_for
from specter_core.model.families import family_named
from specter_core.model.norm import load_norm
from specter_core.model.tensor_source import TensorSource
from specter_core.opening import COMPUTE_DTYPES, LoadedModel, open_model
from specter_core.types import ExpertKey

if TYPE_CHECKING:
    from specter_core.draft.kernels.block_path import BlockExpertPath


def build_decoder(spec: SyntheticSpec, device: torch.device | str) -> Decoder:
    """The shared instance, made on the device: bfloat16 on CUDA, float32 copies of the same on the CPU, with the
    device's own operations."""
    target = torch.device(device)
    config, ops = spec.model_config, ops_for(target)
    made = SyntheticSource(spec, target, COMPUTE_DTYPES[target.type])
    source = cast(TensorSource, made)
    table = made.get(EMBEDDING)
    layers = family_named(config.family).build_layers(config, source, ops)
    norm = load_norm("model.norm", config, source, ops)
    return Decoder(
        config, table, layers, norm, made.get(HEAD), made.get_optional("lm_head.bias", config.head_bias), ops
    )


def open_synthetic(
    spec: SyntheticSpec,
    device: torch.device | str,
    store_handle: StoreHandle | None = None,
    *,
    need_draft: bool = True,
    fused: bool = True,
    noise: float = 0.0,
    encoding: str = "plain",
) -> LoadedModel:
    """As `specter_core.opening.open_model`, without a folder.

    store_handle: attach to a store that `fill_store` filled from the same spec, else make one and own it. fused: on
    CUDA the draft goes straight into the kernels' layout, layer by layer, without a copy on the host; False also keeps
    it in canonical layout (the unfused ablation). noise: sigma added to the draft's codes. UserError: unknown or absent
    device, too little host memory.
    """
    target = torch.device(device)
    if target.type not in COMPUTE_DTYPES:
        raise UserError(f"device {target} is unknown, known are {', '.join(COMPUTE_DTYPES)}; choose one of these")
    if target.type == "cuda" and not torch.cuda.is_available():
        raise UserError("device 'cuda' was asked for and 0 CUDA devices are visible; use device 'cpu'")
    store = HostExpertStore.attach(store_handle) if store_handle else create_store(spec)
    runtime: DeviceRuntime | None = None
    try:
        if target.type == "cuda":
            from specter_core.device_runtime import CudaRuntime

            runtime = CudaRuntime()
            runtime.register(store.segment)
        if not store.ready:
            fill_store(spec, store, target, locked=True)
        model = LoadedModel(build_decoder(spec, target), store, None, runtime=runtime)
        if need_draft or encoding == "nested":
            add_draft(model, target, encoding=encoding, fused=fused, noise=noise)
    except BaseException:
        if runtime:
            runtime.close()
        store.discard()
        raise
    return model


def open_written(
    folder: Path, device: str, store_handle: StoreHandle | None = None, *, encoding: str = "plain"
) -> LoadedModel:
    """A written checkpoint, which has no draft beside it, with the draft that the same weights have in memory."""
    model = open_model(folder, device=device, store=store_handle, need_draft=False)
    try:
        if model.runtime:
            model.runtime.register(model.store.segment)
        add_draft(model, torch.device(device), encoding=encoding)
    except BaseException:
        model.close()
        raise
    return model


def add_draft(
    model: LoadedModel, target: torch.device, *, encoding: str, fused: bool = True, noise: float = 0.0
) -> None:
    """Fills in the draft of a model that was opened plain without one, made from its store, which is page-locked where
    target is a CUDA device. The rest as for `open_synthetic`."""
    if encoding == "nested":
        nest(model, target, noise=noise)
    else:
        _add_draft(model, target, fused, noise)


def tensor_names(spec: SyntheticSpec) -> list[str]:
    """Every Hugging Face name, in the order of `tensors`: embedding, layers, final norm, head."""
    config = spec.model_config
    family = family_named(config.family)
    names = [name for name in family.expected_tensors(config) if ".experts." not in name]
    found = [EMBEDDING]
    for layer in range(config.layers):
        found += [name for name in names if name.startswith(f"model.layers.{layer}.")]
        if layer in config.moe_index:
            found += [name for e in range(config.num_experts) for name in family.expert_names(layer, e)]
    return found + [name for name in names if not name.startswith("model.layers.") and name != EMBEDDING]


def tensors(spec: SyntheticSpec, device: torch.device | str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor by its Hugging Face name, in the model's dtype, made one at a time on the device."""
    config = spec.model_config
    family, source = family_named(config.family), SyntheticSource(spec, device)
    experts = {
        family.expert_names(layer, e).gate: ExpertKey(index, e)
        for layer, index in config.moe_index.items()
        for e in range(config.num_experts)
    }
    pending: list[Tensor] = []
    for name in tensor_names(spec):
        if name in experts:
            pending = list(expert(spec, experts[name], device))  # gate, up, down follow one another
        yield name, pending.pop(0) if pending else source.get(name)


def _add_draft(model: LoadedModel, target: torch.device, fused: bool, noise: float) -> None:
    if model.runtime is None or not fused:
        model.draft = draft_from_store(model.store, target, noise=noise, locked=True)
        return
    from specter_core.draft.kernels.block_path import BlockExpertPath

    config = model.decoder.config
    layers = draft_layers(model.store, target, noise=noise)
    path = BlockExpertPath.from_layers(
        layers, config.hidden, config.expert_width, config.top_k, target, pdl=model.runtime.pdl
    )
    model.fused_kind = "rtn"
    _compact(path)
    model.fused_draft = path


def _compact(path: BlockExpertPath) -> None:
    """Copies each matrix once: it moves into a hole that making the layers has left, and its own place, which kept a
    large block from going back to the device, is free. A budget then loses less to the allocator."""
    torch.cuda.empty_cache()
    for side in (path.gate_up, path.down):
        for layer, matrix in enumerate(side):
            side[layer] = type(matrix)(*(part.clone() for part in matrix))
    torch.cuda.empty_cache()
