"""Experts into the host store, and the round-to-nearest draft out of it, layer by layer on the device."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from harness.synthetic.experts import expert_layer
from harness.synthetic.spec import SyntheticSpec
from specter_core.draft.draft_store import DraftExperts
from specter_core.draft.int4 import GROUP, Int4Matrix, unpack
from specter_core.errors import UserError
from specter_core.memory.host_registration import HostRegistration
from specter_core.memory.host_store import HostExpertStore
from specter_core.memory.payload import TRAILER_BYTES, trailer_words

CARD = {"method": "rtn", "scales": "absmax / 7", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
_EXPERTS_AT_ONCE_BYTES = 600_000_000
_OTHER_MEMORY_BYTES = 6_000_000_000
"""Host memory that a run needs beside the store: processes, CUDA contexts, page tables."""


def create_store(spec: SyntheticSpec) -> HostExpertStore:
    """An empty store of the spec's shape. UserError when the host's memory or every folder is too small for it."""
    check_host_memory(spec)
    config = spec.model_config
    return HostExpertStore.create(len(config.moe_layers), config.num_experts, spec.layout)


def check_host_memory(spec: SyntheticSpec, available: int | None = None) -> None:
    """UserError, with both numbers, unless the routed experts fit the memory that is free now."""
    free = available_memory() if available is None else available
    if free is not None and spec.store_bytes + _OTHER_MEMORY_BYTES > free:
        raise UserError(
            f"{spec.model}: the experts need {spec.store_bytes / 1e9:.1f} GB of host memory and"
            f" {_OTHER_MEMORY_BYTES / 1e9:.0f} GB beside them, {free / 1e9:.1f} GB are available; use a larger host or"
            " another model"
        )


def available_memory() -> int | None:
    """Host memory that can still be had, in bytes: what Linux reports, within the control group's limit."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    try:
        bound = limit.read_text(encoding="ascii").strip()
        return free if bound == "max" else min(free, int(bound) - int(used.read_text(encoding="ascii")))
    except (OSError, ValueError):
        return free


def fill_store(
    spec: SyntheticSpec,
    store: HostExpertStore,
    device: torch.device | str,
    progress: Callable[[int, int], None] | None = None,
    *,
    locked: bool = False,
) -> None:
    """Makes every routed expert on the device and writes it, with its trailer, into the store; then marks it ready.

    progress(layers done, layers). On CUDA the segment is page-locked meanwhile, unless the caller has (locked).
    Trailers carry no CRC (0): it would have to be computed on the host, at a second per GB and more.
    """
    assert store.layout == spec.layout, (store.layout, spec.layout)
    whole = store.segment.view(store.layers, store.experts, store.layout.entry_bytes)
    with nullcontext() if locked else page_locked(store, device):
        for layer in range(store.layers):
            whole[layer].copy_(_entries(spec, layer, device))
            if progress is not None:
                progress(layer + 1, store.layers)
    store.mark_ready()


def draft_layers(
    store: HostExpertStore, device: torch.device | str, *, noise: float = 0.0
) -> Iterator[tuple[Int4Matrix, Int4Matrix]]:
    """(gate_up [E, 2I, H], down [E, H, I]) of every MoE layer, rounded to nearest at absmax / 7 per 128 inputs, on the
    device. noise: sigma added to the codes, as `DraftExperts.with_noise`."""
    layout = store.layout
    assert layout.encoding == "plain", layout.encoding
    whole = store.segment.view(store.layers, store.experts, layout.entry_bytes)
    size = layout.hidden * layout.width
    at_once = max(1, _EXPERTS_AT_ONCE_BYTES // layout.entry_bytes)
    for layer in range(store.layers):
        generator = torch.Generator(device).manual_seed(layer)
        parts: list[tuple[Int4Matrix, Int4Matrix]] = []
        for start in range(0, store.experts, at_once):
            entries = whole[layer, start : start + at_once].to(device)[:, : layout.payload_bytes].view(layout.dtype)
            wide = entries[:, : 2 * size].unflatten(1, (2 * layout.width, layout.hidden))
            tall = entries[:, 2 * size :].unflatten(1, (layout.hidden, layout.width))
            rounded = [noisy(rounded_to_nearest(matrix), noise, generator) for matrix in (wide, tall)]
            parts.append((rounded[0], rounded[1]))
        gate_up, down = (_joined([part[side] for part in parts]) for side in (0, 1))
        yield gate_up, down


def draft_from_store(
    store: HostExpertStore, device: torch.device | str, *, noise: float = 0.0, locked: bool = False
) -> DraftExperts:
    """The whole draft in canonical layout, on the CPU; its layers are rounded on the device. kind "rtn". locked: as for
    `fill_store`."""
    with nullcontext() if locked else page_locked(store, device):
        layers = [tuple(_on_cpu(m) for m in layer) for layer in draft_layers(store, device, noise=noise)]
    gate_up, down = (
        Int4Matrix(
            torch.stack([layer[side].codes for layer in layers]), torch.stack([layer[side].scales for layer in layers])
        )
        for side in (0, 1)
    )
    return DraftExperts(gate_up, down, "rtn", CARD | ({"noise": noise} if noise else {}))


def rounded_to_nearest(weight: Tensor) -> Int4Matrix:
    """[..., out, in] -> INT4 at absmax / 7 per 128 inputs, on the weight's device."""
    groups = weight.unflatten(-1, (-1, GROUP)).float()
    scales = (groups.abs().amax(-1) / 7).half()
    codes = (groups / scales.float().unsqueeze(-1)).round_().clamp_(-8, 7).add_(8).to(torch.uint8).flatten(-2)
    return Int4Matrix(codes[..., 0::2] | (codes[..., 1::2] << 4), scales)


@contextmanager
def page_locked(store: HostExpertStore, device: torch.device | str) -> Iterator[None]:
    """The store's segment is registered with the CUDA device meanwhile; nothing to do for another one."""
    if torch.device(device).type != "cuda":
        yield
        return
    registration = HostRegistration(store.segment, threads=os.cpu_count() or 1)
    try:
        yield
    finally:
        torch.cuda.synchronize()
        registration.close()


def _entries(spec: SyntheticSpec, layer: int, device: torch.device | str) -> Tensor:
    """uint8 [E, entry_bytes] of a MoE layer, on the device."""
    layout, experts = spec.layout, spec.model_config.num_experts
    size = layout.hidden * layout.width
    found = torch.zeros(experts, layout.entry_bytes, dtype=torch.uint8, device=device)
    flat = found[:, : layout.payload_bytes].view(layout.dtype)
    for part, matrices in enumerate(expert_layer(spec, layer, device)):
        flat[:, part * size : (part + 1) * size] = matrices.flatten(1)
    low, high, check, encoding = trailer_words(layout)
    words = b"".join(struct.pack("<iiiiiiii", low, high, layer, e, encoding, 0, check, 0) for e in range(experts))
    trailers = torch.frombuffer(bytearray(words), dtype=torch.uint8).view(experts, TRAILER_BYTES)
    found[:, layout.entry_bytes - TRAILER_BYTES :] = trailers.to(device)
    return found


def noisy(matrix: Int4Matrix, sigma: float, generator: torch.Generator) -> Int4Matrix:
    """Every code moved by round(N(0, sigma²)), clamped to -8 … 7."""
    if not sigma:
        return matrix
    codes = unpack(matrix.codes)
    moves = torch.randn(codes.shape, generator=generator, device=codes.device).mul_(sigma).round_()
    nibbles = (codes + moves).clamp_(-8, 7).add_(8).to(torch.uint8)
    return Int4Matrix(nibbles[..., 0::2] | (nibbles[..., 1::2] << 4), matrix.scales)


def _joined(parts: list[Int4Matrix]) -> Int4Matrix:
    if len(parts) == 1:
        return parts[0]
    return Int4Matrix(torch.cat([p.codes for p in parts]), torch.cat([p.scales for p in parts]))


def _on_cpu(matrix: Int4Matrix) -> Int4Matrix:
    return Int4Matrix(matrix.codes.cpu(), matrix.scales.cpu())
