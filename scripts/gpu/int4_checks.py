"""Checks of the fused INT4 kernels against float64, for CUDA and for Triton's interpreter alike."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from specter_core.draft.int4 import GROUP, Int4Matrix, dequantize, pack
from specter_core.draft.kernels.block_configs import BlockConfig
from specter_core.draft.kernels.block_down import down_blocks
from specter_core.draft.kernels.block_gate_up import gate_up_blocks
from specter_core.draft.kernels.blocks import BlockMatrix, canonical_of_blocks, repack_to_blocks

# (H, I, E, k) of the models' routed experts.
SHAPES = {
    "deepseek_v2_lite": (2048, 1408, 64, 6),
    "qwen15_moe": (2048, 1408, 60, 4),
    "phi35_moe": (4096, 6400, 16, 2),
}
LIMITS = {torch.float16: 1e-3, torch.bfloat16: 1e-2}


class Case(NamedTuple):
    """A shape, a number of tokens and the activations' dtype."""

    hidden: int
    width: int
    experts: int
    top_k: int
    tokens: int
    dtype: torch.dtype


class Inputs(NamedTuple):
    """gate_up, down: canonical; x [T, H], ids int64 [T, k] ascending, weights float32 [T, k]."""

    gate_up: Int4Matrix
    down: Int4Matrix
    x: Tensor
    ids: Tensor
    weights: Tensor


def make_inputs(case: Case, device: str, seed: int, padded: bool = True) -> Inputs:
    """Fresh random inputs. padded: with several tokens, one row routes nowhere and one lacks its last choice."""
    generator = torch.Generator(device).manual_seed(seed)

    def matrix(outputs: int, inputs: int) -> Int4Matrix:
        shape = (case.experts, outputs, inputs)
        codes = torch.randint(-8, 8, shape, generator=generator, dtype=torch.int8, device=device)
        scales = torch.rand((*shape[:2], inputs // GROUP), generator=generator, device=device) * 0.01 + 0.002
        return Int4Matrix(pack(codes), scales.to(torch.float16))

    gate_up, down = matrix(2 * case.width, case.hidden), matrix(case.hidden, case.width)
    x = torch.randn(case.tokens, case.hidden, generator=generator, device=device).to(case.dtype)
    order = torch.rand(case.tokens, case.experts, generator=generator, device=device).argsort(dim=1)
    ids = order[:, : case.top_k].sort(dim=1).values
    weights = torch.rand(case.tokens, case.top_k, generator=generator, device=device)
    if padded and case.tokens > 1:
        ids[0] = -1
        ids[1, -1] = -1
        x[0] = math.nan
    return Inputs(gate_up, down, x, ids, weights)


def reference(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """float64: act [T*k, I], 0 where the id is -1, and out [T, H]."""
    gate_up, down, x, ids, weights = inputs
    tokens, choices = ids.shape
    width = down.codes.shape[2] * 2
    act = torch.zeros(tokens * choices, width, dtype=torch.float64, device=x.device)
    out = torch.zeros(tokens, down.codes.shape[1], dtype=torch.float64, device=x.device)
    for expert in sorted(set(ids.flatten().tolist()) - {-1}):
        up_weight = dequantize(Int4Matrix(gate_up.codes[expert], gate_up.scales[expert])).double()
        down_weight = dequantize(Int4Matrix(down.codes[expert], down.scales[expert])).double()
        row, choice = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[row].double() @ up_weight.t()).chunk(2, dim=1)
        act[row * choices + choice] = torch.nn.functional.silu(gate) * up
        result = act[row * choices + choice] @ down_weight.t()
        out.index_add_(0, row, result * weights[row, choice].double().unsqueeze(1))
    return act, out


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
