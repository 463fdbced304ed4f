"""The tensor-core kernels' weight layout: what a warp reads at once lies together, in the order of MMA operands.

Sixteen output rows and one group of 128 inputs are a block of 1 KiB: first the 16 words of each of rows 0 … 7, then
those of rows 8 … 15, so that both of a warp's loads of 16 bytes per thread are contiguous. The rows of gate and up take
turns by eights: a block holds eight features' gate rows, then their up rows. Within a word of eight inputs, nibbles j
and 4 + j hold two neighbouring inputs: one AND over a word, shifted by 4j, leaves their codes in the word's two halves.
A block's scales are eight pairs, rows r and r + 8. Same bytes as the canonical layout.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specter_core.draft.int4 import GROUP, Int4Matrix

ROWS = 16
INPUT_OF_NIBBLE = [0, 4, 2, 6, 1, 5, 3, 7]
"""Within the eight inputs of a word."""


class BlockMatrix(NamedTuple):
    """words int32 [..., out/16, in/128, 256], scales float16 [..., out/16, in/128, 8, 2]."""

    words: Tensor
    scales: Tensor

    @property
    def bytes(self) -> int:
        return 4 * self.words.numel() + 2 * self.scales.numel()


def repack_to_blocks(matrix: Int4Matrix, halves: bool = False) -> BlockMatrix:
    """Canonical -> blocks, on the same device. halves: gate above up, taking turns by eight rows."""
    lead, outputs, groups = matrix.codes.shape[:-2], matrix.codes.shape[-2], matrix.scales.shape[-1]
    assert outputs % ROWS == 0, outputs
    words = _reordered(matrix.codes, INPUT_OF_NIBBLE).view(torch.int32).view(*lead, outputs, groups, GROUP // 8)
    scales = matrix.scales
    if halves:
        words, scales = _by_eights(words, len(lead), 2), _by_eights(scales, len(lead), 2)
    blocks = words.view(*lead, outputs // ROWS, ROWS, groups, GROUP // 8).transpose(-3, -2)
    pairs = scales.view(*lead, outputs // ROWS, 2, 8, groups).movedim(-1, -3).transpose(-2, -1)
    return BlockMatrix(blocks.reshape(*lead, outputs // ROWS, groups, 2 * GROUP), pairs.contiguous())


def canonical_of_blocks(matrix: BlockMatrix, halves: bool = False) -> Int4Matrix:
    """Blocks -> canonical layout; the inverse of `repack_to_blocks`."""
    *lead, tiles, groups, _ = matrix.words.shape
    outputs = tiles * ROWS
    words = matrix.words.view(*lead, tiles, groups, ROWS, GROUP // 8).transpose(-3, -2)
    words = words.reshape(*lead, outputs, groups, GROUP // 8)
    scales = matrix.scales.transpose(-2, -1).movedim(-3, -1).reshape(*lead, outputs, groups)
    if halves:
        words, scales = _by_eights(words, len(lead), outputs // 16), _by_eights(scales, len(lead), outputs // 16)
    packed = words.reshape(*lead, outputs, -1).contiguous().view(torch.uint8)
    nibble_of_input = [INPUT_OF_NIBBLE.index(i) for i in range(8)]
    return Int4Matrix(_reordered(packed, nibble_of_input), scales.contiguous())


def _by_eights(rows: Tensor, at: int, parts: int) -> Tensor:
    """Dimension `at` as parts x n x 8 rows -> n x parts x 8 rows. 2 parts: gate above up -> turns; the other way round
    with as many parts as there are turns.
    """
    split = rows.view(*rows.shape[:at], parts, -1, 8, *rows.shape[at + 1 :])
    return split.transpose(at, at + 1).reshape(rows.shape)


def _reordered(packed: Tensor, order: list[int]) -> Tensor:
    """uint8 [..., bytes], low nibble first: nibble j of each eight becomes the old nibble order[j]."""
    nibbles = torch.stack((packed & 15, packed >> 4), dim=-1).view(*packed.shape[:-1], -1, 8)[..., order]
    return (nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)).reshape(packed.shape)
