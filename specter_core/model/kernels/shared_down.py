# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# ruff: noqa: RUF005 - Triton compiles no starred expressions
"""The shared experts' down-projection for few rows, as programs inside a launch that does something else besides.

A warp takes a whole weight row, so that no warp waits for another: AHEAD x CHUNK weights at a time, the first of them
before the program waits for the launch that makes its inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specter_core.model.kernels.pdl import wait_previous


class SharedDown(NamedTuple):
    """out float32 [R, H] = residual [R, H] + sigmoid(gate float32 [R]) * (inner [R, I] . weight [H, I])."""

    inner: Tensor
    weight: Tensor
    gate: Tensor | None
    residual: Tensor
    out: Tensor

    def lines(self, columns: int, warps: int) -> int:
        """Lines of `columns` programs that have an output per warp."""
        assert self.weight.is_contiguous() and self.inner.stride(1) == 1 and self.out.is_contiguous()
        assert self.weight.shape == (self.out.shape[1], self.inner.shape[1]) and self.residual.is_contiguous()
        assert self.weight.data_ptr() % 16 == self.inner.data_ptr() % 16 == 0 and self.inner.stride(0) % 8 == 0
        return triton.cdiv(triton.cdiv(self.out.shape[1], warps), columns)


class Launch(NamedTuple):
    """What a kernel around takes: arguments inner … stride_inner, and constants."""

    lines: int
    arguments: tuple[Tensor | int, ...]
    constants: dict[str, int]

    @staticmethod
    def of(shared: SharedDown | None, columns: int, warps: int, placeholder: Tensor) -> Launch:
        """In programs of that many warps, `columns` a line. shared None: no lines."""
        if shared is None:
            return Launch(0, (*(placeholder,) * 5, 0), {"LINES": 0, "SHARED_N": 0, "SHARED_K": 0, "SHARED_GATED": 0})
        inner, weight, gate, residual, out = shared
        n, k = weight.shape
        lines = shared.lines(columns, warps)
        arguments = inner, weight, placeholder if gate is None else gate, residual, out, inner.stride(0)
        constants = {"LINES": lines, "SHARED_N": n, "SHARED_K": k, "SHARED_GATED": int(gate is not None)}
        return Launch(lines, arguments, constants)


@triton.jit
def _chunk(at, first, CHUNK: tl.constexpr, K: tl.constexpr, WHOLE: tl.constexpr):
    """at [WARPS, CHUNK]: pointers at the first inputs of weight rows."""
    if WHOLE:
        return tl.load(at + first, eviction_policy="evict_first")
    ks = first + tl.arange(0, CHUNK)[None, :]
    return tl.load(at + first, mask=ks < K, other=0.0, eviction_policy="evict_first")


@triton.jit
def _inputs(at, first, CHUNK: tl.constexpr, K: tl.constexpr, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(at + first)
    return tl.load(at + first, mask=first + tl.arange(0, CHUNK)[None, :] < K, other=0.0)


@triton.jit
def shared_down_rows(
    inner, w, gate, residual, out, program, rows, stride_inner,
    N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Outputs WARPS * program … WARPS * (program + 1) of every row."""
    CHUNK: tl.constexpr = 256  # a warp's load of 16 bytes per thread
    AHEAD: tl.constexpr = 4  # more would take registers, and with them programs, from the launch around
    STEP: tl.constexpr = AHEAD * CHUNK
    FULL: tl.constexpr = K >= STEP
    EVEN: tl.constexpr = K % STEP == 0
    ns = program * WARPS + tl.arange(0, WARPS)
    lines = tl.minimum(ns, N - 1)[:, None]
    ks = tl.arange(0, CHUNK)[None, :]
    at_w = w + lines.to(tl.int64) * K + ks
    fetched = ()
    for chunk in tl.static_range(AHEAD):
        fetched = fetched + (_chunk(at_w, chunk * CHUNK, CHUNK, K, FULL),)
    tl.debug_barrier()
    if PDL:
        wait_previous()
    for row in range(rows):
        at_x = inner + row * stride_inner + lines * 0 + ks
        before = tl.load(residual + row * N + ns, mask=ns < N, other=0.0).to(tl.float32)
        factor = 1.0
        if GATED:
            factor = tl.sigmoid(tl.load(gate + row))
        sums = tl.zeros([WARPS, CHUNK], tl.float32)
        for chunk in tl.static_range(AHEAD):
            sums += fetched[chunk].to(tl.float32) * _inputs(at_x, chunk * CHUNK, CHUNK, K, FULL).to(tl.float32)
        for first in range(STEP, K, STEP):
            now = ()
            for chunk in tl.static_range(AHEAD):
                now = now + (_chunk(at_w, first + chunk * CHUNK, CHUNK, K, EVEN),)
            for chunk in tl.static_range(AHEAD):
                sums += now[chunk].to(tl.float32) * _inputs(at_x, first + chunk * CHUNK, CHUNK, K, EVEN).to(tl.float32)
        tl.store(out + row * N + ns, tl.sum(sums, axis=1) * factor + before, mask=ns < N)
