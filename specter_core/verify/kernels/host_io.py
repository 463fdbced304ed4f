# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""What passes between host and kernels through mapped memory: a pass's inputs, the router's choice, slots to compute
from. No copy engine is involved, so nothing queues behind expert transfers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specter_core.memory.payload import TRAILER_BYTES, PayloadLayout, trailer_words
from specter_core.model.kernels.tiles import power_of_two

BLOCK = 256
LONG_BLOCK = 1024
"""Ids per step where a prompt has many."""


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


@triton.jit
def raise_flag(flag, ASM: tl.constexpr):
    """flag int32, mapped, becomes 1 behind all that this block has stored."""
    tl.debug_barrier()
    if ASM:  # a releasing store: atomics on host memory are not every machine's
        at = flag.to(tl.int64) + tl.zeros([1], tl.int64)
        tl.inline_asm_elementwise(
            "st.release.sys.global.u32 [$1], 1; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        tl.atomic_xchg(flag, 1, sem="release", scope="sys")


@triton.jit(do_not_specialize=["pairs"])
def _report_kernel(ids, host, flag, pairs, BLOCK: tl.constexpr, ASM: tl.constexpr):
    for p0 in range(0, pairs, BLOCK):
        p = p0 + tl.arange(0, BLOCK)
        tl.store(host + p, tl.load(ids + p, mask=p < pairs, other=-1).to(tl.int32), mask=p < pairs)
    raise_flag(flag, ASM)


def report_ids(ids: Tensor, host: Tensor, flag: Tensor) -> None:
    """ids int64 [R, k] -> host int32 [R·k], mapped; then flag int32 [1], mapped, becomes 1."""
    assert host.numel() == ids.numel() and ids.is_contiguous() and host.is_contiguous()
    asm = ids.is_cuda or ids.is_meta
    block = BLOCK if ids.numel() <= 4 * LONG_BLOCK else LONG_BLOCK
    _report_kernel[(1,)](ids, host, flag, ids.numel(), BLOCK=block, ASM=asm, num_warps=1)


@triton.jit
def _holds(words, slot, layer, expert, held, ENTRY: tl.constexpr, TRAILER: tl.constexpr, MAGIC_LOW: tl.constexpr,
           MAGIC_HIGH: tl.constexpr, ENCODING: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """Whether each slot's trailer names this layer and expert."""
    trailer = words + slot.to(tl.int64) * ENTRY + ENTRY - TRAILER
    right = tl.load(trailer, mask=held, other=0) == MAGIC_LOW
    right = right & (tl.load(trailer + 1, mask=held, other=0) == MAGIC_HIGH)
    right = right & (tl.load(trailer + 2, mask=held, other=0) == layer)
    right = right & (tl.load(trailer + 3, mask=held, other=0) == expert)
    right = right & (tl.load(trailer + 4, mask=held, other=0) == ENCODING)
    return right & (tl.load(trailer + 6, mask=held, other=0) == SIZE)


@triton.jit(do_not_specialize=["first"])
def _admit_table_kernel(
    host, table, words, error, first, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ENTRY: tl.constexpr,
    TRAILER: tl.constexpr, MAGIC_LOW: tl.constexpr, MAGIC_HIGH: tl.constexpr, ENCODING: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0)
    expert = tl.arange(0, BLOCK)
    at = line * COLUMNS + expert
    slot = tl.load(host + at, mask=expert < COLUMNS, other=-1)
    held = slot >= 0
    right = _holds(words, slot, first + line, expert, held, ENTRY, TRAILER, MAGIC_LOW, MAGIC_HIGH, ENCODING, SIZE)
    tl.store(table + at, tl.where(right, slot, -1), mask=expert < COLUMNS)
    tl.store(error + 0 * expert, slot + 1, mask=held & ~right)


@triton.jit(do_not_specialize=["count"])
def _admit_list_kernel(
    host, host_layers, lists, turn, words, error, count, LISTS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, ENTRY: tl.constexpr, TRAILER: tl.constexpr, MAGIC_LOW: tl.constexpr, MAGIC_HIGH: tl.constexpr,
    ENCODING: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    now = tl.load(turn)
    line = now % LISTS
    i = tl.arange(0, BLOCK)
    listed = i < count
    layer = tl.load(host_layers + line)
    expert = tl.load(host + line * COLUMNS + i, mask=listed, other=-1)
    slot = tl.load(host + (LISTS + line) * COLUMNS + i, mask=listed, other=-1)
    held = slot >= 0
    right = _holds(words, slot, layer, expert, held, ENTRY, TRAILER, MAGIC_LOW, MAGIC_HIGH, ENCODING, SIZE)
    tl.store(lists + i, expert, mask=listed)
    tl.store(lists + COLUMNS + i, tl.where(right, slot, -1), mask=listed)
    tl.store(lists + 2 * COLUMNS, layer)
    tl.store(error + 0 * i, slot + 1, mask=held & ~right)
    tl.store(turn, now + 1)


def admit_table(
    host: Tensor, table: Tensor, words: Tensor, error: Tensor, layout: PayloadLayout, first: int = 0
) -> None:
    """Slot table int32 [L, columns] (-1 = none), mapped -> device, each slot checked to hold its line's layer and its
    column's expert. first: layer of the first line.

    words int32 [slots, entry / 4]: the slot buffer. A slot whose trailer names another goes to -1 and leaves 1 + its
    number in error int32 [1], mapped: the pass must then be dropped.
    """
    lines, columns = host.shape
    assert host.is_contiguous() and table.is_contiguous()
    _admit_table_kernel[(lines,)](
        host, table, words, error, first, COLUMNS=columns, BLOCK=power_of_two(columns), num_warps=1,
        **_trailer(words, layout),
    )  # fmt: skip


def admit_list(
    host: Tensor, host_layers: Tensor, lists: Tensor, turn: Tensor, words: Tensor, error: Tensor, count: int,
    layout: PayloadLayout,
) -> None:  # fmt: skip
    """The next list of experts and slots, checked as in `admit_table`, into lists int32 [3, columns], whose last row
    begins with the layer.

    host int32 [2, lists, columns] and host_layers int32 [lists], mapped: a ring that turn int32 [1] on the device
    walks through, so that one captured launch serves every list. count: columns to take, slots -1 where unused.
    """
    _, length, columns = host.shape
    assert lists.shape == (3, columns) and count <= columns and host.is_contiguous()
    _admit_list_kernel[(1,)](
        host, host_layers, lists, turn, words, error, count, LISTS=length, COLUMNS=columns,
        BLOCK=power_of_two(columns), num_warps=1, **_trailer(words, layout),
    )  # fmt: skip


def _trailer(words: Tensor, layout: PayloadLayout) -> dict[str, int]:
    low, high, size, encoding = trailer_words(layout)
    return {
        "ENTRY": words.shape[1],
        "TRAILER": TRAILER_BYTES // 4,
        "MAGIC_LOW": low,
        "MAGIC_HIGH": high,
        "ENCODING": encoding,
        "SIZE": size,
    }
