# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Weights on their way into the L2 while kernels run that leave the memory idle.

Attention and routing of one token compute little and read little, one after the other; the weights of the products that
follow are known. Programs added to such a kernel ask the memory for them, wait for nothing and change no value.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 64
"""Programs that a kernel gets for this: enough multiprocessors that their requests are no bottleneck."""


class Ahead(NamedTuple):
    """What to fetch: the first so many bytes of two contiguous tensors, each 0 or a multiple of 16."""

    first: Tensor
    first_bytes: int
    second: Tensor
    second_bytes: int

    @staticmethod
    def of(first: Tensor | None, second: Tensor | None, most: int) -> Ahead | None:
        """At most `most` bytes of both, the first one before the second; None where that is nothing."""
        some = first if first is not None else second
        if some is None:
            return None
        head = 0 if first is None else min(first.nbytes, most) // 16 * 16
        tail = 0 if second is None else min(second.nbytes, most - head) // 16 * 16
        if head + tail == 0:
            return None
        return Ahead(some if first is None else first, head, some if second is None else second, tail)


def fetch_options(ahead: Ahead | None, placeholder: Tensor) -> tuple[dict[str, Any], int]:
    """Keywords of a launch whose kernel ends in `fetch_ahead`, and the number of programs to add."""
    if ahead is None:
        return {"ahead": placeholder, "further": placeholder, "AHEAD": 0, "FURTHER": 0}, 0
    found = {"ahead": ahead.first, "further": ahead.second, "AHEAD": ahead.first_bytes, "FURTHER": ahead.second_bytes}
    return found, PROGRAMS


@triton.jit
def _fetch(base, lane, LANES: tl.constexpr, BYTES: tl.constexpr):
    CHUNK: tl.constexpr = (BYTES + 16 * LANES - 1) // (16 * LANES) * 16
    at = base.to(tl.int64) + tl.minimum(lane.to(tl.int64) * CHUNK, BYTES - CHUNK)
    size = tl.full(lane.shape, CHUNK, tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [at, size],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def fetch_ahead(program, ahead, further, AHEAD: tl.constexpr, FURTHER: tl.constexpr, PROGRAMS: tl.constexpr,
                THREADS: tl.constexpr):  # fmt: skip
    """Program number `program` of PROGRAMS asks for its share of both tensors; a thread asks once for each."""
    lane = program * THREADS + tl.arange(0, THREADS)
    if AHEAD > 0:
        _fetch(ahead, lane, PROGRAMS * THREADS, AHEAD)
    if FURTHER > 0:
        _fetch(further, lane, PROGRAMS * THREADS, FURTHER)
