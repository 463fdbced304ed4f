"""The kernels' weight layout: INT4 words whose nibbles meet contiguous activations.

A group of 128 inputs of one output row is 16 words of 32 bits. In the canonical layout word w holds inputs 8w … 8w+7;
a thread that has loaded it needs eight neighbouring activations, a different eight than the thread beside it. Here
nibble j of word w holds input 16j + w, so for each j a run of words meets a run of activations, and 16-byte loads of
both coalesce. Same bytes, same scales.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specter_core.draft.int4 import GROUP, Int4Matrix, pack, unpack

WORDS = GROUP // 8


class GemvMatrix(NamedTuple):
    """words int32 [..., out, in/8], scales float16 [..., out, in/128]."""

    words: Tensor
    scales: Tensor

    @property
    def bytes(self) -> int:
        return 4 * self.words.numel() + 2 * self.scales.numel()


def repack_for_gemv(matrix: Int4Matrix) -> GemvMatrix:
    """Canonical -> kernel layout, on the same device. The scales are shared, not copied."""
    lead = matrix.codes.shape[:-1]
    nibbles = _nibbles(matrix.codes.flatten(0, -2))  # [rows, groups, 128], values 0 … 15
    by_word = nibbles.view(nibbles.shape[0], -1, 8, WORDS).transpose(2, 3)  # [rows, groups, word, nibble]
    return GemvMatrix(_to_words(by_word).view(*lead, -1), matrix.scales)


def canonical(matrix: GemvMatrix) -> Int4Matrix:
    """Kernel -> canonical layout; the inverse of `repack_for_gemv`."""
    lead = matrix.words.shape[:-1]
    codes = unpack(matrix.words.contiguous().view(torch.uint8))  # word after word, nibble after nibble
    by_word = codes.view(-1, WORDS, 8).transpose(1, 2)  # [groups, nibble, word]
    return Int4Matrix(pack(by_word.reshape(*lead, -1)), matrix.scales)


def _nibbles(codes: Tensor) -> Tensor:
    pairs = torch.stack((codes & 15, codes >> 4), dim=-1)
    return pairs.view(codes.shape[0], -1, GROUP)


def _to_words(nibbles: Tensor) -> Tensor:
    """uint8 [..., 8] with values 0 … 15 -> int32 [...]: nibble j at bits 4j."""
    halves = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)  # four bytes, low nibble first
    return halves.contiguous().view(torch.int32).squeeze(-1)
