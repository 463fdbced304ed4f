"""Routed experts from safetensors straight into the host store."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock, local
from typing import Protocol

import torch
from torch import Tensor

from specter_core.errors import UserError
from specter_core.model.checkpoint import Checkpoint
from specter_core.model.config import ModelConfig
from specter_core.model.families import family_named
from specter_core.model.family import Family, expert_tensors
from specter_core.model.plain_forward import ExpertWeights
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


def expert_dtype(checkpoint: Checkpoint, config: ModelConfig) -> torch.dtype:
    """The dtype in which the routed experts are stored. UserError when it is no float (or the expert is
    absent).
    """
    family = family_named(config.family)
    name = resolve(checkpoint, family, family.expert_names(config.moe_layers[0], 0).gate)
    dtype = checkpoint.dtype(name)
    if dtype not in FLOAT_DTYPES:
        raise UserError(
            f"{name} has dtype {dtype}, a target needs BF16, F16 or F32; give an unquantized checkpoint"
        )
    return dtype


class ExpertReader:
    """Reads one expert at a time into buffers of its own, reused by the next; one reader per thread."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._family: Family = family_named(config.family)
        wide = (config.expert_width, config.hidden)
        self._buffers = ExpertWeights(
            torch.empty(wide, dtype=dtype),
            torch.empty(wide, dtype=dtype),
            torch.empty(wide[::-1], dtype=dtype),
        )

    def read(self, key: ExpertKey) -> ExpertWeights:
        """The expert's tensors, valid until the next read."""
        names = self._family.expert_names(self._config.moe_layers[key.layer], key.expert)
        for name, buffer in zip(names, self._buffers, strict=True):
            self._checkpoint.read_into(resolve(self._checkpoint, self._family, name), buffer)
        return self._buffers


def check_experts(checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype) -> None:
    """Every routed expert's tensors are there, with their shapes and this dtype; else UserError."""
    family = family_named(config.family)
    for name, shape in expert_tensors(family, config).items():
        actual = resolve(checkpoint, family, name)
        checkpoint.require({name: shape}, {name: actual})
        if checkpoint.dtype(actual) != dtype:
            raise UserError(
                f"{actual} has dtype {checkpoint.dtype(actual)}, others {dtype}; convert the checkpoint"
            )


def read_experts(checkpoint: Checkpoint, config: ModelConfig) -> dict[ExpertKey, ExpertWeights]:
    """Every routed expert in memory, as stored: for small models and reference runs."""
    dtype = expert_dtype(checkpoint, config)
    check_experts(checkpoint, config, dtype)
    return {key: ExpertReader(checkpoint, config, dtype).read(key) for key in expert_keys(config)}


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
