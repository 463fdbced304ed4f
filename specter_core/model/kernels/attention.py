# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Decode attention for grouped-query heads: partial softmax per fixed KV split, then a fixed-order combine."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specter_core.model.kernels.partials import Partials
from specter_core.model.kernels.pdl import begin, launch_options
from specter_core.model.kernels.rope import RowTensors
from specter_core.model.kernels.splits import split_count, split_of, split_start
from specter_core.model.kernels.tiles import power_of_two

BLOCK_M = 16
BLOCK_S = 64
COMBINE_CHUNK = 8
LOG2_E = 1.4426950408889634


@triton.jit
def softmax_step(scores, top, total):
    """One online-softmax step (base 2): scores [M, S], -inf where masked -> (p, rescale, new top, new total).

    A step whose scores are all masked changes no bit.
    """
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    rescale = tl.exp2(top - base)
    p = tl.exp2(scores - base[:, None])
    return p, rescale, new_top, total * rescale + tl.sum(p, axis=1)


@triton.jit
def attend(scores, value, s, position, top, total, acc):
    """One step over the keys at positions s [S]: scores [M, S] of rows at position [M], value [S, D] -> new top, total
    [M] and acc [M, D]. Keys behind a row's position count nothing and change none of its bits.
    """
    scores = tl.where(s[None, :] <= position[:, None], scores, float("-inf"))
    p, rescale, top, total = softmax_step(scores, top, total)
    return top, total, tl.dot(p.to(value.dtype), value, acc * rescale[:, None], input_precision="ieee")


@triton.jit(do_not_specialize=["steps", "kv_start", "splits"])
def _gqa_split_kernel(
    q, k_cache, v_cache, positions, valid, part, part_top, part_total, steps, kv_start, splits, scale,
    CAPACITY: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    tiles = (steps * GROUP + BLOCK_M - 1) // BLOCK_M
    b = tl.program_id(0) // tiles
    m = (tl.program_id(0) % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    t = m // GROUP
    head = kv_head * GROUP + m % GROUP
    row = b * steps + t
    m_mask = t < steps
    live = m_mask & (tl.load(valid + row, mask=m_mask, other=0) != 0)
    position = tl.where(live, tl.load(positions + row, mask=m_mask, other=0), -1).to(tl.int32)
    start = split_start(split)
    last = tl.minimum(tl.max(position, axis=0), split_start(split + 1) - 1)
    if last < start:
        return
    d = tl.arange(0, BLOCK_D)
    d_mask = d < D
    q_mask = m_mask[:, None] & d_mask[None, :]
    query = tl.load(q + (row * HEADS + head)[:, None] * D + d[None, :], mask=q_mask, other=0.0)
    base = (kv_start + b).to(tl.int64) * (CAPACITY + 1)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for s0 in range(start, last + 1, BLOCK_S):
        s = s0 + tl.arange(0, BLOCK_S)
        at = ((base + s) * KV_HEADS + kv_head)[:, None] * D + d[None, :]
        kv_mask = (s <= last)[:, None] & d_mask[None, :]
        key = tl.load(k_cache + at, mask=kv_mask, other=0.0)
        value = tl.load(v_cache + at, mask=kv_mask, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        top, total, acc = attend(scores, value, s, position, top, total, acc)
    at = (row * splits + split) * HEADS + head
    tl.store(part + at[:, None] * D + d[None, :], acc, mask=q_mask)
    tl.store(part_top + at, top, mask=m_mask)
    tl.store(part_total + at, total, mask=m_mask)


@triton.jit
def combined_row(part, part_top, part_total, row, head, count, splits, HEADS: tl.constexpr, D: tl.constexpr,
                 BLOCK_D: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """float32 [BLOCK_D] of one row and head: splits 0 … count-1 in chunks of fixed size, so that no bit depends on
    the bucket; zeros for no split.
    """
    d = tl.arange(0, BLOCK_D)
    top = float("-inf")
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for s0 in range(0, count, CHUNK):
        s = s0 + tl.arange(0, CHUNK)
        at = (row * splits + s) * HEADS + head
        tops = tl.load(part_top + at, mask=s < count, other=float("-inf"))
        totals = tl.load(part_total + at, mask=s < count, other=0.0)
        values = tl.load(part + at[:, None] * D + d[None, :], mask=(s < count)[:, None] & (d < D)[None, :], other=0.0)
        new_top = tl.maximum(top, tl.max(tops, axis=0))
        rescale = tl.exp2(top - new_top)
        weight = tl.exp2(tops - new_top)
        total = total * rescale + tl.sum(weight * totals, axis=0)
        acc = acc * rescale + tl.sum(values * weight[:, None], axis=0)
        top = new_top
    return acc / tl.where(total > 0.0, total, 1.0)


@triton.jit(do_not_specialize=["splits"])
def _combine_kernel(
    part, part_top, part_total, positions, valid, out, splits,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    position = tl.where(tl.load(valid + row) != 0, tl.load(positions + row), -1).to(tl.int32)
    acc = combined_row(part, part_top, part_total, row, head, split_of(position) + 1, splits, HEADS, D, BLOCK_D, CHUNK)
    tl.store(out + (row * HEADS + head) * D + d, acc.to(out.dtype.element_ty), mask=d < D)


def gqa_splits(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: RowTensors,
    scale: float,
    bucket: int,
    part: Partials,
    pdl: bool = False,
) -> None:
    """Partial causal attention of every row over its sequence's cache, split by split.

    q [R, heads, d], caches [B, S_max+1, kv_heads, d]. bucket: positions that the grid covers; every valid row's
    position is below it, and the result does not depend on it. Keys at positions above a row's own count nothing.
    """
    count, heads, d = q.shape
    _, slots, kv_heads, _ = k_cache.shape
    splits = split_count(bucket)
    part.check(count, heads, d, splits)
    assert bucket <= slots - 1 and q.is_contiguous() and k_cache.is_contiguous() and v_cache.is_contiguous()
    tiles = triton.cdiv(rows.steps * (heads // kv_heads), BLOCK_M)
    _gqa_split_kernel[(count // rows.steps * tiles, kv_heads, splits)](
        q, k_cache, v_cache, rows.positions, rows.valid, *part, rows.steps, rows.kv_start, splits, scale * LOG2_E,
        CAPACITY=slots - 1, HEADS=heads, KV_HEADS=kv_heads, D=d, BLOCK_D=max(16, power_of_two(d)),
        BLOCK_M=BLOCK_M, BLOCK_S=BLOCK_S, num_warps=4, num_stages=2, **launch_options(pdl),
    )  # fmt: skip


def combine_splits(part: Partials, rows: RowTensors, bucket: int, out: Tensor, pdl: bool = False) -> Tensor:
    """The splits of each (row, head), summed in ascending order and normalised -> out [R, heads, d]; invalid rows 0."""
    count, heads, d = out.shape
    splits = split_count(bucket)
    part.check(count, heads, d, splits)
    assert out.is_contiguous()
    _combine_kernel[(count, heads)](
        *part,
        rows.positions,
        rows.valid,
        out,
        splits,
        HEADS=heads,
        D=d,
        BLOCK_D=power_of_two(d),
        CHUNK=COMBINE_CHUNK,
        num_warps=4,
        **launch_options(pdl),
    )
    return out
