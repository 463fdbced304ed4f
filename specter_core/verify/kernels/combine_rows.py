# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The one fixed-order sum over a row's experts."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specter_core.model.kernels.tiles import power_of_two


@triton.jit
def _sum(rows, weights, ids, r, h, TOP_K: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr):
    """float32 [BLOCK]: row r's results at h, weighted and summed by ascending choice."""
    y = tl.zeros([BLOCK], tl.float32)
    for c in tl.static_range(TOP_K):
        pair = r * TOP_K + c
        live = tl.load(ids + pair) >= 0
        value = tl.load(rows + pair.to(tl.int64) * H + h, mask=live & (h < H), other=0.0)
        y += tl.where(live, tl.load(weights + pair), 0.0) * value
    return y


@triton.jit
def _combine_rows_kernel(rows, weights, ids, out, TOP_K: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = _sum(rows, weights, ids, r, h, TOP_K, H, BLOCK)
    tl.store(out + r.to(tl.int64) * H + h, y, mask=h < H)


@triton.jit
def _add_rows_kernel(
    rows, weights, ids, shared, x, TOP_K: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, SHARED: tl.constexpr
):
    r = tl.program_id(0)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = _sum(rows, weights, ids, r, h, TOP_K, H, BLOCK)
    at = r.to(tl.int64) * H + h
    if SHARED:
        y += tl.load(shared + at, mask=h < H, other=0.0)
    y += tl.load(x + at, mask=h < H, other=0.0).to(tl.float32)
    tl.store(x + at, y.to(x.dtype.element_ty), mask=h < H)


def combine_rows(rows: Tensor, weights: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    """out[r] = Σ_c weights[r, c]·rows[r, c] in FP32, by ascending c (ids ascend in a row); id -1 adds nothing.

    rows float32 [R, k, H], weights float32 [R, k], ids int64 [R, k], out float32 [R, H].
    """
    count, top_k, hidden = rows.shape
    assert rows.is_contiguous() and weights.is_contiguous() and ids.is_contiguous() and out.is_contiguous()
    block = min(1024, power_of_two(hidden))
    _combine_rows_kernel[(count, triton.cdiv(hidden, block))](
        rows, weights, ids, out, TOP_K=top_k, H=hidden, BLOCK=block, num_warps=4
    )
    return out


def add_rows(rows: Tensor, weights: Tensor, ids: Tensor, shared: Tensor | None, x: Tensor) -> Tensor:
    """x[r] += Σ_c weights[r, c]·rows[r, c] + shared[r], as in `combine_rows`, rounded once. shared float32 [R, H]."""
    count, top_k, hidden = rows.shape
    assert rows.is_contiguous() and weights.is_contiguous() and ids.is_contiguous() and x.is_contiguous()
    assert x.shape == (count, hidden) and (shared is None or (shared.is_contiguous() and shared.shape == x.shape))
    block = min(1024, power_of_two(hidden))
    _add_rows_kernel[(count, triton.cdiv(hidden, block))](
        rows, weights, ids, x if shared is None else shared, x,
        TOP_K=top_k, H=hidden, BLOCK=block, SHARED=shared is not None, num_warps=4,
    )  # fmt: skip
    return x
