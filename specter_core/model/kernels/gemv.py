# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Linear layer for the draft's few rows: no matrix unit, every weight of a program in registers at once.

A product with one row is a stream of its weight. A program takes whole weight rows in 16-byte loads, all in flight
before the first is used, then multiplies them with one input row after another.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specter_core.model.kernels.linear import NormWeights, or_placeholder
from specter_core.model.kernels.pdl import launch_options, start_next, wait_previous
from specter_core.model.kernels.router import Routing, route_row
from specter_core.model.kernels.tiles import GemvTile, power_of_two

_ROUTING_OPTIONS = ("TOP_K", "EXPERTS", "BLOCK_E", "NORMALISE", "SPARSEMIXER", "COUNT", "GATE")


@triton.jit
def _weights(w, ns, ks, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    at = w + ns.to(tl.int64)[:, None] * K + ks[None, :]
    if N % BLOCK_N == 0 and K == BLOCK_K:
        return tl.load(at, eviction_policy="evict_first")
    return tl.load(at, mask=(ns < N)[:, None] & (ks < K)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _input_row(x, gain, shift, ks, eps, K: tl.constexpr, RMS: tl.constexpr, LAYER: tl.constexpr):
    """float32 values of a row and the factor that its products still need: the norm's, or 1."""
    v = tl.load(x + ks, mask=ks < K, other=0.0).to(tl.float32)
    scale = 1.0
    if LAYER:
        v = tl.where(ks < K, v - tl.sum(v, axis=0) / K, 0.0)
        v = v * tl.rsqrt(tl.sum(v * v, axis=0) / K + eps) * gain + shift
    if RMS:
        scale = tl.rsqrt(tl.sum(v * v, axis=0) / K + eps)
        v = v * gain
    return v, scale


@triton.jit(do_not_specialize=["R"])
def _gemv_kernel(
    x, w, bias, norm_weight, norm_bias, row_gate, addend, residual, normed, out, router, logits,
    ids, weights, valid, counters, gate, arrivals,
    R, stride_x, stride_gate, stride_res, stride_out, stride_logits, eps, scaling, tie,
    N: tl.constexpr, K: tl.constexpr, LOGITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    RMS: tl.constexpr, LAYER: tl.constexpr, EMIT: tl.constexpr, PAIR: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_ADDEND: tl.constexpr, HAS_RESIDUAL: tl.constexpr, MANY: tl.constexpr,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, NORMALISE: tl.constexpr,
    SPARSEMIXER: tl.constexpr, COUNT: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    ROUTER_TILES: tl.constexpr = (LOGITS + BLOCK_N - 1) // BLOCK_N
    ks = tl.arange(0, BLOCK_K)
    tile = tl.program_id(0) - ROUTER_TILES
    if tile < 0:
        ns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        b = _weights(router, ns, ks, LOGITS, K, BLOCK_N, BLOCK_K)
        tl.debug_barrier()  # keeps the compiler from putting off some of the loads until others have arrived
        gain = tl.load(norm_weight + ks, mask=ks < K, other=0.0).to(tl.float32)
        shift = gain
        if LAYER:
            shift = tl.load(norm_bias + ks, mask=ks < K, other=0.0).to(tl.float32)
        if PDL:
            start_next()
            wait_previous()
        count = 1
        if MANY:
            count = R
        for row in range(count):
            v, scale = _input_row(x + row * stride_x, gain, shift, ks, eps, K, RMS, LAYER)
            y = tl.sum(b.to(tl.float32) * v[None, :], axis=1) * scale
            tl.store(logits + row * stride_logits + ns, y, mask=ns < LOGITS)
            if EMIT:
                value = (v * scale).to(normed.dtype.element_ty)
                tl.store(normed + row * K + ks, value, mask=(ks < K) & (tl.program_id(0) == 0))
        if TOP_K:
            tl.debug_barrier()
            if tl.atomic_add(arrivals, 1, sem="acq_rel") == ROUTER_TILES - 1:  # the last: every logit is there
                e = tl.arange(0, BLOCK_E)
                for row in range(count):
                    scores = tl.load(logits + row * stride_logits + e, mask=e < LOGITS, other=0.0)
                    live = tl.load(valid + row) != 0
                    route_row(
                        scores, e, row, live, ids, weights, counters, gate, scaling, tie,
                        EXPERTS, BLOCK_E, TOP_K, NORMALISE, SPARSEMIXER, COUNT, GATE,
                    )  # fmt: skip
                tl.store(arrivals, 0)
    else:
        ns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        b = _weights(w, ns, ks, N, K, BLOCK_N, BLOCK_K)
        b_up = b
        if PAIR:
            b_up = _weights(w + N * K, ns, ks, N, K, BLOCK_N, BLOCK_K)
        tl.debug_barrier()
        gain = tl.zeros([BLOCK_K], tl.float32)
        shift = gain
        if RMS or LAYER:
            gain = tl.load(norm_weight + ks, mask=ks < K, other=0.0).to(tl.float32)
        if LAYER:
            shift = tl.load(norm_bias + ks, mask=ks < K, other=0.0).to(tl.float32)
        if PDL:
            start_next()
            wait_previous()
        count = 1
        if MANY:
            count = R
        mask = ns < N
        for row in range(count):
            before = tl.zeros([BLOCK_N], tl.float32)
            after = tl.zeros([BLOCK_N], tl.float32)
            factor = 1.0
            if HAS_BIAS:
                before = tl.load(bias + ns, mask=mask, other=0.0).to(tl.float32)
            if HAS_GATE:
                factor = tl.sigmoid(tl.load(row_gate + row * stride_gate))
            if HAS_ADDEND:
                after += tl.load(addend + row * N + ns, mask=mask, other=0.0)
            if HAS_RESIDUAL:
                after += tl.load(residual + row * stride_res + ns, mask=mask, other=0.0).to(tl.float32)
            v, scale = _input_row(x + row * stride_x, gain, shift, ks, eps, K, RMS, LAYER)
            y = tl.sum(b.to(tl.float32) * v[None, :], axis=1) * scale
            if PAIR:
                y = y * tl.sigmoid(y) * (tl.sum(b_up.to(tl.float32) * v[None, :], axis=1) * scale)
            y = (y + before) * factor + after
            tl.store(out + row * stride_out + ns, y.to(out.dtype.element_ty), mask=mask)


def gemv(
    x: Tensor,
    w: Tensor,
    out: Tensor,
    tile: GemvTile,
    *,
    bias: Tensor | None = None,
    norm: NormWeights | None = None,
    swiglu: bool = False,
    row_gate: Tensor | None = None,
    addend: Tensor | None = None,
    residual: Tensor | None = None,
    router: Tensor | None = None,
    logits: Tensor | None = None,
    normed: Tensor | None = None,
    routing: Routing | None = None,
    pdl: bool = False,
) -> Tensor:
    """`linear` for few rows (see there for x, w, out and the options); with a norm the product takes x unrounded.

    router [E, in] with a norm: the same launch also writes logits [R, ≥ E] float32 = router · norm(x[r]) and, where
    given, normed [R, in]; routing: and every row's choice from its logits, by whichever program writes the last of
    them, while others still multiply. A row's bits depend on that row, the weights and the tile alone.
    """
    rows, k = x.shape
    n, experts = out.shape[1], 0 if router is None else router.shape[0]
    assert w.shape == ((2 * n if swiglu else n), k) and w.is_contiguous() and w.dtype == x.dtype
    assert x.stride(1) == out.stride(1) == 1 and out.shape[0] == rows and tile.block_k >= k
    assert x.data_ptr() % 16 == w.data_ptr() % 16 == 0, "unaligned tensors compile to another kernel"
    assert (router is None) == (logits is None) and (normed is None or router is not None)
    if router is not None and logits is not None:
        assert norm is not None and router.shape[1] == k and router.is_contiguous() and router.dtype == x.dtype
        assert logits.shape[0] == rows and logits.shape[1] >= experts and logits.stride(1) == 1
    assert routing is None or (logits is not None and experts == routing.experts + (routing.gate is not None))
    layer = norm is not None and norm.layer
    _gemv_kernel[(triton.cdiv(n, tile.block_n) + triton.cdiv(experts, tile.block_n),)](
        x, w, or_placeholder(bias, w), or_placeholder(norm.weight if norm else None, w),
        or_placeholder(norm.bias if norm else None, w), or_placeholder(row_gate, w), or_placeholder(addend, w),
        or_placeholder(residual, w), or_placeholder(normed, w), out, or_placeholder(router, w),
        or_placeholder(logits, w), *_routing_tensors(routing, w), rows, x.stride(0),
        0 if row_gate is None else row_gate.stride(0),
        0 if residual is None else residual.stride(0), out.stride(0), 0 if logits is None else logits.stride(0),
        norm.eps if norm else 0.0, routing.scaling if routing else 1.0, 2.0 * ((routing and routing.jitter) or 0.0),
        N=n, K=k, LOGITS=experts, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, RMS=norm is not None and not layer,
        LAYER=layer, EMIT=normed is not None, PAIR=swiglu, HAS_BIAS=bias is not None, HAS_GATE=row_gate is not None,
        HAS_ADDEND=addend is not None, HAS_RESIDUAL=residual is not None, MANY=rows > 1,
        **_routing_options(routing), num_warps=tile.warps,
        **launch_options(pdl),
    )  # fmt: skip
    return out


def _routing_tensors(routing: Routing | None, placeholder: Tensor) -> tuple[Tensor, ...]:
    if routing is None:
        return (placeholder,) * 6
    assert routing.ids.is_contiguous() and routing.weights.is_contiguous()
    counters, gate = or_placeholder(routing.counters, placeholder), or_placeholder(routing.gate, placeholder)
    return routing.ids, routing.weights, routing.valid, counters, gate, routing.arrivals


def _routing_options(routing: Routing | None) -> dict[str, int]:
    if routing is None:
        return dict.fromkeys(_ROUTING_OPTIONS, 0)
    gated = int(routing.gate is not None)
    return {
        "TOP_K": routing.ids.shape[1], "EXPERTS": routing.experts, "BLOCK_E": power_of_two(routing.experts + gated),
        "NORMALISE": int(routing.normalise), "SPARSEMIXER": int(routing.jitter is not None),
        "COUNT": int(routing.counters is not None), "GATE": gated,
    }  # fmt: skip
