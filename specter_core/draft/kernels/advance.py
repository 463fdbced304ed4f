# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The two ends of a draft step on the device: a window's first inputs, and one token's step to the next."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specter_core.model.kernels.tiles import power_of_two


@triton.jit(do_not_specialize=["B"])
def _begin_kernel(host, tokens, positions, context, valid, depths, drafted, B, BLOCK: tl.constexpr):
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


def begin_window(
    host: Tensor, tokens: Tensor, positions: Tensor, context: Tensor, valid: Tensor, depths: Tensor, drafted: Tensor
) -> None:
    """host int64 [3, B] (pending token, boundary, depth), mapped -> the inputs of the first step.

    tokens, positions, context, depths, drafted int64 [B]; valid uint8 [B].
    """
    batch = tokens.numel()
    assert host.shape == (3, batch) and host.is_contiguous()
    _begin_kernel[(1,)](
        host, tokens, positions, context, valid, depths, drafted, batch, BLOCK=power_of_two(batch), num_warps=1
    )


@triton.jit(do_not_specialize=["B", "capacity"])
def _advance_kernel(
    chosen, host, tokens, positions, context, valid, depths, drafted, B, capacity, BLOCK: tl.constexpr
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
    more = count + 1 < tl.load(depths + b, mask=live, other=0)
    tl.store(valid + b, more.to(tl.uint8), mask=live)


def advance(
    chosen: Tensor, host: Tensor, tokens: Tensor, positions: Tensor, context: Tensor, valid: Tensor, depths: Tensor,
    drafted: Tensor,
) -> None:  # fmt: skip
    """Every valid row takes its chosen token: into host int64 [B, capacity], mapped, and as the next step's input.

    A row whose depth is reached becomes invalid.
    """
    batch, capacity = host.shape
    _advance_kernel[(1,)](
        chosen, host, tokens, positions, context, valid, depths, drafted, batch, capacity, BLOCK=power_of_two(batch),
        num_warps=1,
    )  # fmt: skip
