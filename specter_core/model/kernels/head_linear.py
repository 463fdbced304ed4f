# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""One small product per head, row-invariant like the linear layer."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specter_core.model.kernels.pdl import begin, launch_options
from specter_core.model.kernels.tiles import power_of_two


class HeadTile(NamedTuple):
    """Outputs and inputs per step of a program, at most."""

    block_n: int = 64
    block_k: int = 128
    stages: int = 3


@triton.jit(do_not_specialize=["R"])
def _head_linear_kernel(
    x, w, out, R, stride_x, stride_head, K: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = rows < R
    y = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for k0 in range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        a_at = x + rows.to(tl.int64)[:, None] * stride_x + head * stride_head + k[None, :]
        a = tl.load(a_at, mask=row_mask[:, None] & (k < K)[None, :], other=0.0)
        b_at = w + (head * K + k)[:, None] * N + n[None, :]
        b = tl.load(b_at, mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
        y = tl.dot(a, b, y, input_precision="ieee")
    at = out + (rows.to(tl.int64) * tl.num_programs(1) + head)[:, None] * N + n[None, :]
    tl.store(at, y.to(out.dtype.element_ty), mask=row_mask[:, None] & (n < N)[None, :])


def head_linear(
    x: Tensor, w: Tensor, out: Tensor, *, row_tile: int = 16, tile: HeadTile | None = None, pdl: bool = False
) -> Tensor:
    """x [R, n, in] (rows and heads may be strided), w [n, in, out] -> out [R, n, out]."""
    count, heads, k = x.shape
    n = w.shape[2]
    assert w.shape == (heads, k, n) and w.is_contiguous() and out.is_contiguous() and x.stride(2) == 1
    assert out.shape == (count, heads, n) and w.dtype == x.dtype
    tile = tile or HeadTile()
    block_n = min(tile.block_n, max(16, power_of_two(n)))
    _head_linear_kernel[(triton.cdiv(count, row_tile), heads, triton.cdiv(n, block_n))](
        x, w, out, count, x.stride(0), x.stride(1), K=k, N=n, ROWS=row_tile, BLOCK_N=block_n,
        BLOCK_K=min(tile.block_k, max(16, power_of_two(k))), num_warps=4, num_stages=tile.stages, **launch_options(pdl),
    )  # fmt: skip
    return out
