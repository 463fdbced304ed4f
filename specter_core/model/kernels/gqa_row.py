# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Grouped-query attention of single rows over short contexts in one launch: rotate, append, attend, combine (as rope.py
and attention.py do in three, for few rows and without the matrix unit; other bits).

A program has one head and SPLIT positions; the last of a head to end sums the head's partial results, in their order.
Keys and values of earlier steps are in its registers before it waits for the row's projections.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specter_core.model.kernels.attention import COMBINE_CHUNK, LOG2_E, combined_row
from specter_core.model.kernels.partials import Partials
from specter_core.model.kernels.pdl import launch_options, start_next, wait_previous
from specter_core.model.kernels.rope import RopeTables, RowTensors, rotated
from specter_core.model.kernels.splits import SMALL, SMALL_COUNT, split_count
from specter_core.model.kernels.tiles import power_of_two

SPLIT = SMALL.value
"""Positions of a program."""
REACH = SPLIT * SMALL_COUNT.value
"""Positions that this launch covers: beyond, splits are longer (splits.py)."""


@triton.jit(do_not_specialize=["kv_start", "splits", "switch"])
def _gqa_row_kernel(
    qkv, k_cache, v_cache, cos, sin, positions, valid, context, part, part_top, part_total, arrivals, out,
    stride_qkv, kv_start, splits, switch, scale,
    CAPACITY: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr, CHUNK: tl.constexpr, POSITIONS: tl.constexpr, SIDES: tl.constexpr,
    INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    split = tl.program_id(1)
    head = tl.program_id(2)
    kv_head = head // (HEADS // KV_HEADS)
    position = tl.where(tl.load(valid + row) != 0, tl.load(positions + row), -1).to(tl.int32)  # the step's own
    first = split * SPLIT
    d = tl.arange(0, BLOCK_D)
    d_mask = d < D
    out += (row * HEADS + head) * D
    if PDL:
        start_next()
    if first > position:
        if PDL:
            wait_previous()
        if split == 0:
            tl.store(out + d, tl.zeros([BLOCK_D], tl.float32).to(out.dtype.element_ty), mask=d_mask)
        return
    s = first + tl.arange(0, SPLIT)
    start = ((kv_start + row).to(tl.int64) * (CAPACITY + 1) * KV_HEADS + kv_head) * D
    at = start + s[:, None] * (KV_HEADS * D) + d[None, :]
    old = (s < position)[:, None] & d_mask[None, :]
    keys = tl.load(k_cache + at, mask=old, other=0.0)
    values = tl.load(v_cache + at, mask=old, other=0.0)
    tl.debug_barrier()  # keeps the compiler from putting off the loads
    if PDL:
        wait_previous()

    side = 0
    if SIDES == 2:
        side = (tl.load(context + row) > switch).to(tl.int32)
    source = qkv + row * stride_qkv
    query = rotated(source + head * D, d, d_mask, position, side, cos, sin, POSITIONS, D, INTERLEAVED)
    key = rotated(
        source + (HEADS + kv_head) * D, d, d_mask, position, side, cos, sin, POSITIONS, D, INTERLEAVED
    ).to(k_cache.dtype.element_ty)  # fmt: skip
    value = tl.load(source + (HEADS + KV_HEADS + kv_head) * D + d, mask=d_mask, other=0.0)
    if (head % (HEADS // KV_HEADS) == 0) & (first + SPLIT > position):
        tl.store(k_cache + start + position * (KV_HEADS * D) + d, key, mask=d_mask)
        tl.store(v_cache + start + position * (KV_HEADS * D) + d, value.to(v_cache.dtype.element_ty), mask=d_mask)
    now = (s == position)[:, None]
    scores = tl.sum(tl.where(now, key[None, :], keys).to(tl.float32) * query[None, :], axis=1)
    scores = tl.where(s <= position, scores * scale, float("-inf"))
    top = tl.max(scores, axis=0)
    p = tl.exp2(scores - top)
    acc = tl.sum(tl.where(now, value[None, :], values).to(tl.float32) * p[:, None], axis=0)
    place = (row * splits + split) * HEADS + head
    tl.store(part + place * D + d, acc, mask=d_mask)
    tl.store(part_top + place, top)
    tl.store(part_total + place, tl.sum(p, axis=0))
    tl.debug_barrier()
    count = position // SPLIT + 1
    if tl.atomic_add(arrivals + row * HEADS + head, 1, sem="acq_rel") == count - 1:
        tl.store(arrivals + row * HEADS + head, 0)
        mixed = combined_row(part, part_top, part_total, row, head, count, splits, HEADS, D, BLOCK_D, CHUNK)
        tl.store(out + d, mixed.to(out.dtype.element_ty), mask=d_mask)


def gqa_row(
    qkv: Tensor, k_cache: Tensor, v_cache: Tensor, rows: RowTensors, tables: RopeTables, scale: float, bucket: int,
    part: Partials, arrivals: Tensor, out: Tensor, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """`rope_append`, `gqa_splits` and `combine_splits` of one row per sequence; see there. No entry of an invalid row
    is written, its output is 0.

    qkv [R, (heads + 2·kv_heads)·d] -> out [R, heads, d]. arrivals int32 [R·heads], 0 between launches. No bit depends
    on bucket, at most REACH. pdl: positions, valid and all entries before a row's own are final before the launch
    before this one begins.
    """
    count, heads, d = out.shape
    _, slots, kv_heads, _ = k_cache.shape
    splits = split_count(bucket)
    part.check(count, heads, d, splits)
    assert rows.steps == 1 and bucket <= min(REACH, slots - 1)
    assert arrivals.numel() >= count * heads and out.is_contiguous()
    assert qkv.shape == (count, (heads + 2 * kv_heads) * d) and qkv.stride(1) == 1 and tables.cos.shape[-1] == d
    assert k_cache.is_contiguous() and v_cache.is_contiguous()
    _gqa_row_kernel[(count, splits, heads)](
        qkv, k_cache, v_cache, tables.cos, tables.sin, rows.positions, rows.valid, rows.context, *part, arrivals, out,
        qkv.stride(0), rows.kv_start, splits, tables.switch, scale * LOG2_E,
        CAPACITY=slots - 1, HEADS=heads, KV_HEADS=kv_heads, D=d, BLOCK_D=power_of_two(d), SPLIT=SPLIT,
        CHUNK=COMBINE_CHUNK, POSITIONS=tables.cos.shape[1], SIDES=tables.cos.shape[0],
        INTERLEAVED=tables.interleaved, num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return out
