# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Small row-wise steps as launches of their own, where nothing is there to fuse them into."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specter_core.model.kernels.tiles import power_of_two


@triton.jit
def _silu_mul_kernel(gate, up, out, stride_gate, stride_up, N: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + row * stride_gate + n, mask=n < N, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride_up + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + row * N + n, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=n < N)


def silu_mul(gate: Tensor, up: Tensor, out: Tensor) -> Tensor:
    """silu(gate)·up of [R, I] (rows may be strided) -> out [R, I], computed in float32."""
    count, n = gate.shape
    assert gate.stride(1) == up.stride(1) == 1 and up.shape == out.shape == gate.shape and out.is_contiguous()
    block = min(1024, power_of_two(n))
    _silu_mul_kernel[(count, triton.cdiv(n, block))](
        gate, up, out, gate.stride(0), up.stride(0), N=n, BLOCK=block, num_warps=4
    )
    return out


@triton.jit
def _rope_kernel(x, cos, sin, out, stride_row, stride_head, D: tl.constexpr, BLOCK: tl.constexpr,
                 INTERLEAVED: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK)
    if INTERLEAVED:
        other = d ^ 1
    else:
        other = (d + D // 2) % D
    at = x + row.to(tl.int64) * stride_row + head * stride_head
    a = tl.load(at + d, mask=d < D, other=0.0).to(tl.float32)
    b = tl.load(at + other, mask=d < D, other=0.0).to(tl.float32)
    c = tl.load(cos + row * D + d, mask=d < D, other=0.0)
    s = tl.load(sin + row * D + d, mask=d < D, other=0.0)
    target = out + (row.to(tl.int64) * tl.num_programs(1) + head) * D + d
    tl.store(target, (a * c + b * s).to(out.dtype.element_ty), mask=d < D)


def rope_rows(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, out: Tensor) -> Tensor:
    """x [R, n, d] (rows and heads may be strided), cos and signed sin float32 [R, d] -> out [R, n, d], rotated."""
    count, heads, d = x.shape
    assert x.stride(2) == 1 and cos.is_contiguous() and sin.is_contiguous() and out.is_contiguous()
    assert cos.numel() == sin.numel() == count * d and out.shape == x.shape
    _rope_kernel[(count, heads)](
        x, cos, sin, out, x.stride(0), x.stride(1), D=d, BLOCK=power_of_two(d), INTERLEAVED=interleaved, num_warps=1
    )
    return out
