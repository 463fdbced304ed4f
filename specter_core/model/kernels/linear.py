# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Row-invariant linear layer: optional norm before, bias, SwiGLU, row gate and residuals after, in one
launch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specter_core.model.kernels.pdl import begin, fetch_rows, launch_options, start_next, wait_previous
from specter_core.model.kernels.tiles import LinearTile


class NormWeights(NamedTuple):
    """RMSNorm (bias None and layer False) or LayerNorm over the input's last dimension."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    layer: bool


@triton.jit
def _epilogue(
    y, rows, cols, row_mask, mask, N, bias, row_gate, stride_gate, addend, residual, stride_res,
    HAS_BIAS: tl.constexpr, HAS_GATE: tl.constexpr, HAS_ADDEND: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    if HAS_BIAS:
        y += tl.load(bias + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    if HAS_GATE:
        y *= tl.sigmoid(tl.load(row_gate + rows * stride_gate, mask=row_mask, other=0.0))[:, None]
    if HAS_ADDEND:
        y += tl.load(addend + rows[:, None] * N + cols[None, :], mask=mask, other=0.0)
    if HAS_RESIDUAL:
        y += tl.load(residual + rows[:, None] * stride_res + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    return y


@triton.jit
def _load_rows(x, rows, cols, row_mask, stride, K: tl.constexpr, EVEN_K: tl.constexpr):
    if EVEN_K:
        mask = row_mask[:, None]
    else:
        mask = row_mask[:, None] & (cols < K)[None, :]
    return tl.load(x + rows[:, None] * stride + cols[None, :], mask=mask, other=0.0)


@triton.jit
def _load_weight(w, ns, ks, N: tl.constexpr, K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    at = w + ns.to(tl.int64)[:, None] * K + ks[None, :]
    if EVEN_N and EVEN_K:
        return tl.load(at)
    elif EVEN_K:
        return tl.load(at, mask=(ns < N)[:, None], other=0.0)
    else:
        return tl.load(at, mask=(ns < N)[:, None] & (ks < K)[None, :], other=0.0)


@triton.jit(do_not_specialize=["R"])
def _linear_kernel(
    x, w, bias, norm_weight, norm_bias, row_gate, addend, residual, normed, partial, out,
    R, stride_x, stride_gate, stride_res, stride_out, eps,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr, K_SPAN: tl.constexpr, RMS: tl.constexpr, LAYER: tl.constexpr, LATE_SCALE: tl.constexpr,
    EMIT: tl.constexpr, PAIR: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_GATE: tl.constexpr,
    HAS_ADDEND: tl.constexpr, HAS_RESIDUAL: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # Row tiles vary fastest, so that programs which share a weight tile run together.
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k_start = tl.program_id(2) * K_SPAN
    row_mask = rows < R
    dtype = w.dtype.element_ty
    if PDL:
        start_next()
        fetch_rows(w, ns, N, K, dtype.primitive_bitwidth // 8)
        if PAIR:
            fetch_rows(w + N * K, ns, N, K, dtype.primitive_bitwidth // 8)
        wait_previous()

    scale = tl.zeros([ROWS], tl.float32)
    mean = tl.zeros([ROWS], tl.float32)
    if LAYER:
        for k0 in range(0, K, BLOCK_K):
            ks = k0 + tl.arange(0, BLOCK_K)
            mean += tl.sum(_load_rows(x, rows, ks, row_mask, stride_x, K, EVEN_K).to(tl.float32), axis=1)
        mean = mean / K
    if LAYER or (RMS and not LATE_SCALE):
        for k0 in range(0, K, BLOCK_K):
            ks = k0 + tl.arange(0, BLOCK_K)
            v = _load_rows(x, rows, ks, row_mask, stride_x, K, EVEN_K).to(tl.float32)
            if LAYER:
                v = tl.where((ks < K)[None, :], v - mean[:, None], 0.0)
            scale += tl.sum(v * v, axis=1)
        scale = tl.rsqrt(scale / K + eps)

    acc = tl.zeros([ROWS, BLOCK_N], tl.float32)
    up = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for k0 in range(0, K_SPAN, BLOCK_K):
        ks = k_start + k0 + tl.arange(0, BLOCK_K)
        a = _load_rows(x, rows, ks, row_mask, stride_x, K, EVEN_K)
        if RMS or LAYER:
            v = a.to(tl.float32)
            g = tl.load(norm_weight + ks, mask=ks < K, other=0.0).to(tl.float32)[None, :]
            if LATE_SCALE:
                scale += tl.sum(v * v, axis=1)
                v = v * g
            elif LAYER:
                shift = tl.load(norm_bias + ks, mask=ks < K, other=0.0).to(tl.float32)[None, :]
                v = (v - mean[:, None]) * scale[:, None] * g + shift
            else:
                v = v * scale[:, None] * g
            a = v.to(dtype)
            if EMIT:
                keep = row_mask[:, None] & (ks < K)[None, :] & (tl.program_id(1) == 0)
                tl.store(normed + rows[:, None] * K + ks[None, :], a, mask=keep)
        b = _load_weight(w, ns, ks, N, K, EVEN_N, EVEN_K)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
        if PAIR:
            b = _load_weight(w + N * K, ns, ks, N, K, EVEN_N, EVEN_K)
            up = tl.dot(a, tl.trans(b), up, input_precision="ieee")
    if LATE_SCALE:
        scale = tl.rsqrt(scale / K + eps)
        acc = acc * scale[:, None]
        up = up * scale[:, None]

    mask = row_mask[:, None] & (ns < N)[None, :]
    if SPLIT > 1:
        at = partial + (tl.program_id(2) * R + rows)[:, None] * N + ns[None, :]
        tl.store(at, acc, mask=mask)
    else:
        if PAIR:
            acc = acc * tl.sigmoid(acc) * up
        acc = _epilogue(acc, rows, ns, row_mask, mask, N, bias, row_gate, stride_gate, addend, residual, stride_res,
                        HAS_BIAS, HAS_GATE, HAS_ADDEND, HAS_RESIDUAL)  # fmt: skip
        tl.store(out + rows[:, None] * stride_out + ns[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["R"])
def _sum_splits_kernel(
    partial, bias, row_gate, addend, residual, out, R, stride_gate, stride_res, stride_out,
    N: tl.constexpr, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_GATE: tl.constexpr,
    HAS_ADDEND: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    rows = tl.program_id(0) + tl.arange(0, 1)
    ns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < R)[:, None] & (ns < N)[None, :]
    y = tl.zeros([1, BLOCK_N], tl.float32)
    for s in tl.static_range(SPLIT):
        y += tl.load(partial + (s * R + rows)[:, None] * N + ns[None, :], mask=mask, other=0.0)
    y = _epilogue(y, rows, ns, rows < R, mask, N, bias, row_gate, stride_gate, addend, residual, stride_res,
                  HAS_BIAS, HAS_GATE, HAS_ADDEND, HAS_RESIDUAL)  # fmt: skip
    tl.store(out + rows[:, None] * stride_out + ns[None, :], y.to(out.dtype.element_ty), mask=mask)


def linear(
    x: Tensor,
    w: Tensor,
    out: Tensor,
    tile: LinearTile,
    *,
    bias: Tensor | None = None,
    norm: NormWeights | None = None,
    normed: Tensor | None = None,
    swiglu: bool = False,
    row_gate: Tensor | None = None,
    addend: Tensor | None = None,
    residual: Tensor | None = None,
    partial: Tensor | None = None,
    keep_parts: bool = False,
    pdl: bool = False,
) -> Tensor:
    """out[r] = residual[r] + addend[r] + sigmoid(row_gate[r]) · (w · norm(x[r]) + bias), each part
    optional.

    x [R, in]; w [out, in] contiguous in x's dtype; out [R, out] in any float dtype (rows may be strided).
    swiglu: w is [2·out, in], gate rows first, and silu(gate)·up takes the product's place (no bias). norm
    normalises x first; normed [R, in] receives the normalised rows. row_gate [R] float32 (strided), addend
    [R, out] float32 contiguous, residual [R, out] (may be out itself). A tile with split > 1 needs
    partial, float32 with split·R·out elements; keep_parts leaves the [split, R, out] sums there, unfinished
    (no bias and so on), and out as it was. pdl: launch as pdl.py says. Accumulates in float32. A row's
    bits depend on that row, the weights and the tile alone.
    """
    rows, k = x.shape
    n = out.shape[1]
    assert w.shape == ((2 * n if swiglu else n), k) and w.is_contiguous() and w.dtype == x.dtype
    assert x.stride(1) == out.stride(1) == 1 and out.shape[0] == rows
    assert x.data_ptr() % 16 == w.data_ptr() % 16 == 0, "unaligned tensors compile to another kernel"
    assert not (swiglu and (bias is not None or tile.split > 1)) and (normed is None or norm is not None)
    layer = norm is not None and norm.layer
    rms = norm is not None and not norm.layer
    # Scaling after the product saves a pass over x; x · weight could overflow float16, and `normed` needs the scale.
    late = rms and normed is None and tile.split == 1 and x.dtype != torch.float16
    span = triton.cdiv(triton.cdiv(k, tile.block_k), tile.split) * tile.block_k
    flags = {
        "HAS_BIAS": bias is not None,
        "HAS_GATE": row_gate is not None,
        "HAS_ADDEND": addend is not None,
        "HAS_RESIDUAL": residual is not None,
    }
    if tile.split > 1:
        assert partial is not None and partial.numel() >= tile.split * rows * n
    stride_gate = row_gate.stride(0) if row_gate is not None else 0
    stride_res = residual.stride(0) if residual is not None else 0
    _linear_kernel[(triton.cdiv(rows, tile.rows), triton.cdiv(n, tile.block_n), tile.split)](
        x, w, or_placeholder(bias, w), or_placeholder(norm.weight if norm else None, w),
        or_placeholder(norm.bias if norm else None, w), or_placeholder(row_gate, w), or_placeholder(addend, w),
        or_placeholder(residual, w), or_placeholder(normed, w), or_placeholder(partial, w), out,
        rows, x.stride(0), stride_gate, stride_res, out.stride(0), norm.eps if norm else 0.0,
        N=n, K=k, ROWS=tile.rows, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, SPLIT=tile.split, K_SPAN=span,
        RMS=rms, LAYER=layer, LATE_SCALE=late, EMIT=normed is not None, PAIR=swiglu,
        EVEN_N=n % tile.block_n == 0, EVEN_K=k % tile.block_k == 0 and span * tile.split == k, **flags,
        num_warps=tile.warps, num_stages=tile.stages, **launch_options(pdl),
    )  # fmt: skip
    if tile.split > 1 and not keep_parts:
        block = 256
        _sum_splits_kernel[(rows, triton.cdiv(n, block))](
            partial, or_placeholder(bias, w), or_placeholder(row_gate, w), or_placeholder(addend, w),
            or_placeholder(residual, w), out,
            rows, stride_gate, stride_res, out.stride(0), N=n, SPLIT=tile.split, BLOCK_N=block, **flags, num_warps=4,
            **launch_options(pdl),
        )  # fmt: skip
    return out


def or_placeholder(given: Tensor | None, placeholder: Tensor) -> Tensor:
    """A pointer for an argument that the kernel's flags leave unread."""
    return placeholder if given is None else given
