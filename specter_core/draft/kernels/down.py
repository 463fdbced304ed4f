# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""down + weighted sum over the choices of every token in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specter_core.draft.kernels.configs import GemvConfig, GroupedConfig
from specter_core.draft.kernels.layout import GemvMatrix
from specter_core.draft.kernels.nibbles import BITS_16, BITS_256, nibble_plus_offset, offset_part
from specter_core.model.kernels.pdl import launch_options, start_next, wait_previous


def down_weighted_sum(
    act: Tensor,
    ids: Tensor,
    weights: Tensor,
    down: GemvMatrix,
    out: Tensor,
    config: GemvConfig | GroupedConfig,
    pdl: bool = False,
    addend: Tensor | None = None,
) -> None:
    """out[t] = sum over c of weights[t, c] * down(act[t*k + c]) for the expert ids[t, c]; id -1 adds nothing.

    act float32 [>= T*k, I], ids int64 [T, k], weights float32 [T, k], down words [E, H, I/8] and scales
    [E, H, I/128], out [>= T, H]; all contiguous. addend [>= T, H] is added; it may be `out` itself; with a
    GemvConfig only. One program owns each output and adds its choices
    in a fixed order, so there are no atomics: same input, same bits. The grid depends on T alone. pdl: the
    kernel before it in the stream is `gate_up_swiglu` with pdl, behind whose start ids and weights are final;
    they are read past the L1, which may hold another layer's.
    """
    tokens, choices = ids.shape
    assert down.words.numel() < 2**31, down.words.shape  # 32-bit offsets
    experts, hidden = down.words.shape[:2]
    width = down.words.shape[2] * 8
    tiles = triton.cdiv(hidden, config.block_n)
    if isinstance(config, GemvConfig):
        _down_gemv[(tiles, tokens)](
            act, ids, weights, down.words, down.scales, out, out if addend is None else addend,
            BITS_256, BITS_16, ADD=addend is not None,
            CHOICES=choices, HIDDEN=hidden, WIDTH=width, BLOCK_N=config.block_n, LANES=config.lanes,
            UNROLL=config.unroll, num_warps=config.warps, num_stages=config.stages, **launch_options(pdl),
        )  # fmt: skip
    else:
        assert addend is None
        _down_grouped[(tiles, triton.cdiv(tokens, 16))](
            act, ids, weights, down.words, down.scales, out, tokens, experts,
            CHOICES=choices, CHOICES_PAD=triton.next_power_of_2(choices), HIDDEN=hidden, WIDTH=width,
            BLOCK_N=config.block_n, num_warps=config.warps, num_stages=config.stages, **launch_options(pdl),
        )  # fmt: skip


@triton.jit
def _down_step(
    acc, act, ids, weights, words, scales, rows, row_mask, first, bits_256, bits_16,
    CHOICES: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
    EVEN_N: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Adds LANES / 4 groups, counted through all choices of the token from `first` on, to acc [LANES, BLOCK_N].

    A lane behind the last group, or whose choice is id -1, reads what is there and weighs it 0.
    """
    GROUPS: tl.constexpr = WIDTH // 128
    lane = tl.arange(0, LANES)
    word = tl.arange(0, 4)
    flat = first + lane // 4
    choice = tl.minimum(flat // GROUPS, CHOICES - 1)
    group = flat % GROUPS
    routed = tl.load(ids + choice, cache_modifier=".cg").to(tl.int32)
    weight = tl.load(weights + choice, cache_modifier=".cg")
    weight = tl.where((routed >= 0) & (flat < CHOICES * GROUPS), weight, 0.0)  # [LANES]
    expert = tl.maximum(routed, 0)
    at_lane = expert * (HIDDEN * (WIDTH // 8)) + (group * 16 + lane % 4 * 4)
    at = rows[None, :, None] * (WIDTH // 8) + at_lane[:, None, None] + word[None, None, :]
    at_scale = rows[None, :] * GROUPS + (expert * (HIDDEN * GROUPS) + group)[:, None]
    if EVEN_N:
        codes = tl.load(words + at)  # [LANES, BLOCK_N, 4]
        scale = tl.load(scales + at_scale)  # [LANES, BLOCK_N]
    else:
        codes = tl.load(words + at, mask=row_mask[None, :, None], other=0)
        scale = tl.load(scales + at_scale, mask=row_mask[None, :], other=0.0)
    if WAIT:
        wait_previous()
    at_act = (choice * WIDTH + group * 128 + lane % 4 * 4)[:, None] + word[None, :]
    sums = tl.zeros_like(codes).to(tl.float32)
    excess = tl.zeros_like(at_act).to(tl.float32)  # [LANES, 4]
    for j in tl.static_range(8):
        part = tl.load(act + at_act + j * 16)
        excess += offset_part(part, j)
        sums += nibble_plus_offset(codes, bits_256, bits_16, j) * part[:, None, :]
    total = tl.sum(sums, axis=2) - tl.sum(excess, axis=1)[:, None]
    return acc + total * (scale.to(tl.float32) * weight[:, None])


@triton.jit
def _down_gemv(
    act, ids, weights, words, scales, out, addend, bits_256, bits_16,
    ADD: tl.constexpr,
    CHOICES: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr,
    LANES: tl.constexpr, UNROLL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        start_next()
    token = tl.program_id(1)
    ids += token * CHOICES
    weights += token * CHOICES
    act += token.to(tl.int64) * (CHOICES * WIDTH)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = rows < HIDDEN
    TOTAL: tl.constexpr = CHOICES * (WIDTH // 128)
    STEP: tl.constexpr = LANES // 4
    EVEN_N: tl.constexpr = HIDDEN % BLOCK_N == 0
    acc = tl.zeros((LANES, BLOCK_N), tl.float32)
    acc = _down_step(
        acc, act, ids, weights, words, scales, rows, row_mask, 0, bits_256, bits_16,
        CHOICES, HIDDEN, WIDTH, LANES, EVEN_N, PDL,
    )  # fmt: skip
    if UNROLL:
        for first in tl.static_range(STEP, TOTAL, STEP):
            acc = _down_step(
                acc, act, ids, weights, words, scales, rows, row_mask, first, bits_256, bits_16,
                CHOICES, HIDDEN, WIDTH, LANES, EVEN_N, False,
            )  # fmt: skip
    else:
        for first in tl.range(STEP, TOTAL, STEP):
            acc = _down_step(
                acc, act, ids, weights, words, scales, rows, row_mask, first, bits_256, bits_16,
                CHOICES, HIDDEN, WIDTH, LANES, EVEN_N, False,
            )  # fmt: skip
    total = tl.sum(acc, axis=0)
    if ADD:
        total += tl.load(addend + token.to(tl.int64) * HIDDEN + rows, mask=row_mask, other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * HIDDEN + rows, total.to(out.dtype.element_ty), mask=row_mask)


@triton.jit
def _down_grouped(
    act, ids, weights, words, scales, out, tokens, experts,
    CHOICES: tl.constexpr, CHOICES_PAD: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        start_next()
        wait_previous()
    token = tl.program_id(1) * 16 + tl.arange(0, 16)
    choice = tl.arange(0, CHOICES_PAD)
    at_choice = token[:, None] * CHOICES + choice[None, :]  # [16, k]
    real = (token < tokens)[:, None] & (choice < CHOICES)[None, :]
    routed = tl.load(ids + at_choice, mask=real, other=-1)
    weight = tl.load(weights + at_choice, mask=real, other=0.0)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = rows < HIDDEN
    word = tl.arange(0, 16)
    acc = tl.zeros((16, BLOCK_N), tl.float32)
    for expert in range(experts):
        chosen = routed == expert  # [16, k], at most one choice per token
        if tl.sum(chosen.to(tl.int32)) > 0:
            uses = tl.max(chosen.to(tl.int32), axis=1) > 0
            pair = tl.sum(tl.where(chosen, at_choice, 0), axis=1)
            share = tl.sum(tl.where(chosen, weight, 0.0), axis=1)
            base = words + expert * (HIDDEN * (WIDTH // 8))
            base_scale = scales + expert * (HIDDEN * (WIDTH // 128))
            at_act = pair.to(tl.int64)[:, None] * WIDTH + word[None, :]
            part_acc = tl.zeros((16, BLOCK_N), tl.float32)
            for group in range(WIDTH // 128):
                at = rows[:, None] * (WIDTH // 8) + group * 16 + word[None, :]
                codes = tl.load(base + at, mask=row_mask[:, None], other=0)  # [BLOCK_N, 16]
                scale = tl.load(base_scale + rows * (WIDTH // 128) + group, mask=row_mask, other=0.0)
                sums = tl.zeros((16, BLOCK_N), tl.float32)
                for j in tl.static_range(8):
                    part = tl.load(act + at_act + group * 128 + j * 16, mask=uses[:, None], other=0.0)
                    code = ((codes >> (4 * j)) & 15).to(tl.float32) - 8.0
                    sums = tl.dot(part, tl.trans(code), sums, input_precision="tf32")
                part_acc += sums * scale.to(tl.float32)[None, :]
            acc += share[:, None] * part_acc
    at_out = token.to(tl.int64)[:, None] * HIDDEN + rows[None, :]
    tl.store(out + at_out, acc, mask=(token < tokens)[:, None] & row_mask[None, :])
