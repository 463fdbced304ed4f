# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Tokens in and out of a decode step: embedding rows, greedy choice, append."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specter_core.model.kernels.pdl import begin, launch_options
from specter_core.model.kernels.tiles import power_of_two

ARGMAX_BLOCK = 2048


@triton.jit
def _embed_kernel(tokens, table, out, H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    row = tl.program_id(0)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + row).to(tl.int64)
    tl.store(out + row * H + h, tl.load(table + token * H + h, mask=h < H), mask=h < H)


def embed(tokens: Tensor, table: Tensor, out: Tensor, pdl: bool = False) -> Tensor:
    """tokens int64 [R], table [V, H] -> out [R, H]."""
    count, hidden = out.shape
    assert tokens.numel() == count and table.is_contiguous() and out.is_contiguous()
    block = min(1024, power_of_two(hidden))
    _embed_kernel[(count, triton.cdiv(hidden, block))](
        tokens, table, out, H=hidden, BLOCK=block, num_warps=4, **launch_options(pdl)
    )
    return out


@triton.jit
def _argmax_blocks_kernel(
    logits, part_best, part_id, part_second, stride, V: tl.constexpr, BLOCK: tl.constexpr, SECOND: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0)
    block = tl.program_id(1)
    i = block * BLOCK + tl.arange(0, BLOCK)
    scores = tl.load(logits + row.to(tl.int64) * stride + i, mask=i < V, other=float("-inf"))
    best = tl.max(scores, axis=0)
    at = row * tl.num_programs(1) + block
    first = tl.min(tl.where((scores == best) & (i < V), i, V - 1), axis=0)
    tl.store(part_best + at, best)
    tl.store(part_id + at, first)
    if SECOND:
        tl.store(part_second + at, tl.max(tl.where(i == first, float("-inf"), scores), axis=0))


@triton.jit
def _argmax_finish_kernel(
    part_best, part_id, part_second, out, margin, V: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    SECOND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    scores = tl.load(part_best + row * PARTS + i, mask=i < PARTS, other=float("-inf"))
    ids = tl.load(part_id + row * PARTS + i, mask=i < PARTS, other=V - 1)
    best = tl.max(scores, axis=0)
    first = tl.min(tl.where(scores == best, ids, V - 1), axis=0)
    tl.store(out + row, first.to(tl.int64))
    if SECOND:
        seconds = tl.load(part_second + row * PARTS + i, mask=i < PARTS, other=float("-inf"))
        tl.store(margin + row, best - tl.max(tl.where(ids == first, seconds, scores), axis=0))


class Margin(NamedTuple):
    """out float32 [R]: the maximum less the next logit, 0 where two are equal. parts as part_best of `argmax`."""

    out: Tensor
    parts: Tensor


def argmax(
    logits: Tensor, out: Tensor, part_best: Tensor, part_id: Tensor, margin: Margin | None = None, pdl: bool = False
) -> Tensor:
    """logits float32 [R, V] -> out int64 [R], the lowest id among the maxima; V - 1 for a row of NaN.

    part_best float32 and part_id int32 of at least R·ceil(V / 2048) elements.
    """
    count, vocab = logits.shape
    parts = triton.cdiv(vocab, ARGMAX_BLOCK)
    assert logits.stride(1) == 1 and min(part_best.numel(), part_id.numel()) >= count * parts
    _argmax_blocks_kernel[(count, parts)](
        logits,
        part_best,
        part_id,
        margin and margin.parts,
        logits.stride(0),
        V=vocab,
        BLOCK=ARGMAX_BLOCK,
        SECOND=margin is not None,
        num_warps=4,
        **launch_options(pdl),
    )
    _argmax_finish_kernel[(count,)](
        part_best,
        part_id,
        margin and margin.parts,
        out,
        margin and margin.out,
        V=vocab,
        PARTS=parts,
        BLOCK=power_of_two(parts),
        SECOND=margin is not None,
        num_warps=1,
        **launch_options(pdl),
    )
    return out


@triton.jit(do_not_specialize=["B"])
def _append_kernel(tokens, sequence, lengths, positions, context, valid, B, CAPACITY: tl.constexpr,
                   BLOCK: tl.constexpr):  # fmt: skip
    b = tl.arange(0, BLOCK)
    in_batch = b < B
    live = in_batch & (tl.load(valid + b, mask=in_batch, other=0) != 0)
    length = tl.load(lengths + b, mask=live, other=0)
    room = live & (length < CAPACITY)
    tl.store(sequence + b.to(tl.int64) * CAPACITY + length, tl.load(tokens + b, mask=live, other=0), mask=room)
    tl.store(lengths + b, length + 1, mask=room)
    tl.store(positions + b, tl.load(positions + b, mask=live, other=0) + 1, mask=live)
    tl.store(context + b, tl.load(context + b, mask=live, other=0) + 1, mask=live)


def append_tokens(
    tokens: Tensor, sequence: Tensor, lengths: Tensor, positions: Tensor, context: Tensor, valid: Tensor
) -> None:
    """Append tokens[b] to sequence[b] and step every valid row: length, position and context grow by one, in place.

    tokens, lengths, positions, context int64 [B]; sequence int64 [B, capacity]; valid bool [B]. Full rows keep
    their length and drop the token.
    """
    batch, capacity = sequence.shape
    assert sequence.is_contiguous()
    _append_kernel[(1,)](
        tokens, sequence, lengths, positions, context, valid, batch,
        CAPACITY=capacity, BLOCK=power_of_two(batch), num_warps=1,
    )  # fmt: skip
