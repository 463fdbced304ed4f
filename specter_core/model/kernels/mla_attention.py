# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Decode attention in MLA's absorbed form: every head scores the one shared latent, split at fixed positions."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specter_core.model.kernels.attention import COMBINE_CHUNK, LOG2_E, attend, combine_splits, combined_row
from specter_core.model.kernels.head_linear import HeadTile, head_linear
from specter_core.model.kernels.partials import Partials
from specter_core.model.kernels.pdl import begin, launch_options
from specter_core.model.kernels.rope import RowTensors
from specter_core.model.kernels.splits import split_count, split_of, split_start
from specter_core.model.kernels.tiles import power_of_two


class SplitTile(NamedTuple):
    """Positions per step of a split, and how its program runs."""

    block_s: int = 64
    warps: int = 8
    stages: int = 2


VALUE_TILE = HeadTile(32, 128, 3)


@triton.jit(do_not_specialize=["steps", "kv_start", "splits"])
def _mla_split_kernel(
    q, cache, positions, valid, part, part_top, part_total, steps, kv_start, splits, scale,
    CAPACITY: tl.constexpr, HEADS: tl.constexpr, BLOCK_H: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_ROPE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    WIDTH: tl.constexpr = RANK + ROPE
    tiles = (steps + BLOCK_T - 1) // BLOCK_T
    b = tl.program_id(0) // tiles
    m = tl.arange(0, BLOCK_T * BLOCK_H)
    t = (tl.program_id(0) % tiles) * BLOCK_T + m // BLOCK_H
    head = m % BLOCK_H
    split = tl.program_id(1)
    row = b * steps + t
    m_mask = (t < steps) & (head < HEADS)
    live = m_mask & (tl.load(valid + row, mask=m_mask, other=0) != 0)
    position = tl.where(live, tl.load(positions + row, mask=m_mask, other=0), -1).to(tl.int32)
    start = split_start(split)
    last = tl.minimum(tl.max(position, axis=0), split_start(split + 1) - 1)
    if last < start:
        return
    c = tl.arange(0, BLOCK_RANK)
    d = tl.arange(0, BLOCK_ROPE)
    c_mask = c < RANK
    d_mask = d < ROPE
    q_at = q + (row * HEADS + head)[:, None] * WIDTH
    q_latent = tl.load(q_at + c[None, :], mask=m_mask[:, None] & c_mask[None, :], other=0.0)
    q_rope = tl.load(q_at + RANK + d[None, :], mask=m_mask[:, None] & d_mask[None, :], other=0.0)
    base = (kv_start + b).to(tl.int64) * (CAPACITY + 1)
    top = tl.full([BLOCK_T * BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_T * BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_T * BLOCK_H, BLOCK_RANK], tl.float32)
    for s0 in range(start, last + 1, BLOCK_S):
        s = s0 + tl.arange(0, BLOCK_S)
        at = cache + ((base + s) * WIDTH)[:, None]
        s_mask = (s <= last)[:, None]
        latent = tl.load(at + c[None, :], mask=s_mask & c_mask[None, :], other=0.0)
        key = tl.load(at + RANK + d[None, :], mask=s_mask & d_mask[None, :], other=0.0)
        scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(key), scores, input_precision="ieee") * scale
        top, total, acc = attend(scores, latent, s, position, top, total, acc)
    at = (row * splits + split) * HEADS + head
    tl.store(part + at[:, None] * RANK + c[None, :], acc, mask=m_mask[:, None] & c_mask[None, :])
    tl.store(part_top + at, top, mask=m_mask)
    tl.store(part_total + at, total, mask=m_mask)


@triton.jit(do_not_specialize=["splits"])
def _mla_value_kernel(
    part, part_top, part_total, value_up, positions, valid, out, splits,
    HEADS: tl.constexpr, V: tl.constexpr, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row and head: its splits combined, and BLOCK_N outputs of its value up-projection W_uv."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    c = tl.arange(0, BLOCK_RANK)
    w_at = value_up + (head * RANK + c)[:, None] * V + n[None, :]
    w = tl.load(w_at, mask=(c < RANK)[:, None] & (n < V)[None, :], other=0.0)
    begin(PDL)
    position = tl.where(tl.load(valid + row) != 0, tl.load(positions + row), -1).to(tl.int32)
    latent = combined_row(
        part, part_top, part_total, row, head, split_of(position) + 1, splits, HEADS, RANK, BLOCK_RANK, CHUNK
    )
    y = tl.sum(w.to(tl.float32) * latent[:, None], axis=0)
    tl.store(out + (row * HEADS + head) * V + n, y.to(out.dtype.element_ty), mask=n < V)


def mla_splits(
    q_latent: Tensor, cache: Tensor, rank: int, rows: RowTensors, scale: float, bucket: int, part: Partials, *,
    steps_per_program: int = 1, tile: SplitTile | None = None, pdl: bool = False,
) -> None:  # fmt: skip
    """Partial causal attention of every row over the latents of its sequence, split by split.

    q_latent [R, heads, rank+rope], cache [B, S_max+1, rank+rope], whose first `rank` channels are the values too.
    bucket: positions that the grid covers; every valid row's position is below it, and the result does not depend
    on it. steps_per_program (a power of two): rows of a sequence that share one read of its latents; fixed by the
    caller, whatever R.
    """
    count, heads, width = q_latent.shape
    splits = split_count(bucket)
    part.check(count, heads, rank, splits)
    assert bucket <= cache.shape[1] - 1 and q_latent.is_contiguous() and cache.is_contiguous()
    block_h = power_of_two(heads)
    block_t = max(steps_per_program, 16 // block_h)
    tile = tile or (SplitTile() if cache.element_size() <= 2 else SplitTile(32))  # what shared memory holds
    _mla_split_kernel[(count // rows.steps * triton.cdiv(rows.steps, block_t), splits)](
        q_latent, cache, rows.positions, rows.valid, *part, rows.steps, rows.kv_start, splits, scale * LOG2_E,
        CAPACITY=cache.shape[1] - 1, HEADS=heads, BLOCK_H=block_h, RANK=rank, ROPE=width - rank,
        BLOCK_RANK=max(16, power_of_two(rank)), BLOCK_ROPE=max(16, power_of_two(width - rank)), BLOCK_T=block_t,
        BLOCK_S=tile.block_s, num_warps=tile.warps, num_stages=tile.stages,
        **launch_options(pdl),
    )  # fmt: skip


def mla_values(
    part: Partials,
    value_up: Tensor,
    rows: RowTensors,
    bucket: int,
    out: Tensor,
    *,
    latent: Tensor | None = None,
    row_tile: int = 32,
    pdl: bool = False,
) -> Tensor:
    """Splits summed in ascending order, normalised, and carried out of latent space: out [R, heads·v].

    value_up W_uv [heads, rank, v]. Invalid rows get zeros. latent: buffer [R, heads, rank] for two launches on the
    matrix unit, in row_tile rows at a time; None: one launch, a row at a time, for few rows. The two differ in bits.
    """
    count = out.shape[0]
    heads, rank, v_dim = value_up.shape
    splits = split_count(bucket)
    part.check(count, heads, rank, splits)
    assert value_up.is_contiguous() and out.is_contiguous() and out.shape[1] == heads * v_dim
    if latent is not None:
        combine_splits(part, rows, bucket, latent, pdl=pdl)
        head_linear(latent, value_up, out.view(count, heads, v_dim), row_tile=row_tile, tile=VALUE_TILE, pdl=pdl)
        return out
    block_n = min(32, power_of_two(v_dim))
    _mla_value_kernel[(count, heads, triton.cdiv(v_dim, block_n))](
        *part, value_up, rows.positions, rows.valid, out, splits,
        HEADS=heads, V=v_dim, RANK=rank, BLOCK_RANK=power_of_two(rank), BLOCK_N=block_n, CHUNK=COMBINE_CHUNK,
        num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return out
