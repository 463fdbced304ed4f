# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Which (row, choice) pairs go to which expert, built on the device in a fixed order."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256
LONG_BLOCK = 2048
"""Pairs per step of a prompt's many rows."""


@triton.jit(do_not_specialize=["first", "pairs"])
def _group_rows_kernel(ids, members, counts, first, pairs, CAPACITY: tl.constexpr, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    found = 0
    for p0 in range(first, pairs, BLOCK):
        p = p0 + tl.arange(0, BLOCK)
        mine = tl.load(ids + p, mask=p < pairs, other=-1) == expert
        place = found + tl.cumsum(mine.to(tl.int32), axis=0) - 1
        tl.store(members + expert * CAPACITY + place, p, mask=mine & (place < CAPACITY))
        found += tl.sum(mine.to(tl.int32), axis=0)
    tl.store(counts + expert, found)


def group_rows(ids: Tensor, members: Tensor, counts: Tensor, rows: range | None = None) -> None:
    """ids int64 [R, k] (-1: none; distinct within a row) -> members int32 [E, ≥ R], counts int32 [E].

    members[e, :counts[e]] are the pairs r·k + c with ids[r, c] = e, ascending; the rest is left as it was. rows: only
    these successive ones.
    """
    experts, capacity = members.shape
    assert capacity >= ids.shape[0] and counts.shape == (experts,) and members.is_contiguous() and ids.is_contiguous()
    top_k = ids.shape[1]
    first, last = (0, ids.shape[0]) if rows is None else (rows.start, rows.stop)
    assert 0 <= first <= last <= ids.shape[0], (first, last, ids.shape)
    long = ids.numel() > 4 * LONG_BLOCK
    _group_rows_kernel[(experts,)](
        ids, members, counts, first * top_k, last * top_k, CAPACITY=capacity, BLOCK=LONG_BLOCK if long else BLOCK,
        num_warps=8 if long else 2,
    )  # fmt: skip
