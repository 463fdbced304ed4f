# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Causal attention of many rows of one sequence: a program takes a tile of rows through the KV from its beginning.

No KV splits, no partial results: there are enough rows to fill the device. A step that lies behind a row's position
changes none of its bits, so neither do the rows that share its tile, nor where a prompt is cut into chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specter_core.model.kernels.attention import LOG2_E, attend
from specter_core.model.kernels.rope import RowTensors
from specter_core.model.kernels.tiles import power_of_two


class AttentionTile(NamedTuple):
    """(row, head) pairs per program, positions per step."""

    pairs: int
    block_s: int
    warps: int
    stages: int


MLA_TILE = AttentionTile(64, 32, 8, 3)
GQA_TILE = AttentionTile(128, 64, 8, 3)
WIDE_TYPE_TILE = AttentionTile(16, 16, 4, 1)
"""For float32, which has no matrix unit and twice the bytes."""


@triton.jit
def _last_tile_first():
    """The last rows have the most positions to read."""
    return tl.num_programs(0) - 1 - tl.program_id(0)


@triton.jit(do_not_specialize=["R", "kv_row"])
def _mla_prefill_kernel(
    q, cache, positions, out, R, kv_row, scale,
    CAPACITY: tl.constexpr, HEADS: tl.constexpr, BLOCK_H: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_ROPE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = RANK + ROPE
    m = tl.arange(0, BLOCK_T * BLOCK_H)
    row = _last_tile_first() * BLOCK_T + m // BLOCK_H
    head = m % BLOCK_H
    m_mask = (row < R) & (head < HEADS)
    position = tl.load(positions + row, mask=m_mask, other=-1).to(tl.int32)
    last = tl.max(position, axis=0)
    c = tl.arange(0, BLOCK_RANK)
    d = tl.arange(0, BLOCK_ROPE)
    c_mask = c < RANK
    d_mask = d < ROPE
    pair = (row * HEADS + head)[:, None]
    q_latent = tl.load(q + pair * WIDTH + c[None, :], mask=m_mask[:, None] & c_mask[None, :], other=0.0)
    q_rope = tl.load(q + pair * WIDTH + RANK + d[None, :], mask=m_mask[:, None] & d_mask[None, :], other=0.0)
    entries = cache + kv_row.to(tl.int64) * (CAPACITY + 1) * WIDTH
    top = tl.full([BLOCK_T * BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_T * BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_T * BLOCK_H, BLOCK_RANK], tl.float32)
    for s0 in range(0, last + 1, BLOCK_S):
        s = s0 + tl.arange(0, BLOCK_S)
        at = entries + (s * WIDTH)[:, None]
        s_mask = (s <= last)[:, None]
        latent = tl.load(at + c[None, :], mask=s_mask & c_mask[None, :], other=0.0)
        key = tl.load(at + RANK + d[None, :], mask=s_mask & d_mask[None, :], other=0.0)
        scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(key), scores, input_precision="ieee") * scale
        top, total, acc = attend(scores, latent, s, position, top, total, acc)
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out + pair * RANK + c[None, :], acc.to(out.dtype.element_ty), mask=m_mask[:, None] & c_mask[None, :])


@triton.jit(do_not_specialize=["R", "kv_row"])
def _gqa_prefill_kernel(
    q, k_cache, v_cache, positions, out, R, kv_row, scale,
    CAPACITY: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = HEADS // KV_HEADS
    m = _last_tile_first() * BLOCK_M + tl.arange(0, BLOCK_M)
    kv_head = tl.program_id(1)
    row = m // GROUP
    m_mask = row < R
    position = tl.load(positions + row, mask=m_mask, other=-1).to(tl.int32)
    last = tl.max(position, axis=0)
    d = tl.arange(0, BLOCK_D)
    d_mask = d < D
    at = (row * HEADS + kv_head * GROUP + m % GROUP)[:, None] * D + d[None, :]
    q_mask = m_mask[:, None] & d_mask[None, :]
    query = tl.load(q + at, mask=q_mask, other=0.0)
    first = (kv_row.to(tl.int64) * (CAPACITY + 1) * KV_HEADS + kv_head) * D
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for s0 in range(0, last + 1, BLOCK_S):
        s = s0 + tl.arange(0, BLOCK_S)
        entry = first + (s * (KV_HEADS * D))[:, None] + d[None, :]
        kv_mask = (s <= last)[:, None] & d_mask[None, :]
        key = tl.load(k_cache + entry, mask=kv_mask, other=0.0)
        value = tl.load(v_cache + entry, mask=kv_mask, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        top, total, acc = attend(scores, value, s, position, top, total, acc)
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=q_mask)


def mla_prefill(q_latent: Tensor, cache: Tensor, rank: int, rows: RowTensors, scale: float, out: Tensor) -> Tensor:
    """Attention in latent space: out [R, heads, rank] of queries q_latent [R, heads, rank+rope] of one sequence.

    cache [B, S_max+1, rank+rope], row rows.kv_start, whose first `rank` channels are the values too. Every row is valid
    and sees the entries 0 … its own position, which are written.
    """
    count, heads, width = q_latent.shape
    assert rows.steps == count == rows.total and out.shape == (count, heads, rank)
    assert q_latent.is_contiguous() and cache.is_contiguous() and out.is_contiguous()
    tile = MLA_TILE if cache.element_size() <= 2 else WIDE_TYPE_TILE
    block_h = power_of_two(heads)
    block_t = max(1, tile.pairs // block_h)
    _mla_prefill_kernel[(triton.cdiv(count, block_t),)](
        q_latent, cache, rows.positions, out, count, rows.kv_start, scale * LOG2_E,
        CAPACITY=cache.shape[1] - 1, HEADS=heads, BLOCK_H=block_h, RANK=rank, ROPE=width - rank,
        BLOCK_RANK=max(16, power_of_two(rank)), BLOCK_ROPE=max(16, power_of_two(width - rank)), BLOCK_T=block_t,
        BLOCK_S=tile.block_s, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def gqa_prefill(q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: RowTensors, scale: float, out: Tensor) -> Tensor:
    """out [R, heads, d] of queries q [R, heads, d] of one sequence over caches [B, S_max+1, kv_heads, d]; see
    `mla_prefill`.
    """
    count, heads, d = q.shape
    _, slots, kv_heads, _ = k_cache.shape
    assert rows.steps == count == rows.total and out.shape == q.shape
    assert q.is_contiguous() and k_cache.is_contiguous() and v_cache.is_contiguous() and out.is_contiguous()
    tile = GQA_TILE if k_cache.element_size() <= 2 else WIDE_TYPE_TILE
    _gqa_prefill_kernel[(triton.cdiv(count * (heads // kv_heads), tile.pairs), kv_heads)](
        q, k_cache, v_cache, rows.positions, out, count, rows.kv_start, scale * LOG2_E,
        CAPACITY=slots - 1, HEADS=heads, KV_HEADS=kv_heads, D=d, BLOCK_D=max(16, power_of_two(d)),
        BLOCK_M=tile.pairs, BLOCK_S=tile.block_s, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out
