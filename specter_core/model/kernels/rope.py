# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Rotary positions on the device: tables, and rope + KV append for grouped-query attention."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specter_core.model.kernels.pdl import begin, launch_options
from specter_core.model.kernels.tiles import power_of_two


class RopeTables(NamedTuple):
    """cos and signed sin, float32 [V, P, dim]: rotated = x·cos + swapped(x)·sin, the swap's sign being in sin.

    V = 2 for longrope: rows whose context exceeds `switch` use the second. P positions (rows stay below it).
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool
    switch: int


class RowTensors(NamedTuple):
    """The rows of a pass on the device: positions and context int64 [R], valid bool [R]; flat row r = b·steps + t.

    Row b's keys are in row kv_start + b of the cache. Invalid rows have any position; they write to the dump row.
    """

    positions: Tensor
    valid: Tensor
    context: Tensor
    steps: int
    kv_start: int = 0

    @property
    def total(self) -> int:
        """R."""
        return self.positions.shape[0]


@triton.jit
def rotated(x, d, dim_mask, position, side, cos, sin, POSITIONS: tl.constexpr, D: tl.constexpr,
            INTERLEAVED: tl.constexpr):  # fmt: skip
    """float32 x·cos + swapped(x)·sin of the D channels at pointer x; d: channel index block."""
    if INTERLEAVED:
        other = d ^ 1
    else:
        other = (d + D // 2) % D
    at = (side * POSITIONS + position) * D + d
    a = tl.load(x + d, mask=dim_mask, other=0.0).to(tl.float32)
    b = tl.load(x + other, mask=dim_mask, other=0.0).to(tl.float32)
    return a * tl.load(cos + at, mask=dim_mask, other=0.0) + b * tl.load(sin + at, mask=dim_mask, other=0.0)


@triton.jit(do_not_specialize=["steps", "kv_start", "switch"])
def _rope_append_kernel(
    qkv, q_out, k_cache, v_cache, positions, valid, context, cos, sin, stride_qkv, steps, kv_start, switch,
    CAPACITY: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    POSITIONS: tl.constexpr, SIDES: tl.constexpr, INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    dim_mask = d < D
    is_valid = tl.load(valid + row) != 0
    position = tl.where(is_valid, tl.load(positions + row), 0)
    side = 0
    if SIDES == 2:
        side = (tl.load(context + row) > switch).to(tl.int32)
    source = qkv + row.to(tl.int64) * stride_qkv + head * D
    y = rotated(source, d, dim_mask, position, side, cos, sin, POSITIONS, D, INTERLEAVED)
    if head < HEADS:
        at = q_out + (row * HEADS + head) * D + d
        tl.store(at, y.to(q_out.dtype.element_ty), mask=dim_mask)
    else:
        kv_row = kv_start + row // steps
        slot = kv_row.to(tl.int64) * (CAPACITY + 1) + tl.where(is_valid, position, CAPACITY)
        target = (slot * KV_HEADS + head - HEADS) * D + d
        tl.store(k_cache + target, y.to(k_cache.dtype.element_ty), mask=dim_mask)
        v = tl.load(source + KV_HEADS * D + d, mask=dim_mask)
        tl.store(v_cache + target, v.to(v_cache.dtype.element_ty), mask=dim_mask)


def rope_append(
    qkv: Tensor,
    q_out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: RowTensors,
    tables: RopeTables,
    pdl: bool = False,
) -> None:
    """qkv [R, (heads + 2·kv_heads)·d] -> rotated q in q_out [R, heads, d]; k (rotated) and v into the caches.

    Caches [B, S_max+1, kv_heads, d] contiguous, written at (kv_start + b, position); invalid rows write at S_max.
    """
    count, heads, d = q_out.shape
    _, slots, kv_heads, _ = k_cache.shape
    assert qkv.shape == (count, (heads + 2 * kv_heads) * d) and qkv.stride(1) == 1
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and q_out.is_contiguous()
    assert tables.cos.shape[-1] == d and tables.cos.is_contiguous() and tables.sin.is_contiguous()
    _rope_append_kernel[(count, heads + kv_heads)](
        qkv, q_out, k_cache, v_cache, rows.positions, rows.valid, rows.context, tables.cos, tables.sin,
        qkv.stride(0), rows.steps, rows.kv_start, tables.switch,
        CAPACITY=slots - 1, HEADS=heads, KV_HEADS=kv_heads, D=d, BLOCK_D=power_of_two(d),
        POSITIONS=tables.cos.shape[1], SIDES=tables.cos.shape[0], INTERLEAVED=tables.interleaved, num_warps=1,
        **launch_options(pdl),
    )  # fmt: skip
