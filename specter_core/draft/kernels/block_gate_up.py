# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,var-annotated"
# ruff: noqa: RUF005 - Triton compiles no starred expressions
"""gate + up + SwiGLU of every (token, choice) pair in one launch."""

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
from specter_core.model.kernels.shared_down import Launch, SharedDown, shared_down_rows


def gate_up_blocks(
    x: Tensor, ids: Tensor, gate_up: BlockMatrix, act: Tensor, config: BlockConfig, pdl: bool = False,
    shared: SharedDown | None = None,
) -> None:  # fmt: skip
    """act[t*k + c] = silu(gate(x[t])) * up(x[t]) for the expert ids[t, c]; rows of id -1 become 0.

    x [T, H] float16 or bfloat16, ids int64 [T, k], gate_up: `repack_to_blocks(…, halves=True)` of [E, 2I, H], act
    float16 [>= T*k, I], saturated; all contiguous. FP32 accumulation in a fixed order. The grid depends on T, never on
    the routing, and a pair's result on nothing but the pair. pdl: programmatic dependent launch, on CUDA only. shared:
    runs in the same launch; its inputs are there already.
    """
    tokens, hidden = x.shape
    tiles = gate_up.words.shape[-3]
    assert gate_up.words.numel() < 2**31, gate_up.words.shape  # 32-bit offsets
    assert gate_up.words.shape[-2] * 128 == hidden and act.dtype == torch.float16, (gate_up.words.shape, act.dtype)
    choices = ids.shape[1]
    columns = triton.cdiv(tiles, config.bands)
    beside = Launch.of(shared, columns, config.warps, x)
    _gate_up_block_kernel[(columns, tokens * choices + beside.lines)](
        x, ids, gate_up.words, gate_up.scales, act, *constant_bits(x.dtype), *beside.arguments, tokens,
        **beside.constants,
        CHOICES=choices, GROUPS=hidden // 128, TILES=tiles, SPLIT=config.split, BANDS=config.bands, AHEAD=config.ahead,
        BF16=x.dtype == torch.bfloat16, MMA=MMA, num_warps=config.warps, **launch_options(pdl),
    )  # fmt: skip


@triton.jit
def _gate_up_block_kernel(
    x, ids, words, scales, act, offset_bits, one_bits, other_bits,
    inner, shared, shared_gate, residual, shared_out, stride_inner, tokens,
    LINES: tl.constexpr, SHARED_N: tl.constexpr, SHARED_K: tl.constexpr, SHARED_GATED: tl.constexpr,
    CHOICES: tl.constexpr, GROUPS: tl.constexpr, TILES: tl.constexpr, SPLIT: tl.constexpr, BANDS: tl.constexpr,
    AHEAD: tl.constexpr, BF16: tl.constexpr, MMA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Warp w takes every SPLIT-th group from w % SPLIT on of the 8 features of band w // SPLIT."""
    SLOTS: tl.constexpr = (GROUPS + SPLIT - 1) // SPLIT
    ALL: tl.constexpr = (GROUPS % SPLIT == 0) and (TILES % BANDS == 0)
    pair = tl.program_id(1)
    if LINES:
        if pair < LINES:  # first: their weights can come before the choice has
            if PDL:
                start_next()  # the next launch begins once the other programs have said so too
            shared_down_rows(
                inner, shared, shared_gate, residual, shared_out, pair * tl.num_programs(0) + tl.program_id(0), tokens,
                stride_inner, SHARED_N, SHARED_K, SHARED_GATED, SPLIT * BANDS, PDL,
            )  # fmt: skip
            return
        pair -= LINES
    if PDL:
        wait_previous()
        start_next()  # after the wait: down reads the ids before its own
    expert = tl.load(ids + pair).to(tl.int32)
    act += pair.to(tl.int64) * (8 * TILES)
    result = tl.arange(0, 32 * BANDS)  # the threads of each band's sum
    out = (tl.program_id(0) * BANDS + result // 32) * 8 + result % 32 // 4
    out_mask = (result % 4 == 0) & (out < 8 * TILES)
    if expert < 0:
        tl.store(act + out, tl.zeros(out.shape, tl.float16), mask=out_mask)
        return
    thread = tl.arange(0, 32 * SPLIT * BANDS)
    lane = thread % 32
    first = thread // 32 % SPLIT
    tile = tl.program_id(0) * BANDS + thread // (32 * SPLIT)
    block = (expert * TILES + tile) * GROUPS + first
    words += block * 256 + lane * 4
    scales += block * 16 + lane // 4 * 2
    x += pair // CHOICES * (128 * GROUPS) + lane % 4 * 32
    offsets = thread * 0 + offset_bits
    ones = thread * 0 + one_bits
    others = thread * 0 + other_bits
    loaded = ()
    for slot in tl.static_range(min(AHEAD, SLOTS)):
        active = (first + slot * SPLIT < GROUPS) & (tile < TILES)
        loaded = loaded + (load_block(words + slot * SPLIT * 256, active, ALL, MMA),)
    gate = tl.zeros(thread.shape, tl.float32)
    up = tl.zeros(thread.shape, tl.float32)
    for slot in tl.static_range(SLOTS):
        if ALL:
            group = first + slot * SPLIT
            gate_scale, up_scale = scale_pair(scales + slot * SPLIT * 16)
        else:  # behind the last, the codes are 0 but count: take some scale and 0 times it
            group = tl.minimum(first + slot * SPLIT, GROUPS - 1)
            active = (first + slot * SPLIT < GROUPS) & (tile < TILES)
            gate_scale, up_scale = scale_pair(scales + tl.where(active, slot * SPLIT * 16, 0))
            gate_scale = tl.where(active, gate_scale, 0.0)
            up_scale = tl.where(active, up_scale, 0.0)
        part = load_activations(x + group * 128, MMA)
        too_much = excess(part, ones, others, BF16, MMA)
        gate_sum, up_sum = block_product(loaded[slot], part, offsets, BF16, MMA)
        gate += (gate_sum - too_much) * gate_scale
        up += (up_sum - too_much) * up_scale
        if slot + AHEAD < SLOTS:
            active = (first + (slot + AHEAD) * SPLIT < GROUPS) & (tile < TILES)
            loaded = loaded + (load_block(words + (slot + AHEAD) * SPLIT * 256, active, ALL, MMA),)
    gate, up = over_splits(gate, up, BANDS, SPLIT)
    value = gate * tl.sigmoid(gate) * up
    tl.store(act + out, tl.minimum(tl.maximum(value, -65504.0), 65504.0).to(tl.float16), mask=out_mask)
