# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,var-annotated"
# ruff: noqa: RUF005 - Triton compiles no starred expressions
"""down + weighted sum over the choices of every token in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specter_core.draft.kernels.block_configs import BlockConfig
from specter_core.draft.kernels.blocks import BlockMatrix
from specter_core.draft.kernels.tensor_cores import (
    MMA,
    block_product,
    constant_bits,
    excess,
    load_activations,
    load_block,
    over_splits,
    scale_pair,
)
from specter_core.model.kernels.pdl import launch_options, start_next, wait_previous


def down_blocks(
    act: Tensor, ids: Tensor, weights: Tensor, down: BlockMatrix, out: Tensor, config: BlockConfig, pdl: bool = False,
    addend: Tensor | None = None,
) -> None:  # fmt: skip
    """out[t] = sum over c of weights[t, c] * down(act[t*k + c]) for the expert ids[t, c]; id -1 adds nothing.

    act float16 [>= T*k, I], finite, ids int64 [T, k], weights float32 [T, k], down: `repack_to_blocks` of [E, H, I],
    out [>= T, H]; all contiguous. addend [>= T, H] is added; it may be `out` itself. One program owns each output and
    adds its choices in a fixed order, so there are no atomics: same input, same bits. The grid depends on T alone. pdl:
    the kernel before it in the stream is `gate_up_blocks` with pdl, behind whose start ids and weights are final; they
    are read past the L1, which may hold another layer's.
    """
    tokens, choices = ids.shape
    tiles, groups = down.words.shape[-3:-1]
    assert down.words.numel() < 2**31, down.words.shape  # 32-bit offsets
    assert act.dtype == torch.float16 and act.shape[1] == 128 * groups, (act.dtype, act.shape, groups)
    _down_block_kernel[(triton.cdiv(tiles, config.bands), tokens)](
        act, ids, weights, down.words, down.scales, out, out if addend is None else addend,
        *constant_bits(act.dtype), ADD=addend is not None,
        CHOICES=choices, GROUPS=groups, TILES=tiles, SPLIT=config.split, BANDS=config.bands, AHEAD=config.ahead,
        MMA=MMA, num_warps=config.warps, **launch_options(pdl),
    )  # fmt: skip


@triton.jit
def _fetch(
    ids, weights, words, scales, flat, tile,
    CHOICES: tl.constexpr, GROUPS: tl.constexpr, TILES: tl.constexpr, MMA: tl.constexpr,
):  # fmt: skip
    """(words, weighted scales) of group `flat`, counted through all choices. Behind the last group, and where the
    choice is id -1, no words are read and the scale is 0.
    """
    choice = tl.minimum(flat // GROUPS, CHOICES - 1)
    routed = tl.load(ids + choice, cache_modifier=".cg").to(tl.int32)
    active = (routed >= 0) & (flat < CHOICES * GROUPS) & (tile < TILES)
    weight = tl.where(active, tl.load(weights + choice, cache_modifier=".cg"), 0.0)
    block = (tl.maximum(routed, 0) * TILES + tl.minimum(tile, TILES - 1)) * GROUPS + flat % GROUPS
    lane = tl.arange(0, flat.shape[0]) % 32
    loaded = load_block(words + block * 256 + lane * 4, active, False, MMA)
    low, high = scale_pair(scales + block * 16 + lane // 4 * 2)
    return loaded, low * weight, high * weight


@triton.jit
def _down_block_kernel(
    act, ids, weights, words, scales, out, addend, offset_bits, one_bits, other_bits,
    ADD: tl.constexpr,
    CHOICES: tl.constexpr, GROUPS: tl.constexpr, TILES: tl.constexpr, SPLIT: tl.constexpr, BANDS: tl.constexpr,
    AHEAD: tl.constexpr, MMA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Warp w adds every SPLIT-th group from w % SPLIT on, through all choices, to 16 features of band w // SPLIT."""
    TOTAL: tl.constexpr = CHOICES * GROUPS
    SLOTS: tl.constexpr = (TOTAL + SPLIT - 1) // SPLIT
    if PDL:
        start_next()
    token = tl.program_id(1)
    ids += token * CHOICES
    weights += token * CHOICES
    thread = tl.arange(0, 32 * SPLIT * BANDS)
    act += token.to(tl.int64) * (CHOICES * GROUPS * 128) + thread % 4 * 32
    tile = tl.program_id(0) * BANDS + thread // (32 * SPLIT)
    first = thread // 32 % SPLIT
    offsets = thread * 0 + offset_bits
    ones = thread * 0 + one_bits
    others = thread * 0 + other_bits
    fetched = ()
    for slot in tl.static_range(min(AHEAD, SLOTS)):
        new = _fetch(ids, weights, words, scales, slot * SPLIT + first, tile, CHOICES, GROUPS, TILES, MMA)
        fetched = fetched + (new,)
    if PDL:
        wait_previous()
    result = tl.arange(0, 32 * BANDS)
    row = (tl.program_id(0) * BANDS + result // 32) * 16 + result % 32 // 4
    mask = (result % 4 == 0) & (row < 16 * TILES)
    out += token.to(tl.int64) * (16 * TILES)
    first_low = tl.zeros(result.shape, tl.float32)
    first_high = tl.zeros(result.shape, tl.float32)
    if ADD:
        addend += token.to(tl.int64) * (16 * TILES)
        first_low = tl.load(addend + row, mask=mask, other=0.0).to(tl.float32)
        first_high = tl.load(addend + row + 8, mask=mask, other=0.0).to(tl.float32)
    low = tl.zeros(thread.shape, tl.float32)
    high = tl.zeros(thread.shape, tl.float32)
    for slot in tl.static_range(SLOTS):
        part = load_activations(act + tl.minimum(slot * SPLIT + first, TOTAL - 1) * 128, MMA)
        loaded, low_scale, high_scale = fetched[slot]
        too_much = excess(part, ones, others, False, MMA)
        low_sum, high_sum = block_product(loaded, part, offsets, False, MMA)
        low += (low_sum - too_much) * low_scale
        high += (high_sum - too_much) * high_scale
        if slot + AHEAD < SLOTS:
            new = _fetch(ids, weights, words, scales, (slot + AHEAD) * SPLIT + first, tile, CHOICES, GROUPS, TILES, MMA)
            fetched = fetched + (new,)
    low, high = over_splits(low, high, BANDS, SPLIT)
    low += first_low
    high += first_high
    tl.store(out + row, low.to(out.dtype.element_ty), mask=mask)
    tl.store(out + row + 8, high.to(out.dtype.element_ty), mask=mask)
