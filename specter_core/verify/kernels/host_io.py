# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""What passes between host and kernels through mapped memory: a pass's inputs, the router's choice, slots to compute
from. No copy engine is involved, so nothing queues behind expert transfers (DESIGN 4, "The link").
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specter_core.memory.payload import TRAILER_BYTES, trailer_words
from specter_core.model.kernels.tiles import power_of_two

BLOCK = 256


@triton.jit(do_not_specialize=["rows"])
def _load_rows_kernel(host, tokens, positions, context, valid, rows, BLOCK: tl.constexpr):
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = r < rows
    live = tl.load(host + 2 * rows + r, mask=mask, other=0)
    position = tl.load(host + rows + r, mask=mask, other=0)
    tl.store(tokens + r, tl.load(host + r, mask=mask, other=0), mask=mask)
    tl.store(positions + r, tl.where(live != 0, position, 0), mask=mask)
    tl.store(context + r, tl.where(live != 0, position + 1, 0), mask=mask)
    tl.store(valid + r, live.to(tl.uint8), mask=mask)


def load_rows(host: Tensor, tokens: Tensor, positions: Tensor, context: Tensor, valid: Tensor) -> None:
    """host int64 [3, R] (tokens, positions, valid), mapped -> the rows of a decode pass; context = position + 1.

    tokens, positions, context int64 [R]; valid uint8 [R].
    """
    rows = tokens.numel()
    assert host.shape == (3, rows) and host.is_contiguous()
    _load_rows_kernel[(triton.cdiv(rows, BLOCK),)](
        host, tokens, positions, context, valid, rows, BLOCK=BLOCK, num_warps=4
    )


@triton.jit(do_not_specialize=["pairs"])
def _report_kernel(ids, host, flag, pairs, BLOCK: tl.constexpr):
    for p0 in range(0, pairs, BLOCK):
        p = p0 + tl.arange(0, BLOCK)
        tl.store(host + p, tl.load(ids + p, mask=p < pairs, other=-1).to(tl.int32), mask=p < pairs)
    tl.debug_barrier()
    tl.atomic_xchg(flag, 1, sem="release", scope="sys")


def report_ids(ids: Tensor, host: Tensor, flag: Tensor) -> None:
    """ids int64 [R, k] -> host int32 [R·k], mapped; then flag int32 [1], mapped, becomes 1."""
    assert host.numel() == ids.numel() and ids.is_contiguous() and host.is_contiguous()
    _report_kernel[(1,)](ids, host, flag, ids.numel(), BLOCK=BLOCK, num_warps=4)


@triton.jit(do_not_specialize=["count", "first_layer"])
def _admit_kernel(
    host_experts, host_slots, experts, slots, words, error, count, first_layer,
    ENTRY: tl.constexpr, LISTED: tl.constexpr, MAGIC_LOW: tl.constexpr, MAGIC_HIGH: tl.constexpr,
    ENCODING: tl.constexpr, SIZE: tl.constexpr, TRAILER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    at = line * count + i
    listed = i < count
    slot = tl.load(host_slots + at, mask=listed, other=-1)
    expert = i
    if LISTED:
        expert = tl.load(host_experts + at, mask=listed, other=-1)
        tl.store(experts + at, expert, mask=listed)
    held = slot >= 0
    trailer = words + slot.to(tl.int64) * ENTRY + ENTRY - TRAILER
    right = tl.load(trailer, mask=held, other=0) == MAGIC_LOW
    right = right & (tl.load(trailer + 1, mask=held, other=0) == MAGIC_HIGH)
    right = right & (tl.load(trailer + 2, mask=held, other=0) == first_layer + line)
    right = right & (tl.load(trailer + 3, mask=held, other=0) == expert)
    right = right & (tl.load(trailer + 4, mask=held, other=0) == ENCODING)
    right = right & (tl.load(trailer + 6, mask=held, other=0) == SIZE)
    tl.store(slots + at, tl.where(right, slot, -1), mask=listed)
    wrong = held & ~right
    tl.store(error + 0 * i, slot + 1, mask=wrong)


def admit(
    host_slots: Tensor, slots: Tensor, words: Tensor, error: Tensor, layer: int, *, hidden: int, width: int,
    itemsize: int, block: int, encoding: str = "plain", host_experts: Tensor | None = None,
    experts: Tensor | None = None,
) -> None:  # fmt: skip
    """Bring slot numbers to the device, after checking that each slot holds the expert it is to be computed as.

    host_slots int32 [n, count], mapped, -1 = none; line i belongs to MoE layer layer + i. Without host_experts the
    expert is the column (a slot table); with it int32 [n, count] names the experts, copied to `experts` too. words
    int32 [slots, entry / 4]: the slot buffer. A slot whose trailer is another's goes to -1 and leaves 1 + its
    number in error int32 [1], mapped: the pass must then be dropped. block: the most columns of any call.
    """
    lines, count = host_slots.shape
    assert host_slots.is_contiguous() and slots.is_contiguous() and (host_experts is None) == (experts is None)
    low, high, size, number = trailer_words(hidden, width, itemsize, encoding)
    _admit_kernel[(lines,)](
        host_slots if host_experts is None else host_experts, host_slots, slots if experts is None else experts,
        slots, words, error, count, layer, ENTRY=words.shape[1], LISTED=host_experts is not None, MAGIC_LOW=low,
        MAGIC_HIGH=high, ENCODING=number, SIZE=size, TRAILER=TRAILER_BYTES // 4, BLOCK=power_of_two(block), num_warps=1,
    )  # fmt: skip
