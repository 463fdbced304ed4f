"""From a device budget to vLLM's options: how much of the experts goes to host memory, and how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.system import ModelShape
from specter_core.errors import UserError

OVERHEAD_BYTES = 1_600_000_000
"""CUDA context, loaded kernels, activations, graphs: taken for the first load, which measures it (1.1 GB with latent
attention, 1.6 without)."""
OFFLOADERS = ("uva", "prefetch")
EXPERTS = "experts"
"""Segment of the names of the routed experts' parameters (mlp.experts.routed_experts.w13_weight, …w2_weight) and of no
other's: shared experts are mlp.shared_expert(s)."""
BLOCK_TOKENS = 16
PREFETCH_LAYERS = 1
"""How far ahead `prefetch` copies; vLLM holds as many layers' experts on the device as buffers. More would take layers'
room and save no byte of the link."""


@dataclass(frozen=True, slots=True)
class Offload:
    """uva: the kernels read the first offloaded_bytes of experts where they lie, in page-locked host memory; vLLM takes
    whole parameters, a layer's gate and up or its down.
    prefetch: the experts of some layers are in host memory and are copied into PREFETCH_LAYERS layers' space on the
    device. device_bytes: planned, everything counted."""

    offloader: str
    offloaded_bytes: int
    device_bytes: int
    options: Mapping[str, Any]


def kv_bytes(shape: ModelShape, batch: int, max_sequence: int) -> int:
    """KV cache for `batch` sequences in whole blocks, with room for a few more blocks."""
    blocks = batch * -(-max_sequence // BLOCK_TOKENS) + 8
    return shape.kv_bytes_per_token * BLOCK_TOKENS * blocks


def offload(
    offloader: str,
    budget_bytes: int | None,
    shape: ModelShape,
    batch: int,
    max_sequence: int,
    overhead_bytes: int = OVERHEAD_BYTES,
) -> Offload:
    """budget None: everything on the device. UserError: the rest without any expert exceeds the budget."""
    layer = 2 * shape.expert_params * shape.experts
    fixed = 2 * shape.shared_params + kv_bytes(shape, batch, max_sequence) + overhead_bytes
    whole = fixed + layer * shape.moe_layers
    if budget_bytes is None or whole <= budget_bytes:
        return Offload("none", 0, whole, {})
    if offloader == "uva":
        return _uva(budget_bytes, shape.moe_layers * [layer * 2 // 3, layer // 3], fixed)
    return _prefetch(budget_bytes, shape, layer, fixed)


def _uva(budget_bytes: int, parameters: Sequence[int], fixed: int) -> Offload:
    """parameters: bytes, in the order in which vLLM takes them until it has what it was told."""
    if fixed > budget_bytes:
        _refuse(budget_bytes, fixed, "everything but the experts")
    left, told, moved = fixed + sum(parameters) - budget_bytes, 0.0, 0
    for size in parameters:
        if moved >= left:
            break
        told, moved = moved + size / 2, moved + size  # told: clear of both neighbours, whatever is rounded
    options = {"offload_backend": "uva", "cpu_offload_gb": told / 2**30, "cpu_offload_params": [EXPERTS]}
    return Offload("uva", moved, fixed + sum(parameters) - moved, options)


def _prefetch(budget_bytes: int, shape: ModelShape, layer: int, fixed: int) -> Offload:
    """The last n of every group of g layers: g as small as gives the share that has to go, for even gaps."""
    layers, buffers = shape.moe_layers, PREFETCH_LAYERS
    room = (budget_bytes - fixed) // layer - buffers
    if room < 0:
        _refuse(budget_bytes, fixed + buffers * layer, f"everything but the experts and {buffers} layer's buffer")
    out = layers - room
    group, number = next(
        (g, n) for g in range(2, shape.decoder_layers + 1) for n in range(1, g + 1) if _offloaded(shape, g, n) == out
    )
    options = {
        "offload_backend": "prefetch",
        "offload_group_size": group,
        "offload_num_in_group": number,
        "offload_prefetch_step": buffers,
        "offload_params": [EXPERTS],
    }
    return Offload("prefetch", out * layer, fixed + (room + buffers) * layer, options)


def _offloaded(shape: ModelShape, group: int, number: int) -> int:
    """MoE layers whose experts go to the host: decoder layers at group - number … group - 1 of each group; the layers
    without experts are the first."""
    first = shape.decoder_layers - shape.moe_layers
    return sum(at % group >= group - number for at in range(first, shape.decoder_layers))


def _refuse(budget_bytes: int, needed: int, what: str) -> None:
    raise UserError(f"budget {budget_bytes / 1e9:.4g} GB cannot hold {what}: {needed / 1e9:.4g} GB; raise the budget")
