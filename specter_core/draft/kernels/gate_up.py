# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""gate + up + SwiGLU of every (token, choice) pair in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specter_core.draft.kernels.configs import GemvConfig, GroupedConfig
from specter_core.draft.kernels.layout import GemvMatrix
from specter_core.draft.kernels.nibbles import BITS_16, BITS_256, nibble_plus_offset, offset_part
from specter_core.model.kernels.pdl import launch_options, start_next, wait_previous
from specter_core.model.kernels.shared_down import Launch, SharedDown, shared_down_rows


def gate_up_swiglu(
    x: Tensor,
    ids: Tensor,
    gate_up: GemvMatrix,
    act: Tensor,
    config: GemvConfig | GroupedConfig,
    pdl: bool = False,
    shared: SharedDown | None = None,
) -> None:
    """act[t*k + c] = silu(gate(x[t])) * up(x[t]) for the expert ids[t, c]; rows of id -1 become 0.

    x [T, H] float16 or bfloat16, ids int64 [T, k], gate_up words [E, 2I, H/8] and scales [E, 2I, H/128] with
    gate above up, act float32 [>= T*k, I]; all contiguous. FP32 accumulation in a fixed order. The grid
    depends on T, never on the routing: a GemvConfig reads the weights per pair, a GroupedConfig per expert.
    pdl: programmatic dependent launch, on CUDA only. shared: runs in the same launch, with a
    GemvConfig only; its inputs are there already.
    """
    tokens, hidden = x.shape
    assert gate_up.words.numel() < 2**31, gate_up.words.shape  # 32-bit offsets
    experts, width = gate_up.words.shape[0], gate_up.words.shape[1] // 2
    choices = ids.shape[1]
    tiles = triton.cdiv(width, config.block_n)
    if isinstance(config, GemvConfig):
        beside = Launch.of(shared, tiles, config.warps, x)
        _gate_up_gemv[(tiles, tokens * choices + beside.lines)](
            x, ids, gate_up.words, gate_up.scales, act, BITS_256, BITS_16, *beside.arguments, tokens,
            **beside.constants, WARPS=config.warps,
            CHOICES=choices, HIDDEN=hidden, WIDTH=width, BLOCK_N=config.block_n, LANES=config.lanes,
            UNROLL=config.unroll, num_warps=config.warps, num_stages=config.stages, **launch_options(pdl),
        )  # fmt: skip
    else:
        assert shared is None
        _gate_up_grouped[(tiles, experts)](
            x, ids, gate_up.words, gate_up.scales, act, tokens * choices,
            CHOICES=choices, PAIRS=max(16, triton.next_power_of_2(tokens * choices)),
            HIDDEN=hidden, WIDTH=width, BLOCK_N=config.block_n,
            num_warps=config.warps, num_stages=config.stages, **launch_options(pdl),
        )  # fmt: skip


@triton.jit
def _gate_up_step(
    acc_gate, acc_up, x, words, scales, rows, row_mask, group0, bits_256, bits_16,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Adds LANES / 4 groups of inputs from group0 on to acc_gate, acc_up [LANES, BLOCK_N]."""
    lane = tl.arange(0, LANES)
    word = tl.arange(0, 4)
    group = group0 + lane // 4
    at = rows[None, :, None] * (HIDDEN // 8) + (group * 16 + lane % 4 * 4)[:, None, None] + word[None, None, :]
    at_scale = rows[None, :] * (HIDDEN // 128) + group[:, None]
    at_x = (group * 128 + lane % 4 * 4)[:, None] + word[None, :]
    if EVEN:
        gate = tl.load(words + at)  # [LANES, BLOCK_N, 4]
        up = tl.load(words + WIDTH * (HIDDEN // 8) + at)
        scale_gate = tl.load(scales + at_scale)  # [LANES, BLOCK_N]
        scale_up = tl.load(scales + WIDTH * (HIDDEN // 128) + at_scale)
        x_mask = None
    else:
        in_row = group < HIDDEN // 128
        mask = row_mask[None, :] & in_row[:, None]
        gate = tl.load(words + at, mask=mask[:, :, None], other=0)
        up = tl.load(words + WIDTH * (HIDDEN // 8) + at, mask=mask[:, :, None], other=0)
        scale_gate = tl.load(scales + at_scale, mask=mask, other=0.0)
        scale_up = tl.load(scales + WIDTH * (HIDDEN // 128) + at_scale, mask=mask, other=0.0)
        x_mask = in_row[:, None]
    sum_gate = tl.zeros_like(gate).to(tl.float32)
    sum_up = tl.zeros_like(up).to(tl.float32)
    excess = tl.zeros_like(at_x).to(tl.float32)  # [LANES, 4]
    for j in tl.static_range(8):
        if EVEN:
            part = tl.load(x + at_x + j * 16).to(tl.float32)
        else:
            part = tl.load(x + at_x + j * 16, mask=x_mask, other=0.0).to(tl.float32)
        excess += offset_part(part, j)
        sum_gate += nibble_plus_offset(gate, bits_256, bits_16, j) * part[:, None, :]
        sum_up += nibble_plus_offset(up, bits_256, bits_16, j) * part[:, None, :]
    constant = tl.sum(excess, axis=1)[:, None]
    acc_gate += (tl.sum(sum_gate, axis=2) - constant) * scale_gate.to(tl.float32)
    acc_up += (tl.sum(sum_up, axis=2) - constant) * scale_up.to(tl.float32)
    return acc_gate, acc_up


@triton.jit
def _gate_up_gemv(
    x, ids, words, scales, act, bits_256, bits_16,
    inner, shared, shared_gate, residual, shared_out, stride_inner, tokens,
    LINES: tl.constexpr, SHARED_N: tl.constexpr, SHARED_K: tl.constexpr, SHARED_GATED: tl.constexpr,
    WARPS: tl.constexpr,
    CHOICES: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr,
    LANES: tl.constexpr, UNROLL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    if LINES:
        if pair < LINES:  # first: their weights can come before the choice has
            if PDL:
                start_next()  # the next launch begins once the other programs have said so too
            shared_down_rows(
                inner, shared, shared_gate, residual, shared_out, pair * tl.num_programs(0) + tl.program_id(0), tokens,
                stride_inner, SHARED_N, SHARED_K, SHARED_GATED, WARPS, PDL,
            )  # fmt: skip
            return
        pair -= LINES
    if PDL:
        wait_previous()
        start_next()  # after the wait: down reads the ids before its own
    expert = tl.load(ids + pair).to(tl.int32)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = rows < WIDTH
    act += pair.to(tl.int64) * WIDTH
    if expert < 0:
        tl.store(act + rows, tl.zeros((BLOCK_N,), tl.float32), mask=row_mask)
        return
    words += expert * (2 * WIDTH * (HIDDEN // 8))
    scales += expert * (2 * WIDTH * (HIDDEN // 128))
    x += pair // CHOICES * HIDDEN
    GROUPS: tl.constexpr = HIDDEN // 128
    STEP: tl.constexpr = LANES // 4
    EVEN: tl.constexpr = (GROUPS % STEP == 0) and (WIDTH % BLOCK_N == 0)
    acc_gate = tl.zeros((LANES, BLOCK_N), tl.float32)
    acc_up = tl.zeros((LANES, BLOCK_N), tl.float32)
    if UNROLL:
        for group0 in tl.static_range(0, GROUPS, STEP):
            acc_gate, acc_up = _gate_up_step(
                acc_gate,
                acc_up,
                x,
                words,
                scales,
                rows,
                row_mask,
                group0,
                bits_256,
                bits_16,
                HIDDEN,
                WIDTH,
                LANES,
                EVEN,
            )
    else:
        for group0 in tl.range(0, GROUPS, STEP):
            acc_gate, acc_up = _gate_up_step(
                acc_gate,
                acc_up,
                x,
                words,
                scales,
                rows,
                row_mask,
                group0,
                bits_256,
                bits_16,
                HIDDEN,
                WIDTH,
                LANES,
                EVEN,
            )
    gate = tl.sum(acc_gate, axis=0)  # [BLOCK_N]
    up = tl.sum(acc_up, axis=0)
    tl.store(act + rows, gate * tl.sigmoid(gate) * up, mask=row_mask)


@triton.jit
def _gate_up_grouped(
    x, ids, words, scales, act, pairs,
    CHOICES: tl.constexpr, PAIRS: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        wait_previous()
        start_next()
    expert = tl.program_id(1)
    pair = tl.arange(0, PAIRS)
    routed = tl.load(ids + pair, mask=pair < pairs, other=-1)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = rows < WIDTH
    if expert == 0:
        none = (pair < pairs) & (routed < 0)
        at_none = act + pair.to(tl.int64)[:, None] * WIDTH + rows[None, :]
        tl.store(at_none, tl.zeros((PAIRS, BLOCK_N), tl.float32), mask=none[:, None] & row_mask[None, :])
    chosen = routed == expert
    count = tl.sum(chosen.to(tl.int32))
    if count == 0:
        return
    rank = tl.cumsum(chosen.to(tl.int32)) - 1
    words += expert * (2 * WIDTH * (HIDDEN // 8))
    scales += expert * (2 * WIDTH * (HIDDEN // 128))
    slot = tl.arange(0, 16)
    word = tl.arange(0, 16)
    for first in range(0, count, 16):
        # The pair in each of this tile's 16 slots: the one whose rank is the slot's.
        here = chosen[None, :] & (rank[None, :] == (first + slot)[:, None])  # [16, PAIRS]
        mine = tl.sum(tl.where(here, pair[None, :], 0), axis=1)
        filled = first + slot < count
        at_x = (mine // CHOICES)[:, None] * HIDDEN + word[None, :]
        acc_gate = tl.zeros((16, BLOCK_N), tl.float32)
        acc_up = tl.zeros((16, BLOCK_N), tl.float32)
        for group in range(HIDDEN // 128):
            at = rows[:, None] * (HIDDEN // 8) + group * 16 + word[None, :]
            gate = tl.load(words + at, mask=row_mask[:, None], other=0)  # [BLOCK_N, 16]
            up = tl.load(words + WIDTH * (HIDDEN // 8) + at, mask=row_mask[:, None], other=0)
            at_scale = rows * (HIDDEN // 128) + group
            scale_gate = tl.load(scales + at_scale, mask=row_mask, other=0.0).to(tl.float32)
            scale_up = tl.load(scales + WIDTH * (HIDDEN // 128) + at_scale, mask=row_mask, other=0.0)
            sum_gate = tl.zeros((16, BLOCK_N), tl.float32)
            sum_up = tl.zeros((16, BLOCK_N), tl.float32)
            for j in tl.static_range(8):
                part = tl.load(x + at_x + group * 128 + j * 16, mask=filled[:, None], other=0.0).to(tl.float32)
                # TF32 holds the codes and 16-bit activations exactly.
                code_gate = ((gate >> (4 * j)) & 15).to(tl.float32) - 8.0
                code_up = ((up >> (4 * j)) & 15).to(tl.float32) - 8.0
                sum_gate = tl.dot(part, tl.trans(code_gate), sum_gate, input_precision="tf32")
                sum_up = tl.dot(part, tl.trans(code_up), sum_up, input_precision="tf32")
            acc_gate += sum_gate * scale_gate[None, :]
            acc_up += sum_up * scale_up.to(tl.float32)[None, :]
        out = acc_gate * tl.sigmoid(acc_gate) * acc_up
        at_out = mine.to(tl.int64)[:, None] * WIDTH + rows[None, :]
        tl.store(act + at_out, out, mask=filled[:, None] & row_mask[None, :])
