# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""MLA before attention: absorb the key up-projection into the query, rotate, append the latent (DeepSeek-V2).

The absorbed form scores a query directly against the cached latents: q·(W_uk c) = (W_ukᵀ q)·c (arXiv:2405.04434,
section 2.1).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specter_core.model.kernels.pdl import begin, launch_options
from specter_core.model.kernels.rope import RopeTables, RowTensors, rotated
from specter_core.model.kernels.tiles import power_of_two


@triton.jit(do_not_specialize=["R", "steps", "kv_start", "switch"])
def _mla_prepare_kernel(
    q_nope, q_rope, k_rope, latent, key_up, norm_weight, cos, sin, positions, valid, context, q_latent, cache,
    R, stride_nope, stride_rope, stride_key, stride_latent, steps, kv_start, switch, eps,
    CAPACITY: tl.constexpr, HEADS: tl.constexpr, NOPE: tl.constexpr, RANK: tl.constexpr,
    ROPE: tl.constexpr, ROWS: tl.constexpr, BLOCK_NOPE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_ROPE: tl.constexpr, BLOCK_H: tl.constexpr, POSITIONS: tl.constexpr,
    SIDES: tl.constexpr, INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    TILES: tl.constexpr = (RANK + BLOCK_N - 1) // BLOCK_N
    WIDTH: tl.constexpr = RANK + ROPE
    job = tl.program_id(1)
    if job < HEADS * TILES:
        # q_latent[r, head, :RANK] = q_nope[r, head] · W_uk[head]
        head = job // TILES
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        row_mask = rows < R
        c = (job % TILES) * BLOCK_N + tl.arange(0, BLOCK_N)
        n = tl.arange(0, BLOCK_NOPE)
        a_at = q_nope + rows[:, None] * stride_nope + head * NOPE + n[None, :]
        a = tl.load(a_at, mask=row_mask[:, None] & (n < NOPE)[None, :], other=0.0)
        w_at = key_up + (head * NOPE + n)[:, None] * RANK + c[None, :]
        w = tl.load(w_at, mask=(n < NOPE)[:, None] & (c < RANK)[None, :], other=0.0)
        y = tl.dot(a, w, input_precision="ieee")
        at = q_latent + (rows * HEADS + head)[:, None] * WIDTH + c[None, :]
        tl.store(at, y.to(q_latent.dtype.element_ty), mask=row_mask[:, None] & (c < RANK)[None, :])
    else:
        row = tl.program_id(0) * ROWS + job - HEADS * TILES
        if row < R:
            is_valid = tl.load(valid + row) != 0
            position = tl.where(is_valid, tl.load(positions + row), 0)
            side = 0
            if SIDES == 2:
                side = (tl.load(context + row) > switch).to(tl.int32)
            d = tl.arange(0, BLOCK_ROPE)
            heads = tl.minimum(tl.arange(0, BLOCK_H), HEADS - 1)[:, None]  # what is behind the last head repeats it
            in_rope = (d < ROPE)[None, :]
            x = q_rope + row * stride_rope + heads * ROPE
            y = rotated(x, d[None, :], in_rope, position, side, cos, sin, POSITIONS, ROPE, INTERLEAVED)
            at = q_latent + (row * HEADS + heads) * WIDTH + RANK + d[None, :]
            tl.store(at, y.to(q_latent.dtype.element_ty), mask=in_rope)
            kv_row = (kv_start + row // steps).to(tl.int64)
            target = cache + (kv_row * (CAPACITY + 1) + tl.where(is_valid, position, CAPACITY)) * WIDTH
            key = k_rope + row * stride_key
            turned = rotated(key, d, d < ROPE, position, side, cos, sin, POSITIONS, ROPE, INTERLEAVED)
            tl.store(target + RANK + d, turned.to(cache.dtype.element_ty), mask=d < ROPE)
            c = tl.arange(0, BLOCK_RANK)
            entry = tl.load(latent + row * stride_latent + c, mask=c < RANK, other=0.0).to(tl.float32)
            entry = entry * tl.rsqrt(tl.sum(entry * entry, axis=0) / RANK + eps)
            entry = entry * tl.load(norm_weight + c, mask=c < RANK, other=0.0).to(tl.float32)
            tl.store(target + c, entry.to(cache.dtype.element_ty), mask=c < RANK)


def mla_prepare(
    q_nope: Tensor, q_rope: Tensor, k_rope: Tensor, latent: Tensor, key_up: Tensor, norm_weight: Tensor, eps: float,
    rows: RowTensors, tables: RopeTables, q_latent: Tensor, cache: Tensor, *, row_tile: int = 16, pdl: bool = False,
) -> None:  # fmt: skip
    """One layer's queries in latent space, and its latent cache entries.

    q_nope [R, heads·nope], q_rope [R, heads·rope], k_rope [R, rope], latent [R, rank], each possibly a part of wider
    rows; key_up W_uk [heads, nope, rank]. Writes q_latent [R, heads, rank+rope] (absorbed | rotated) and cache
    [B, S_max+1, rank+rope] (RMS-normed latent | rotated shared key) at (kv_start + b, position); invalid rows write
    at S_max.
    """
    count, heads, width = q_latent.shape
    _, nope, rank = key_up.shape
    rope = width - rank
    assert key_up.shape[0] == heads and key_up.is_contiguous() and norm_weight.shape == (rank,)
    assert q_nope.shape == (count, heads * nope) and q_rope.shape == (count, heads * rope)
    assert k_rope.shape == (count, rope) and latent.shape == (count, rank)
    assert all(t.stride(1) == 1 for t in (q_nope, q_rope, k_rope, latent))
    assert cache.is_contiguous() and q_latent.is_contiguous() and cache.shape[2] == width
    assert tables.cos.shape[-1] == rope
    block_n = min(64, max(16, power_of_two(rank)))
    _mla_prepare_kernel[(triton.cdiv(count, row_tile), heads * triton.cdiv(rank, block_n) + row_tile)](
        q_nope, q_rope, k_rope, latent, key_up, norm_weight, tables.cos, tables.sin,
        rows.positions, rows.valid, rows.context, q_latent, cache,
        count, q_nope.stride(0), q_rope.stride(0), k_rope.stride(0), latent.stride(0),
        rows.steps, rows.kv_start, tables.switch, eps,
        CAPACITY=cache.shape[1] - 1, HEADS=heads, NOPE=nope, RANK=rank, ROPE=rope, ROWS=row_tile,
        BLOCK_NOPE=max(16, power_of_two(nope)), BLOCK_N=block_n, BLOCK_RANK=power_of_two(rank),
        BLOCK_ROPE=power_of_two(rope), BLOCK_H=power_of_two(heads), POSITIONS=tables.cos.shape[1],
        SIDES=tables.cos.shape[0], INTERLEAVED=tables.interleaved, num_warps=4, **launch_options(pdl),
    )  # fmt: skip
