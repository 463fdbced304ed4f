"""Checks of the tensor-core INT4 kernels against float64, for CUDA and for Triton's interpreter alike."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from scripts.gpu.int4_checks import LIMITS, Case, Inputs, make_inputs, reference
from specter_core.draft.kernels.block_configs import BlockConfig
from specter_core.draft.kernels.block_down import down_blocks
from specter_core.draft.kernels.block_gate_up import gate_up_blocks
from specter_core.draft.kernels.blocks import BlockMatrix, canonical_of_blocks, repack_to_blocks


def launch(
    inputs: Inputs, matrices: tuple[BlockMatrix, BlockMatrix], first: BlockConfig, second: BlockConfig
) -> tuple[Tensor, Tensor]:
    """Both kernels into poisoned outputs: act float16 [T*k, I], out float32 [T, H]."""
    tokens, choices = inputs.ids.shape
    hidden, width = inputs.down.codes.shape[1], inputs.down.codes.shape[2] * 2
    act = torch.full((tokens * choices, width), math.nan, dtype=torch.float16, device=inputs.x.device)
    out = torch.full((tokens, hidden), math.nan, device=inputs.x.device)
    gate_up_blocks(inputs.x, inputs.ids, matrices[0], act, first)
    down_blocks(act, inputs.ids, inputs.weights, matrices[1], out, second)
    return act, out


def check_case(
    case: Case, first: BlockConfig, second: BlockConfig, device: str, seed: int = 0
) -> list[list[float | str]]:
    """[name, value, limit] per check; a check holds when value ≤ limit (nan never does)."""
    inputs = make_inputs(case, device, seed)
    matrices = repack_to_blocks(inputs.gate_up, halves=True), repack_to_blocks(inputs.down)
    act, out = launch(inputs, matrices, first, second)
    again = launch(inputs, matrices, first, second)
    last = Inputs(*inputs[:2], *(part[-1:] for part in inputs[2:]))
    alone = launch(last, matrices, first, second)
    wanted_act, wanted = reference(inputs)
    limit = LIMITS[case.dtype]
    repacked = sum(
        float((canonical_of_blocks(blocks, halves).codes != matrix.codes).sum())
        for blocks, matrix, halves in zip(matrices, (inputs.gate_up, inputs.down), (True, False), strict=True)
    )
    return [
        ["repacking inverted", repacked, 0.0],
        ["act", float((act.double() - wanted_act).norm() / wanted_act.norm()), limit],
        ["out", float((out.double() - wanted).norm() / wanted.norm()), limit],
        ["same bits again", float((act != again[0]).sum() + (out != again[1]).sum()), 0.0],
        ["same bits alone", float((act[-case.top_k :] != alone[0]).sum() + (out[-1:] != alone[1]).sum()), 0.0],
    ]
