"""Counter-based uniform random numbers: Philox 4x32-10 (Salmon et al., SC 2011).

A number depends on (seed, request, position, purpose) alone, so sampling does not change with batch size, depth or
the order in which steps are executed.
"""

from __future__ import annotations

import zlib
from enum import IntEnum

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


class Purpose(IntEnum):
    """What a random number decides; each purpose has a stream of its own."""

    DRAFT = 0
    ACCEPT = 1
    TARGET = 2


def request_key(seed: int, request_id: str) -> int:
    """64-bit key of one request: the seed in the upper half, a CRC-32 of the id in the lower."""
    key = ((seed & _MASK) << 32) | zlib.crc32(request_id.encode())
    return key - (1 << 64) if key >= 1 << 63 else key


def _philox(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Tensor, k1: Tensor) -> Tensor:
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0


def uniform(keys: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
    """Uniform float32 numbers in (0, 1), one per element.

    keys: int64, from `request_key`; positions: int64, the index in the sequence of the token that is decided; the two
    broadcast. Returns float32 of their common shape.
    """
    keys, positions = torch.broadcast_tensors(keys, positions)
    zero = torch.zeros_like(positions)
    bits = _philox(
        positions & _MASK, (positions >> 32) & _MASK, zero + int(purpose), zero, (keys >> 32) & _MASK, keys & _MASK
    )
    return ((bits >> 9).to(torch.float32) + 0.5) * (1.0 / (1 << 23))
