# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Routed experts of a pass as two grouped launches over cache slots: gate+up+SwiGLU, then down.

Each (row, expert) result lands in its own row of `out`, so the order in which experts arrive and how they are grouped
into launches change no bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class GroupedTile:
    """rows gathered per tile, outputs per program, inputs per step; fixed by the weights' shape, never by R. registers:
    at most so many per thread (None: the compiler's choice; nested kernels only)."""

    rows: int = 16
    block_n: int = 32
    block_k: int = 128
    warps: int = 4
    stages: int = 4
    registers: int | None = None


GATE_UP_TILE = GroupedTile(block_n=32, stages=4)
DOWN_TILE = GroupedTile(block_n=64, stages=4)
PREFILL_TILES = (
    GroupedTile(rows=64, block_n=64, block_k=64, stages=4),
    GroupedTile(rows=64, block_n=128, block_k=64, stages=4),
)
"""gate_up and down for a prompt's rows; other bits than those of decoding."""


@triton.jit
def _tile_pairs(experts, slots, members, counts, CAPACITY: tl.constexpr, ROWS: tl.constexpr, LISTED: tl.constexpr):
    """(slot, pairs, mask) of this program's expert and row tile; nothing to do where the mask is empty."""
    item = tl.program_id(2)
    expert = item
    if LISTED:
        expert = tl.load(experts + item).to(tl.int32)
    slot = tl.load(slots + item).to(tl.int64)
    present = (slot >= 0) & (expert >= 0)
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    count = tl.load(counts + expert, mask=present, other=0)
    mask = place < count
    pairs = tl.load(members + expert * CAPACITY + place, mask=mask, other=0)
    return slot, count, pairs, mask


@triton.jit
def _slot_tile(w, ns, ks, N: tl.constexpr, K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    at = w + ns[:, None] * K + ks[None, :]
    if EVEN_N and EVEN_K:
        return tl.load(at)
    else:
        return tl.load(at, mask=(ns < N)[:, None] & (ks < K)[None, :], other=0.0)


@triton.jit
def _gate_up_kernel(
    x, buffer, experts, slots, members, counts, act, stride_x,
    TOP_K: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, ENTRY: tl.constexpr, CAPACITY: tl.constexpr,
    LISTED: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    EVEN_N: tl.constexpr = WIDTH % BLOCK_N == 0
    EVEN_K: tl.constexpr = H % BLOCK_K == 0
    slot, count, pairs, mask = _tile_pairs(experts, slots, members, counts, CAPACITY, ROWS, LISTED)
    if tl.program_id(0) * ROWS >= count:
        return
    ns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    w = buffer + slot * ENTRY
    x_rows = x + (pairs // TOP_K).to(tl.int64)[:, None] * stride_x
    gate = tl.zeros([ROWS, BLOCK_N], tl.float32)
    up = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for k0 in range(0, H, BLOCK_K):
        ks = k0 + tl.arange(0, BLOCK_K)
        if EVEN_K:
            a = tl.load(x_rows + ks[None, :], mask=mask[:, None], other=0.0)
        else:
            a = tl.load(x_rows + ks[None, :], mask=mask[:, None] & (ks < H)[None, :], other=0.0)
        b = _slot_tile(w, ns, ks, WIDTH, H, EVEN_N, EVEN_K)
        gate = tl.dot(a, tl.trans(b), gate, input_precision="ieee")
        b = _slot_tile(w + WIDTH * H, ns, ks, WIDTH, H, EVEN_N, EVEN_K)
        up = tl.dot(a, tl.trans(b), up, input_precision="ieee")
    y = gate * tl.sigmoid(gate) * up
    at = act + pairs[:, None] * WIDTH + ns[None, :]
    tl.store(at, y.to(act.dtype.element_ty), mask=mask[:, None] & (ns < WIDTH)[None, :])


@triton.jit
def _down_kernel(
    act, buffer, experts, slots, members, counts, out,
    H: tl.constexpr, WIDTH: tl.constexpr, ENTRY: tl.constexpr, CAPACITY: tl.constexpr,
    LISTED: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    EVEN_N: tl.constexpr = H % BLOCK_N == 0
    EVEN_K: tl.constexpr = WIDTH % BLOCK_K == 0
    slot, count, pairs, mask = _tile_pairs(experts, slots, members, counts, CAPACITY, ROWS, LISTED)
    if tl.program_id(0) * ROWS >= count:
        return
    ns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    w = buffer + slot * ENTRY + 2 * WIDTH * H
    y = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for k0 in range(0, WIDTH, BLOCK_K):
        ks = k0 + tl.arange(0, BLOCK_K)
        a_at = act + pairs[:, None] * WIDTH + ks[None, :]
        if EVEN_K:
            a = tl.load(a_at, mask=mask[:, None], other=0.0)
        else:
            a = tl.load(a_at, mask=mask[:, None] & (ks < WIDTH)[None, :], other=0.0)
        y = tl.dot(a, tl.trans(_slot_tile(w, ns, ks, H, WIDTH, EVEN_N, EVEN_K)), y, input_precision="ieee")
    tl.store(out + pairs.to(tl.int64)[:, None] * H + ns[None, :], y, mask=mask[:, None] & (ns < H)[None, :])


def grouped_ffn(
    x: Tensor, buffer: Tensor, slots: Tensor, members: Tensor, counts: Tensor, act: Tensor, out: Tensor, *,
    top_k: int, experts: Tensor | None = None, most: int | None = None, gate_up_tile: GroupedTile = GATE_UP_TILE,
    down_tile: GroupedTile = DOWN_TILE,
) -> None:  # fmt: skip
    """out[r, c] = down(silu(gate·x[r]) * up·x[r]) for every pair (r, c) routed to one of the given experts.

    x [R, H]; buffer [slots, entry] in x's dtype, an entry being gate [I, H] | up [I, H] | down [H, I] | trailer.

    experts None: slots int32 [E] is the slot table of a layer, -1 = not resident (skipped). experts int32 [n]: a
    list of arrived misses with slots int32 [n]; -1 in either pads it. members, counts from `group_rows`. act
    [R, k, I] in x's dtype and out [R, k, H] float32: only the pairs of these experts are written. most: no count is
    larger (None: R), which spares programs that find nothing to do. A pair's bits depend on its row, its expert's
    weights and the tiles alone.
    """
    count, k, hidden = out.shape
    width = act.shape[2]
    assert k == top_k and x.shape == (count, hidden) and x.stride(1) == 1 and x.dtype == buffer.dtype == act.dtype
    assert buffer.dim() == 2 and buffer.is_contiguous() and buffer.shape[1] >= 3 * hidden * width
    assert act.is_contiguous() and out.is_contiguous() and act.shape[:2] == (count, k)
    assert x.data_ptr() % 16 == buffer.data_ptr() % 16 == 0, "unaligned tensors compile to another kernel"
    items = slots.numel()
    assert (items == counts.numel()) if experts is None else (experts.numel() == items)
    listed = slots if experts is None else experts
    shape = {"H": hidden, "WIDTH": width, "ENTRY": buffer.shape[1], "CAPACITY": members.shape[1]}
    most = count if most is None else most
    _gate_up_kernel[(triton.cdiv(most, gate_up_tile.rows), triton.cdiv(width, gate_up_tile.block_n), items)](
        x, buffer, listed, slots, members, counts, act, x.stride(0),
        TOP_K=top_k, **shape, **_options(gate_up_tile, experts is not None),
    )  # fmt: skip
    _down_kernel[(triton.cdiv(most, down_tile.rows), triton.cdiv(hidden, down_tile.block_n), items)](
        act, buffer, listed, slots, members, counts, out, **shape, **_options(down_tile, experts is not None)
    )


def _options(tile: GroupedTile, listed: bool) -> dict[str, int | bool]:
    return {
        "LISTED": listed,
        "ROWS": tile.rows,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
