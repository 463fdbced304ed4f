# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""`grouped_ffn` on nested slots: each weight tile is rebuilt from code, symbol and tail inside the product.

The products are those of the plain kernels: the same tiles, reduction order and matrix instruction, hence the same
bits. BF16 weights exist in registers and shared memory only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from specter_core.draft.int4 import GROUP
from specter_core.draft.kernels.blocks import BlockMatrix
from specter_core.nested.code import flag_span
from specter_core.nested.kernels.rebuild import prefetch_tails, rebuild_group, uses_assembly
from specter_core.nested.layout import NestedLayout
from specter_core.verify.kernels.grouped_ffn import GroupedTile, _tile_pairs

GATE_UP_TILE = GroupedTile(block_n=32, stages=3, registers=128)
DOWN_TILE = GroupedTile(block_n=64, stages=3, registers=128)
PREFILL_TILES = (
    GroupedTile(rows=128, block_n=32, warps=8, stages=2, registers=128),
    GroupedTile(rows=128, block_n=64, warps=8, stages=2, registers=128),
)
"""gate_up and down for a prompt's rows: weights are rebuilt once per 128 of them."""


class ResidentCodes:
    """The draft's experts of all layers, in its kernels' layout and where they are: gate_up and down of E experts
    per layer. addresses int64 [L, 4] on the device: words and scales of gate_up, then of down."""

    def __init__(self, gate_up: Sequence[BlockMatrix], down: Sequence[BlockMatrix]) -> None:
        self._kept = (tuple(gate_up), tuple(down))
        device = down[0].words.device
        self.experts = down[0].words.shape[0]
        if device.type == "meta":
            self.addresses = torch.empty(len(down), 4, dtype=torch.int64, device=device)
        else:
            rows = [[t.data_ptr() for t in (*g, *d)] for g, d in zip(gate_up, down, strict=True)]
            self.addresses = torch.tensor(rows, dtype=torch.int64, device=device)
        assert all(t.is_contiguous() for side in self._kept for matrix in side for t in matrix)
        self.layers = torch.arange(len(down), dtype=torch.int32, device=device)


@triton.jit
def _codes_of(addresses, layer, SIDE: tl.constexpr):
    """Pointers to a layer's words and scales; SIDE 0: gate_up, 1: down."""
    at = addresses + tl.load(layer) * 4 + 2 * SIDE
    words = tl.load(at).to(tl.pointer_type(tl.int32))
    scales = tl.load(at + 1).to(tl.pointer_type(tl.float16))
    return tl.multiple_of(words, 16), scales


@triton.jit
def _in_order(bits, FENCE: tl.constexpr):
    """The tile's bits, unchanged. Triton lets operands that come from narrow loads meet the matrix unit in another
    order of k; not through an instruction that it cannot see through."""
    if FENCE:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [bits], dtype=tl.int16, is_pure=False, pack=2)
    else:
        return bits


@triton.jit
def _as_weights(bits, dtype: tl.constexpr, FENCE: tl.constexpr):
    if dtype == tl.bfloat16:
        return _in_order(bits, FENCE).to(tl.bfloat16, bitcast=True)
    else:
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True).to(dtype)


@triton.jit
def _tile_of_group(
    words, scales, symbols, tails, scale, cursor, flags, group, K: tl.constexpr, SPAN: tl.constexpr, N: tl.constexpr,
    QUADS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One group of N rows, whose words, scales (float16*) and symbols (int32*) begin at these pointers [N].

    -> tile, scale and cursor of the next group. scale float16 [N] is read a group ahead: a branch waits for it.
    """
    n = tl.arange(0, 16)
    codes = tl.load(words[:, None] + group * 256 + n[None, :])
    at = symbols[:, None] + group * 32 + n[None, :]
    ahead = tl.load(scales + tl.minimum(group + 1, K // 128 - 1) * 16)
    flagged = (flags >> (group // SPAN)) & 1
    tile, cursor = rebuild_group(
        codes, tl.load(at), tl.load(at + 16), scale.to(tl.float32), cursor, flagged, tails, N, QUADS, ASM
    )
    return tile, ahead, cursor


@triton.jit
def _gate_up_kernel(
    x, slots32, slots8, addresses, layer, experts, slots, members, counts, act, stride_x,
    TOP_K: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, ENTRY: tl.constexpr, FLAGS: tl.constexpr,
    SYMBOLS: tl.constexpr, TAILS: tl.constexpr, SPAN: tl.constexpr, CAPACITY: tl.constexpr, LISTED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, QUADS: tl.constexpr, FENCE: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    slot, count, pairs, mask = _tile_pairs(experts, slots, members, counts, CAPACITY, ROWS, LISTED)
    if tl.program_id(0) * ROWS >= count:
        return
    expert = tl.program_id(2)
    if LISTED:
        expert = tl.load(experts + expert).to(tl.int32)
    gate_rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    up_rows = gate_rows + WIDTH
    entry = slots32 + slot * (ENTRY // 4)
    tails = slots8 + slot * ENTRY + TAILS
    gate_starts, up_starts = tl.load(entry + gate_rows), tl.load(entry + up_rows)
    prefetch_tails(tails, gate_starts, ENTRY - TAILS, LINES, FENCE)
    prefetch_tails(tails, up_starts, ENTRY - TAILS, LINES, FENCE)
    gate_cursor, up_cursor = 2 * gate_starts, 2 * up_starts
    gate_flags, up_flags = tl.load(entry + FLAGS + gate_rows), tl.load(entry + FLAGS + up_rows)
    symbols = entry + SYMBOLS // 4
    words, scales = _codes_of(addresses, layer, 0)
    own = expert.to(tl.int64) * (2 * WIDTH // 16) + gate_rows // 8  # a block of eight features: gate, then up
    gate_words = words + own * (2 * H) + gate_rows % 8 * 16
    gate_scales = scales + own * (H // 8) + gate_rows % 8 * 2
    up_words, up_scales = gate_words + 128, gate_scales + 1
    gate_scale, up_scale = tl.load(gate_scales), tl.load(up_scales)
    x_rows = x + (pairs // TOP_K).to(tl.int64)[:, None] * stride_x
    gate = tl.zeros([ROWS, BLOCK_N], tl.float32)
    up = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for group in range(H // 128):
        g, gate_scale, gate_cursor = _tile_of_group(
            gate_words, gate_scales, symbols + gate_rows * (H // 4), tails,
            gate_scale, gate_cursor, gate_flags, group, H, SPAN, BLOCK_N, QUADS, FENCE,
        )  # fmt: skip
        u, up_scale, up_cursor = _tile_of_group(
            up_words, up_scales, symbols + up_rows * (H // 4), tails,
            up_scale, up_cursor, up_flags, group, H, SPAN, BLOCK_N, QUADS, FENCE,
        )  # fmt: skip
        ks = group * 128 + tl.arange(0, 128)
        a = tl.load(x_rows + ks[None, :], mask=mask[:, None], other=0.0)
        gate = tl.dot(a, tl.trans(_as_weights(g, x.dtype.element_ty, FENCE)), gate, input_precision="ieee")
        up = tl.dot(a, tl.trans(_as_weights(u, x.dtype.element_ty, FENCE)), up, input_precision="ieee")
    y = gate * tl.sigmoid(gate) * up
    at = act + pairs[:, None] * WIDTH + gate_rows[None, :]
    tl.store(at, y.to(act.dtype.element_ty), mask=mask[:, None])


@triton.jit
def _down_kernel(
    act, slots32, slots8, addresses, layer, experts, slots, members, counts, out,
    H: tl.constexpr, WIDTH: tl.constexpr, ENTRY: tl.constexpr, FLAGS: tl.constexpr,
    SYMBOLS: tl.constexpr, TAILS: tl.constexpr, SPAN: tl.constexpr, CAPACITY: tl.constexpr, LISTED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    QUADS: tl.constexpr, FENCE: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    slot, count, pairs, mask = _tile_pairs(experts, slots, members, counts, CAPACITY, ROWS, LISTED)
    if tl.program_id(0) * ROWS >= count:
        return
    expert = tl.program_id(2)
    if LISTED:
        expert = tl.load(experts + expert).to(tl.int32)
    ns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    entry = slots32 + slot * (ENTRY // 4)
    tails = slots8 + slot * ENTRY + TAILS
    starts = tl.load(entry + 2 * WIDTH + ns)
    prefetch_tails(tails, starts, ENTRY - TAILS, LINES, FENCE)
    cursor, flags = 2 * starts, tl.load(entry + FLAGS + 2 * WIDTH + ns)
    symbols = entry + SYMBOLS // 4 + 2 * WIDTH * (H // 4) + ns * (WIDTH // 4)
    words, scales = _codes_of(addresses, layer, 1)
    own = expert.to(tl.int64) * (H // 16) + ns // 16
    words += own * (2 * WIDTH) + ns % 16 * 16
    scales += own * (WIDTH // 8) + ns % 8 * 2 + ns % 16 // 8
    scale = tl.load(scales)
    y = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for group in range(WIDTH // 128):
        b, scale, cursor = _tile_of_group(
            words, scales, symbols, tails, scale, cursor, flags, group, WIDTH, SPAN, BLOCK_N, QUADS, FENCE
        )  # fmt: skip
        ks = group * 128 + tl.arange(0, 128)
        a = tl.load(act + pairs[:, None] * WIDTH + ks[None, :], mask=mask[:, None], other=0.0)
        y = tl.dot(a, tl.trans(_as_weights(b, act.dtype.element_ty, FENCE)), y, input_precision="ieee")
    tl.store(out + pairs.to(tl.int64)[:, None] * H + ns[None, :], y, mask=mask[:, None])


def nested_ffn(
    x: Tensor, entries: Tensor, codes: ResidentCodes, layer: Tensor, slots: Tensor, members: Tensor, counts: Tensor,
    act: Tensor, out: Tensor, *, layout: NestedLayout, top_k: int, experts: Tensor | None = None,
    most: int | None = None, gate_up_tile: GroupedTile = GATE_UP_TILE, down_tile: GroupedTile = DOWN_TILE,
) -> None:  # fmt: skip
    """As `grouped_ffn`. entries uint8 [slots, entry_bytes]; layer int32 [1] on the device: whose codes are meant.

    x bfloat16 (other types only in tests: the rebuilt weights are converted to it).
    """
    count, k, hidden = out.shape
    width = act.shape[2]
    assert k == top_k and x.shape == (count, hidden) and x.stride(1) == 1 and x.dtype == act.dtype
    assert entries.dim() == 2 and entries.is_contiguous() and entries.shape[1] % 256 == 0
    assert act.is_contiguous() and out.is_contiguous() and act.shape[:2] == (count, k)
    assert x.data_ptr() % 16 == entries.data_ptr() % 16 == 0, "unaligned tensors compile to another kernel"
    assert hidden % GROUP == width % GROUP == 0, (hidden, width)
    assert codes.experts == counts.numel(), (codes.experts, counts.shape)
    items = slots.numel()
    assert (items == counts.numel()) if experts is None else (experts.numel() == items)
    listed = slots if experts is None else experts
    words = entries.view(torch.int32)
    shape = {
        "H": hidden, "WIDTH": width, "ENTRY": entries.shape[1], "FLAGS": layout.flags_at // 4,
        "SYMBOLS": layout.symbols_at, "TAILS": layout.tails_at, "CAPACITY": members.shape[1],
        "LISTED": experts is not None, "FENCE": uses_assembly(entries), "LINES": 4,
    }  # fmt: skip
    most = count if most is None else most
    _gate_up_kernel[(triton.cdiv(most, gate_up_tile.rows), width // gate_up_tile.block_n, items)](
        x, words, entries, codes.addresses, layer, listed, slots, members, counts, act, x.stride(0),
        TOP_K=top_k, SPAN=flag_span(hidden // GROUP), **shape, **_options(gate_up_tile),
    )  # fmt: skip
    _down_kernel[(triton.cdiv(most, down_tile.rows), hidden // down_tile.block_n, items)](
        act, words, entries, codes.addresses, layer, listed, slots, members, counts, out,
        SPAN=flag_span(width // GROUP), **shape, **_options(down_tile),
    )  # fmt: skip


def _options(tile: GroupedTile) -> dict[str, int | bool | None]:
    assert tile.block_k == GROUP, tile
    return {
        "ROWS": tile.rows,
        "BLOCK_N": tile.block_n,
        "QUADS": tile.block_n >= 8 * tile.warps,  # a thread has four words of a row
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "maxnreg": tile.registers,
    }
