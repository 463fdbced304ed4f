"""Marlin INT4 kernels to compare with, where they can be had: GPTQModel's dense GEMM and vLLM's MoE GEMM.

Each is an operator that some shared library registers. SPECTER_MARLIN and SPECTER_MARLIN_MOE name such libraries;
without the first, GPTQModel (if installed) builds its own at first use, and without the second, vLLM's is imported.
Weights come from the project's canonical INT4 layout; groups of 128, zero point 8, bfloat16 activations.
"""

from __future__ import annotations

import functools
import importlib
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specter_core.draft.int4 import GROUP, Int4Matrix

UINT4_ZERO_8 = 1125899907892224  # both libraries' id of the type "unsigned 4 bits, zero point 8"
BLOCKS = (8, 16, 32, 48, 64)


class MarlinMissing(RuntimeError):
    """One line that says why a kernel cannot be measured here."""


@functools.cache
def dense_operator() -> Any:
    """gptq_marlin_gemm_bf16. MarlinMissing when there is none."""
    library = os.environ.get("SPECTER_MARLIN")
    try:
        if library:
            torch.ops.load_library(library)
        else:
            built = importlib.import_module("gptqmodel.utils.marlin").prewarm_marlin_extension(torch.bfloat16)
            if not built:
                raise MarlinMissing("GPTQModel could not build its Marlin kernels here")
        return torch.ops.gptqmodel_marlin_bf16.gptq_marlin_gemm_bf16
    except (ImportError, OSError, AttributeError, RuntimeError) as problem:
        raise MarlinMissing(_line("dense Marlin (GPTQModel)", problem)) from problem


@functools.cache
def moe_operator() -> Any:
    """moe_wna16_marlin_gemm. MarlinMissing when there is none."""
    library = os.environ.get("SPECTER_MARLIN_MOE")
    try:
        if library:
            torch.ops.load_library(library)
            return torch.ops._moe_C.moe_wna16_marlin_gemm
        importlib.import_module("vllm._moe_C_stable_libtorch")
        return torch.ops._moe_C.moe_wna16_marlin_gemm
    except (ImportError, OSError, AttributeError, RuntimeError) as problem:
        raise MarlinMissing(_line("MoE Marlin (vLLM)", problem)) from problem


def marlin_layout(matrix: Int4Matrix) -> tuple[Tensor, Tensor]:
    """Canonical [out, in] -> codes int32 [in/16, 2 out] and scales bfloat16 [in/128, out], as Marlin's GEMM reads them.

    Tiles of 16 inputs x 16 outputs, four to a block, each permuted so that a thread's 16-byte load holds its part of
    four MMA operands, nibbles interleaved (Frantar et al., 2025).
    """
    outputs = matrix.codes.shape[0]
    inputs = matrix.codes.shape[1] * 2
    nibbles = torch.stack((matrix.codes & 15, matrix.codes >> 4), dim=-1).view(outputs, inputs)
    tiles = nibbles.t().reshape(inputs // 16, 16, outputs // 16, 16).transpose(1, 2).reshape(-1, 1024)
    permuted = tiles[:, _permutation().to(tiles.device)].view(inputs // 16, outputs * 2, 8).to(torch.int32)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=permuted.device)
    codes = (permuted << shifts).sum(dim=-1, dtype=torch.int32)
    order = [i + 8 * j for i in range(8) for j in range(8)]
    scales = matrix.scales.t().reshape(-1, 64)[:, order].reshape(inputs // GROUP, outputs)
    return codes.contiguous(), scales.to(torch.bfloat16).contiguous()


@functools.cache
def _permutation() -> Tensor:
    places = []
    for thread in range(32):
        column = thread // 4
        one = [
            16 * row + column + 8 * block
            for block in (0, 1)
            for row in (2 * (thread % 4), 2 * (thread % 4) + 1, 2 * (thread % 4 + 4), 2 * (thread % 4 + 4) + 1)
        ]
        places += [place + 256 * j for j in range(4) for place in one]
    order = torch.tensor(places).view(-1, 8)
    return order[:, [0, 2, 4, 6, 1, 3, 5, 7]].flatten()


class DenseMarlin:
    """x bfloat16 [T, in] -> bfloat16 [T, out] by GPTQModel's kernel."""

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self.codes, self.scales = codes, scales
        self.inputs, self.outputs = codes.shape[0] * 16, codes.shape[1] // 2
        self._gemm = dense_operator()
        self._workspace = _workspace(codes.device)
        self._empty = torch.empty(0, dtype=torch.int32, device=codes.device)

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = self._gemm(
            x, None, self.codes, None, self.scales, None, None, self._empty, self._empty, self._workspace, UINT4_ZERO_8,
            x.shape[0], self.outputs, self.inputs, True, False, True, False, None, None,
        )  # fmt: skip
        return result


class Aligned(NamedTuple):
    """Pairs (token, choice) sorted by expert, each expert's run padded to blocks: what the MoE kernel walks through."""

    pairs: Tensor
    experts: Tensor
    padded: Tensor
    block: int


def align(ids: Tensor, experts: int) -> Aligned:
    """ids int64 [T, k] on any device; computed on the host, before the clock runs."""
    flat = ids.flatten().tolist()
    block = next((size for size in BLOCKS if len(flat) / experts / size < 0.9), BLOCKS[-1])
    pairs: list[int] = []
    owners: list[int] = []
    for expert in sorted(set(flat)):
        own = [pair for pair, owner in enumerate(flat) if owner == expert]
        own += [len(flat)] * (-len(own) % block)
        pairs += own
        owners += [expert] * (len(own) // block)

    def on_device(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=ids.device)

    return Aligned(on_device(pairs), on_device(owners), on_device([len(pairs)]), block)


class MoeMarlin:
    """All experts' matrices of one kind: vLLM's fused GEMM over (token, choice) pairs."""

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        """codes int32 [E, in/16, 2 out], scales bfloat16 [E, in/128, out]."""
        self.codes, self.scales = codes, scales
        self.inputs, self.outputs = codes.shape[1] * 16, codes.shape[2] // 2
        self._gemm = moe_operator()
        self._workspace = _workspace(codes.device, 4)

    def __call__(self, x: Tensor, aligned: Aligned, weights: Tensor, top_k: int, weigh: bool, out: Tensor) -> Tensor:
        """x [rows, in]; pair p multiplies row p // top_k -> out [rows * top_k, outputs]; weigh: times its weight."""
        result: Tensor = self._gemm(
            x, out, self.codes, None, self.scales, None, None, None, None, None, self._workspace, aligned.pairs,
            aligned.experts, aligned.padded, weights, aligned.block, top_k, weigh, UINT4_ZERO_8, x.shape[0],
            self.outputs, self.inputs, True, False, True, False, -1, -1, -1,
        )  # fmt: skip
        return result


def _workspace(device: torch.device, blocks_per_sm: int = 1) -> Tensor:
    count = torch.cuda.get_device_properties(device).multi_processor_count * blocks_per_sm
    return torch.zeros(max(count, 128), dtype=torch.int32, device=device)


def _line(what: str, problem: Exception) -> str:
    told = problem.__cause__ or problem
    text = f"{what}: {type(told).__name__}: {told}".splitlines()[0]
    for library in map(os.environ.get, ("SPECTER_MARLIN", "SPECTER_MARLIN_MOE")):
        text = text.replace(library, Path(library).name) if library else text
    return text[:200]
