# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The two ends of a draft step on the device: a window's first inputs, and one token's step to the next."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specter_core.model.kernels.tiles import power_of_two
from specter_core.verify.kernels.host_io import raise_flag


class Stopping(NamedTuple):
    """When rows end before their depth: below `least`, as `DraftPass` has it.

    margin float32 [B]: the chosen token's lead. confidence float32 [B]: the product so far of 1 / (1 + exp(-sharpness x
    margin)). report int32 [K, 1 + B], mapped, one line per step: which rows go on, and before that a flag that becomes
    1 when they are there.
    """

    margin: Tensor
    confidence: Tensor
    report: Tensor
    least: float
    sharpness: float


@triton.jit(do_not_specialize=["B"])
def _begin_kernel(
    host, tokens, positions, context, valid, depths, drafted, confidence, B, STOP: tl.constexpr, BLOCK: tl.constexpr
):
    b = tl.arange(0, BLOCK)
    mask = b < B
    position = tl.load(host + B + b, mask=mask, other=0)
    depth = tl.load(host + 2 * B + b, mask=mask, other=0)
    tl.store(tokens + b, tl.load(host + b, mask=mask, other=0), mask=mask)
    tl.store(positions + b, position, mask=mask)
    tl.store(context + b, position + 1, mask=mask)
    tl.store(depths + b, depth, mask=mask)
    tl.store(drafted + b, depth * 0, mask=mask)
    tl.store(valid + b, (depth > 0).to(tl.uint8), mask=mask)
    if STOP:
        tl.store(confidence + b, 1.0, mask=mask)


def begin_window(
    host: Tensor, tokens: Tensor, positions: Tensor, context: Tensor, valid: Tensor, depths: Tensor, drafted: Tensor,
    stop: Stopping | None = None,
) -> None:  # fmt: skip
    """host int64 [3, B] (pending token, boundary, depth), mapped -> the inputs of the first step.

    tokens, positions, context, depths, drafted int64 [B]; valid uint8 [B].
    """
    batch = tokens.numel()
    assert host.shape == (3, batch) and host.is_contiguous()
    _begin_kernel[(1,)](
        host, tokens, positions, context, valid, depths, drafted, stop and stop.confidence, batch,
        STOP=stop is not None, BLOCK=power_of_two(batch), num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["B", "capacity"])
def _advance_kernel(
    chosen, host, tokens, positions, context, valid, depths, drafted, margin, confidence, report, least, B, capacity,
    STOP: tl.constexpr, SHARPNESS: tl.constexpr, ASM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.arange(0, BLOCK)
    live = (b < B) & (tl.load(valid + b, mask=b < B, other=0) != 0)
    token = tl.load(chosen + b, mask=live, other=0)
    count = tl.load(drafted + b, mask=live, other=0)
    position = tl.load(positions + b, mask=live, other=0) + 1
    tl.store(host + b * capacity + count, token, mask=live)
    tl.store(tokens + b, token, mask=live)
    tl.store(positions + b, position, mask=live)
    tl.store(context + b, position + 1, mask=live)
    tl.store(drafted + b, count + 1, mask=live)
    more = live & (count + 1 < tl.load(depths + b, mask=live, other=0))
    if STOP:
        agreement = 1 / (1 + tl.exp(-SHARPNESS * tl.load(margin + b, mask=live, other=0.0)))
        product = agreement * tl.load(confidence + b, mask=live, other=0.0)
        tl.store(confidence + b, product, mask=live)
        more = more & (product >= least)
        step = tl.max(tl.where(live, count, -1), axis=0)  # the same in every live row
        if step >= 0:
            line = report + step * (B + 1)
            tl.store(line + 1 + b, more.to(tl.int32), mask=b < B)
            raise_flag(line, ASM)
    tl.store(valid + b, more.to(tl.uint8), mask=live)


def advance(
    chosen: Tensor, host: Tensor, tokens: Tensor, positions: Tensor, context: Tensor, valid: Tensor, depths: Tensor,
    drafted: Tensor, stop: Stopping | None = None,
) -> None:  # fmt: skip
    """Every valid row takes its chosen token: into host int64 [B, capacity], mapped, and as the next step's input.

    A row whose depth is reached becomes invalid, and with `stop` one whose confidence is too low.
    """
    batch, capacity = host.shape
    assert stop is None or (stop.report.shape[1] == 1 + batch and stop.report.is_contiguous())
    _advance_kernel[(1,)](
        chosen, host, tokens, positions, context, valid, depths, drafted, stop and stop.margin,
        stop and stop.confidence, stop and stop.report, stop.least if stop else 0.0, batch, capacity,
        STOP=stop is not None, SHARPNESS=stop.sharpness if stop else 0.0, ASM=chosen.is_cuda or chosen.is_meta,
        BLOCK=power_of_two(batch), num_warps=1,
    )  # fmt: skip
