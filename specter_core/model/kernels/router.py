# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Top-k experts and their weights from the router's logits, one program per row; ties go to the lowest id."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specter_core.model.kernels.pdl import begin, launch_options
from specter_core.model.kernels.rope import RowTensors
from specter_core.model.kernels.tiles import power_of_two


@triton.jit
def _first(scores, e, chosen, EXPERTS: tl.constexpr):
    """Lowest id among the maxima of the scores that are not chosen yet."""
    open_scores = tl.where(chosen, float("-inf"), scores)
    best = tl.max(open_scores, axis=0)
    return tl.min(tl.where((open_scores == best) & ~chosen & (e < EXPERTS), e, EXPERTS - 1), axis=0), best


@triton.jit
def _sparsemixer_weight(scores, best, at, e, chosen, TIE):
    """Softmax over the near-ties of the best open score, at expert `at`; the tie's width uses every score's size."""
    size = tl.maximum(tl.abs(scores), best)
    keep = ((best - scores) / size <= TIE) & ~chosen
    p = tl.where(keep, tl.exp(scores - best), 0.0)
    return tl.sum(tl.where(e == at, p, 0.0), axis=0) / tl.sum(p, axis=0)


@triton.jit
def route_row(
    scores, e, row, live, ids, weights, counters, gate, scaling, tie,
    EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, TOP_K: tl.constexpr, NORMALISE: tl.constexpr,
    SPARSEMIXER: tl.constexpr, COUNT: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """One row's choice from its logits, as `route` has it."""
    if GATE:
        tl.store(gate + row + 0 * e, scores, mask=e == EXPERTS)
    scores = tl.where(e < EXPERTS, tl.where(live, scores, 0.0), float("-inf"))
    chosen = e < 0
    if SPARSEMIXER:
        weight = tl.zeros([BLOCK_E], tl.float32)
        for _ in tl.static_range(TOP_K):
            at, best = _first(scores, e, chosen, EXPERTS)
            weight = tl.where(e == at, _sparsemixer_weight(scores, best, at, e, chosen, tie), weight)
            chosen = chosen | (e == at)
    else:
        p = tl.exp(scores - tl.max(scores, axis=0))
        p = p / tl.sum(p, axis=0)
        for _ in tl.static_range(TOP_K):
            at, best = _first(p, e, chosen, EXPERTS)
            chosen = chosen | (e == at)
        weight = tl.where(chosen, p, 0.0)
        if NORMALISE:
            weight = weight / tl.sum(weight, axis=0)
    rank = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.store(ids + row * TOP_K + rank, tl.where(live, e, -1).to(tl.int64), mask=chosen)
    tl.store(weights + row * TOP_K + rank, tl.where(live, weight * scaling, 0.0), mask=chosen)
    if COUNT:
        tl.atomic_add(counters + e, 1, mask=chosen & live)


@triton.jit(do_not_specialize=["R"])
def _route_kernel(
    logits, valid, ids, weights, counters, gate, R, stride_logits, scaling, tie,
    EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, TOP_K: tl.constexpr, NORMALISE: tl.constexpr,
    SPARSEMIXER: tl.constexpr, HAS_VALID: tl.constexpr, COUNT: tl.constexpr, PARTS: tl.constexpr,
    GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    live = row >= 0
    if HAS_VALID:
        live = tl.load(valid + row) != 0
    scores = tl.zeros([BLOCK_E], tl.float32)
    for s in tl.static_range(PARTS):
        scores += tl.load(logits + (s * R + row) * stride_logits + e, mask=e < EXPERTS + GATE, other=0.0)
    route_row(
        scores, e, row, live, ids, weights, counters, gate, scaling, tie,
        EXPERTS, BLOCK_E, TOP_K, NORMALISE, SPARSEMIXER, COUNT, GATE,
    )  # fmt: skip


class Routing(NamedTuple):
    """What a launch needs that routes its rows itself: `route`'s arguments, and arrivals int32 [1], 0 between launches:
    how many programs have written their logits.
    """

    ids: Tensor
    weights: Tensor
    valid: Tensor
    arrivals: Tensor
    experts: int
    scaling: float = 1.0
    normalise: bool = False
    jitter: float | None = None
    counters: Tensor | None = None
    gate: Tensor | None = None


def route(
    logits: Tensor, ids: Tensor, weights: Tensor, *, rows: RowTensors | None, experts: int, scaling: float = 1.0,
    normalise: bool = False, jitter: float | None = None, counters: Tensor | None = None,
    gate: Tensor | None = None, pdl: bool = False,
) -> None:  # fmt: skip
    """Choose k experts per row: logits float32 [R, ≥ experts] -> ids int64 [R, k] ascending, weights float32 [R, k].

    logits may be [S, R, …]: partial sums, added in order. With gate float32 [R], column `experts` is no expert
    and goes there (the shared expert's gate). Weights are softmax probabilities over all experts times scaling,
    divided by their sum first when normalise; with jitter they are PhiMoE's sparsemixer weights. Invalid rows get
    id -1 and weight 0. counters int32 [E]: ELB of this layer, one added per chosen expert of a valid row (paper,
    section on the Pattern Analyzer).
    """
    count, top_k = ids.shape
    parts = logits.shape[0] if logits.dim() == 3 else 1
    width = experts + (gate is not None)
    assert logits.shape[-2] == count and logits.shape[-1] >= width and experts >= top_k and logits.stride(-1) == 1
    assert parts == 1 or logits.stride(0) == count * logits.stride(1)
    assert ids.is_contiguous() and weights.is_contiguous()
    _route_kernel[(count,)](
        logits, rows.valid if rows else ids, ids, weights, ids if counters is None else counters,
        weights if gate is None else gate, count, logits.stride(-2), scaling, 2.0 * (jitter or 0.0),
        EXPERTS=experts, BLOCK_E=power_of_two(width), TOP_K=top_k, NORMALISE=normalise,
        SPARSEMIXER=jitter is not None, HAS_VALID=rows is not None, COUNT=counters is not None,
        PARTS=parts, GATE=int(gate is not None), num_warps=1, **launch_options(pdl),
    )  # fmt: skip
