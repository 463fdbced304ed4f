# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Decode attention in MLA's absorbed form: every head scores the one shared latent, split at fixed positions."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specter_core.model.kernels.attention import LOG2_E, softmax_step
from specter_core.model.kernels.partials import Partials
from specter_core.model.kernels.pdl import begin, launch_options
from specter_core.model.kernels.rope import RowTensors
from specter_core.model.kernels.splits import split_count, split_of, split_start
from specter_core.model.kernels.tiles import power_of_two

BLOCK_S = 32


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
        scores = tl.where(s[None, :] <= position[:, None], scores, float("-inf"))
        p, rescale, top, total = softmax_step(scores, top, total)
        acc = tl.dot(p.to(latent.dtype), latent, acc * rescale[:, None], input_precision="ieee")
    at = (row * splits + split) * HEADS + head
    tl.store(part + at[:, None] * RANK + c[None, :], acc, mask=m_mask[:, None] & c_mask[None, :])
    tl.store(part_top + at, top, mask=m_mask)
    tl.store(part_total + at, total, mask=m_mask)


@triton.jit(do_not_specialize=["R", "splits"])
def _mla_value_kernel(
    part, part_top, part_total, value_up, positions, valid, out, R, splits,
    HEADS: tl.constexpr, V: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Combine the splits of a head in order and apply its value up-projection W_uv."""
    begin(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = rows < R
    live = row_mask & (tl.load(valid + rows, mask=row_mask, other=0) != 0)
    position = tl.where(live, tl.load(positions + rows, mask=row_mask, other=0), -1).to(tl.int32)
    count = split_of(position) + 1  # [ROWS]; 0 for invalid rows
    most = tl.max(count, axis=0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    for s in range(most):
        at = (rows * splits + s) * HEADS + head
        top = tl.maximum(top, tl.load(part_top + at, mask=s < count, other=float("-inf")))
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([ROWS], tl.float32)
    for s in range(most):
        at = (rows * splits + s) * HEADS + head
        weight = tl.exp2(tl.load(part_top + at, mask=s < count, other=float("-inf")) - top)
        total += weight * tl.load(part_total + at, mask=s < count, other=0.0)
    share = 1.0 / tl.where(total > 0.0, total, 1.0)
    y = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for k0 in range(0, RANK, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        latent = tl.zeros([ROWS, BLOCK_K], tl.float32)
        for s in range(most):
            at = (rows * splits + s) * HEADS + head
            weight = tl.exp2(tl.load(part_top + at, mask=s < count, other=float("-inf")) - top)
            mask = (s < count)[:, None] & (k < RANK)[None, :]
            latent += weight[:, None] * tl.load(part + at[:, None] * RANK + k[None, :], mask=mask, other=0.0)
        w_at = value_up + (head * RANK + k)[:, None] * V + n[None, :]
        w = tl.load(w_at, mask=(k < RANK)[:, None] & (n < V)[None, :], other=0.0)
        y = tl.dot((latent * share[:, None]).to(w.dtype), w, y, input_precision="ieee")
    at = out + (rows * HEADS + head)[:, None] * V + n[None, :]
    tl.store(at, y.to(out.dtype.element_ty), mask=row_mask[:, None] & (n < V)[None, :])


def mla_splits(
    q_latent: Tensor, cache: Tensor, rank: int, rows: RowTensors, scale: float, bucket: int, part: Partials, *,
    steps_per_program: int = 1, pdl: bool = False,
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
    _mla_split_kernel[(count // rows.steps * triton.cdiv(rows.steps, block_t), splits)](
        q_latent, cache, rows.positions, rows.valid, *part, rows.steps, rows.kv_start, splits, scale * LOG2_E,
        CAPACITY=cache.shape[1] - 1, HEADS=heads, BLOCK_H=block_h, RANK=rank, ROPE=width - rank,
        BLOCK_RANK=max(16, power_of_two(rank)), BLOCK_ROPE=max(16, power_of_two(width - rank)), BLOCK_T=block_t,
        BLOCK_S=BLOCK_S, num_warps=4 if block_t * block_h <= 16 else 8, num_stages=2,
        **launch_options(pdl),
    )  # fmt: skip


def mla_values(
    part: Partials,
    value_up: Tensor,
    rows: RowTensors,
    bucket: int,
    out: Tensor,
    *,
    row_tile: int = 16,
    pdl: bool = False,
) -> Tensor:
    """Splits summed in ascending order, normalised, and carried out of latent space: out [R, heads·v].

    value_up W_uv [heads, rank, v]. Invalid rows get zeros.
    """
    count = out.shape[0]
    heads, rank, v_dim = value_up.shape
    splits = split_count(bucket)
    part.check(count, heads, rank, splits)
    assert value_up.is_contiguous() and out.is_contiguous() and out.shape[1] == heads * v_dim
    block_n = min(32, max(16, power_of_two(v_dim)))
    _mla_value_kernel[(triton.cdiv(count, row_tile), heads, triton.cdiv(v_dim, block_n))](
        *part, value_up, rows.positions, rows.valid, out, count, splits,
        HEADS=heads, V=v_dim, RANK=rank, ROWS=row_tile, BLOCK_N=block_n,
        BLOCK_K=min(128, max(16, power_of_two(rank))), num_warps=4, num_stages=3, **launch_options(pdl),
    )  # fmt: skip
    return out
