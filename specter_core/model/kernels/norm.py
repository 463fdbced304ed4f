# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Norms and softmax over single rows, one program per row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specter_core.model.kernels.pdl import begin, launch_options
from specter_core.model.kernels.tiles import power_of_two


@triton.jit
def _norm_kernel(x, weight, bias, out, stride_x, stride_out, eps, H: tl.constexpr, BLOCK: tl.constexpr,
                 LAYER: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    mask = h < H
    v = tl.load(x + row * stride_x + h, mask=mask, other=0.0).to(tl.float32)
    if LAYER:
        v = tl.where(mask, v - tl.sum(v, axis=0) / H, 0.0)
    v = v * tl.rsqrt(tl.sum(v * v, axis=0) / H + eps)
    v = v * tl.load(weight + h, mask=mask, other=0.0).to(tl.float32)
    if LAYER:
        v += tl.load(bias + h, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * stride_out + h, v.to(out.dtype.element_ty), mask=mask)


def norm_rows(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor, pdl: bool = False) -> Tensor:
    """RMSNorm (bias None) or LayerNorm of x [R, H] -> out [R, H]; statistics in float32."""
    count, hidden = x.shape
    assert x.stride(1) == out.stride(1) == 1 and out.shape == x.shape
    _norm_kernel[(count,)](
        x, weight, weight if bias is None else bias, out, x.stride(0), out.stride(0), eps,
        H=hidden, BLOCK=power_of_two(hidden), LAYER=bias is not None, num_warps=4,
        **launch_options(pdl),
    )  # fmt: skip
    return out


@triton.jit
def _softmax_kernel(x, out, stride_x, N: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    v = tl.load(x + row * stride_x + n, mask=n < N, other=float("-inf")).to(tl.float32)
    v = tl.exp(v - tl.max(v, axis=0))
    tl.store(out + row * N + n, v / tl.sum(v, axis=0), mask=n < N)


def softmax_rows(x: Tensor, out: Tensor) -> Tensor:
    """x [R, N] -> float32 out [R, N], for rows that fit one program (routers)."""
    count, n = x.shape
    assert x.stride(1) == 1 and out.is_contiguous() and out.shape == x.shape
    _softmax_kernel[(count,)](x, out, x.stride(0), N=n, BLOCK=power_of_two(n), num_warps=1)
    return out
