# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Where attention cuts the KV: at fixed absolute positions, whatever the rows, their number or the bucket.

Split i covers [64·i, 64·(i+1)) for i < 8 and [512 + 256·(i-8), 512 + 256·(i-7)) from there on: short contexts spread
over many multiprocessors, long ones do not drown in partial results.
"""

from __future__ import annotations

import triton
import triton.language as tl

SMALL = tl.constexpr(64)
SMALL_COUNT = tl.constexpr(8)
LARGE = tl.constexpr(256)


@triton.jit
def split_start(i):
    """First position of split i."""
    return tl.where(i < SMALL_COUNT, i * SMALL, SMALL * SMALL_COUNT + (i - SMALL_COUNT) * LARGE)


@triton.jit
def split_of(position):
    """Split that holds the position; -1 for position -1."""
    late = SMALL_COUNT + (position - SMALL * SMALL_COUNT) // LARGE
    found = tl.where(position < SMALL * SMALL_COUNT, position // SMALL, late)
    return tl.where(position < 0, -1, found)


def split_count(positions: int) -> int:
    """Splits that cover positions 0 … positions-1: the size of a KV bucket's grid."""
    small, count, large = SMALL.value, SMALL_COUNT.value, LARGE.value
    if positions <= small * count:
        return -(-max(positions, 1) // small)
    return int(count + -(-(positions - small * count) // large))
