"""The draft's number format: symmetric INT4 codes with one FP16 scale per 128 inputs (paper, "Models").

Canonical layout of a matrix [out, in], row-major as in `torch.nn.Linear`:

    codes   uint8   [out, in/2]     byte j holds input 2j in its low nibble and input 2j+1 in its high nibble
    scales  float16 [out, in/128]
    W[o, i] = (nibble[o, i] - 8) * scales[o, i // 128]        nibble - 8 is the code, -8 … 7

Leading dimensions (layer, expert) are allowed everywhere. The zero point is always 8 and is not stored.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 128
ZERO = 8


class Int4Matrix(NamedTuple):
    """codes uint8 [..., out, in/2] and scales float16 [..., out, in/128] of one or many matrices."""

    codes: Tensor
    scales: Tensor

    @property
    def bytes(self) -> int:
        return self.codes.numel() + 2 * self.scales.numel()


def pack(codes: Tensor) -> Tensor:
    """int8 [..., in] with values -8 … 7 -> uint8 [..., in/2]. `in` is even."""
    assert codes.shape[-1] % 2 == 0, codes.shape
    nibbles = (codes + ZERO).to(torch.uint8)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """uint8 [..., in/2] -> int8 [..., in] with values -8 … 7; the inverse of `pack`."""
    pairs = torch.stack((packed & 15, packed >> 4), dim=-1)  # [..., in/2, 2]
    return pairs.flatten(-2).to(torch.int8) - ZERO


def dequantize(matrix: Int4Matrix, dtype: torch.dtype = torch.float32) -> Tensor:
    """-> dtype [..., out, in]. The product code * scale is formed in float32 and rounded once to dtype."""
    codes, scales = matrix
    groups = codes.shape[-1] * 2 // GROUP
    assert scales.shape == (*codes.shape[:-1], groups), (codes.shape, scales.shape)
    pairs = _pair_table(codes.device)[codes.to(torch.int32)]  # [..., out, in/2, 2]
    grouped = pairs.view(*codes.shape[:-1], groups, GROUP)
    grouped.mul_(scales.to(torch.float32).unsqueeze(-1))
    return grouped.flatten(-2).to(dtype)


def matrix_bytes(outputs: int, inputs: int) -> int:
    """Bytes of one INT4 matrix [outputs, inputs]: 4.125 bits per weight."""
    assert inputs % GROUP == 0, inputs
    return outputs * (inputs // 2 + 2 * (inputs // GROUP))


def _pair_table(device: torch.device) -> Tensor:
    """float32 [256, 2]: the two codes of every byte."""
    return unpack(torch.arange(256, dtype=torch.uint8, device=device).unsqueeze(-1)).to(torch.float32)
