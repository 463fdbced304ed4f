"""Routed experts from safetensors straight into the host store."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock, local
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specter_core.errors import UserError
from specter_core.model.checkpoint import Checkpoint
from specter_core.model.config import ModelConfig
from specter_core.model.families import family_named
from specter_core.model.family import fused_expert_names
from specter_core.model.tensor_source import FLOAT_DTYPES, resolve
from specter_core.types import ExpertKey


class Layout(Protocol):
    """What is needed of a PayloadLayout."""

    @property
    def dtype(self) -> torch.dtype: ...

    def write(self, entry: Tensor, key: ExpertKey, gate: Tensor, up: Tensor, down: Tensor) -> None: ...


class Store(Protocol):
    """What is needed of a HostExpertStore."""

    @property
    def layout(self) -> Layout: ...

    def entry(self, key: ExpertKey) -> Tensor: ...


class ExpertWeights(NamedTuple):
    """gate and up [I, H], down [H, I]."""

    gate: Tensor
    up: Tensor
    down: Tensor


class Part(NamedTuple):
    """Where one matrix of an expert lies: rows first_row, first_row + 1, … of the tensor, leading dims
    flattened.
    """

    name: str
    first_row: int


def locate(checkpoint: Checkpoint, config: ModelConfig, key: ExpertKey) -> tuple[Part, Part, Part]:
    """gate, up, down of an expert: per-expert tensors (official or alias names), or slices of the fused
    ones that transformers 5 writes with save_original_format=False. UserError when neither is there.
    """
    family = family_named(config.family)
    layer = config.moe_layers[key.layer]
    fused = fused_expert_names(layer)
    if fused.gate_up in checkpoint.names:
        row = key.expert * 2 * config.expert_width
        gate, up = Part(fused.gate_up, row), Part(fused.gate_up, row + config.expert_width)
        return gate, up, Part(fused.down, key.expert * config.hidden)
    gate_name, up_name, down_name = (
        resolve(checkpoint, family, name) for name in family.expert_names(layer, key.expert)
    )
    return Part(gate_name, 0), Part(up_name, 0), Part(down_name, 0)


def expert_dtype(checkpoint: Checkpoint, config: ModelConfig) -> torch.dtype:
    """The dtype in which the routed experts are stored. UserError when it is no float (or the expert is
    absent).
    """
    name = locate(checkpoint, config, ExpertKey(0, 0))[0].name
    dtype = checkpoint.dtype(name)
    if dtype not in FLOAT_DTYPES:
        raise UserError(f"{name} has dtype {dtype}, a target needs BF16, F16 or F32; give the original checkpoint")
    return dtype


def check_experts(checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype) -> None:
    """Every routed expert's tensors are there, with their shapes and this dtype; else UserError."""
    wide, tall = (config.expert_width, config.hidden), (config.hidden, config.expert_width)
    for layer, decoder_layer in enumerate(config.moe_layers):
        fused = fused_expert_names(decoder_layer)
        if fused.gate_up in checkpoint.names:
            shapes: dict[str, tuple[int, ...]] = {
                fused.gate_up: (config.num_experts, 2 * config.expert_width, config.hidden),
                fused.down: (config.num_experts, *tall),
            }
        else:
            shapes = {}
            for expert in range(config.num_experts):
                names = (part.name for part in locate(checkpoint, config, ExpertKey(layer, expert)))
                shapes.update(zip(names, (wide, wide, tall), strict=True))
        checkpoint.require(shapes)
        for name in shapes:
            if checkpoint.dtype(name) != dtype:
                raise UserError(f"{name} has dtype {checkpoint.dtype(name)}, not {dtype}; convert the checkpoint")


class ExpertReader:
    """Reads one expert at a time into buffers of its own, reused by the next; one reader per thread."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._config = config
        wide = (config.expert_width, config.hidden)
        self._buffers = ExpertWeights(
            torch.empty(wide, dtype=dtype), torch.empty(wide, dtype=dtype), torch.empty(wide[::-1], dtype=dtype)
        )

    def read(self, key: ExpertKey) -> ExpertWeights:
        """The expert's tensors, valid until the next read."""
        for part, buffer in zip(locate(self._checkpoint, self._config, key), self._buffers, strict=True):
            self._checkpoint.read_into(part.name, buffer, part.first_row)
        return self._buffers


def expert_keys(config: ModelConfig) -> list[ExpertKey]:
    """All routed experts, layer by layer."""
    layers, experts = range(len(config.moe_layers)), range(config.num_experts)
    return [ExpertKey(layer, expert) for layer in layers for expert in experts]


def fill_store(
    checkpoint: Checkpoint,
    config: ModelConfig,
    store: Store,
    *,
    threads: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write every routed expert into its entry of the store. Extra memory: one expert per thread.

    progress(done, total) is called after each expert, from one thread at a time. UserError: a tensor that
    is absent, misshapen or of another dtype than the store's; nothing is written before all are checked.
    """
    dtype = store.layout.dtype
    check_experts(checkpoint, config, dtype)
    keys = expert_keys(config)
    readers, lock = local(), Lock()
    done = 0

    def load(key: ExpertKey) -> None:
        nonlocal done
        if not hasattr(readers, "reader"):
            readers.reader = ExpertReader(checkpoint, config, dtype)
        store.layout.write(store.entry(key), key, *readers.reader.read(key))
        with lock:
            done += 1
            if progress is not None:
                progress(done, len(keys))

    with ThreadPoolExecutor(max_workers=max(1, threads), thread_name_prefix="load") as pool:
        for _ in pool.map(load, keys):
            pass
