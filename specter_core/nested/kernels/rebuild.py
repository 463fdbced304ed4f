# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""BF16 weights of one group per row from code words, symbol words and tails (nested/code.py).

Two weights share a register as 16-bit halves, and no half ever carries into the other. A code word's zeros are counted
by one multiplication, whose nibbles then say which tail is whose: a byte permutation puts up to eight tails, read at
once, where they belong, and a nought where the code is not 0. A row is walked from its first group to its last.

The assembly is for one code word. In words: read the tails from the 4 bytes on in which the first lies; align them;
selectors of bytes are the number of zeros before a nibble, or 7, where a nought is put unless all eight codes are 0;
symbols and tails are interleaved; 128 + code + 8 as BF16 pairs, less 136, times the scale; sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specter_core.nested.code import BASE

SCALE = tl.constexpr(BASE)
NIBBLE_ONES = tl.constexpr(0x11111111)
NIBBLE_TOPS = tl.constexpr(-0x77777778)  # 0x88888888

# $0 … $3: pairs out; words, first, second, scale pair, at, zeros, through, tails
_WEIGHTS = tl.constexpr("""{
.reg .pred many;
.reg .b64 a;
.reg .b32 i, r, b0, b1, b2, e0, e1, m, sel, x, y, ta, tb, less;
mov.b32 less, 0xc308c308;
shr.u32 i, $8, 2;
mad.wide.u32 a, i, 4, $11;
ld.global.nc.b32 b0, [a];
ld.global.nc.b32 b1, [a + 4];
setp.ge.u32 many, $10, 0x60000000;
@many ld.global.nc.b32 b2, [a + 8];
and.b32 r, $8, 3;
mad.lo.u32 r, r, 0x1111, 0x3210;
mad.lo.u32 sel, $9, 0xfffffff9, 0x77777777;
shl.b32 x, $10, 4;
or.b32 sel, sel, x;
shr.s32 m, $10, 31;
or.b32 m, m, 0x00ffffff;
prmt.b32 e0, b0, b1, r;
prmt.b32 e1, b1, b2, r;
and.b32 e1, e1, m;
prmt.b32 ta, e0, e1, sel;
shr.u32 x, sel, 16;
prmt.b32 tb, e0, e1, x;
and.b32 x, $4, 0xff;
mul.lo.u32 x, x, 0x1001;
lop3.b32 x, x, 0x000f000f, 0x43004300, 0xea;
add.rn.bf16x2 x, x, less;
mul.rn.bf16x2 x, x, $7;
prmt.b32 y, $5, ta, 0x5140;
add.u32 $0, x, y;
bfe.u32 x, $4, 8, 8;
mul.lo.u32 x, x, 0x1001;
lop3.b32 x, x, 0x000f000f, 0x43004300, 0xea;
add.rn.bf16x2 x, x, less;
mul.rn.bf16x2 x, x, $7;
prmt.b32 y, $5, ta, 0x7362;
add.u32 $1, x, y;
bfe.u32 x, $4, 16, 8;
mul.lo.u32 x, x, 0x1001;
lop3.b32 x, x, 0x000f000f, 0x43004300, 0xea;
add.rn.bf16x2 x, x, less;
mul.rn.bf16x2 x, x, $7;
prmt.b32 y, $6, tb, 0x5140;
add.u32 $2, x, y;
shr.u32 x, $4, 24;
mul.lo.u32 x, x, 0x1001;
lop3.b32 x, x, 0x000f000f, 0x43004300, 0xea;
add.rn.bf16x2 x, x, less;
mul.rn.bf16x2 x, x, $7;
prmt.b32 y, $6, tb, 0x7362;
add.u32 $3, x, y;
}""")


@triton.jit
def _rounded(value):
    """float32 -> bits of the nearest BF16, ties to even; finite values."""
    bits = value.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def _weight(words, symbols, scale, at, zeros, through, tails, j: tl.constexpr):
    """Bits of nibble j's weight, one by one: what the assembly does for eight. scale float32 of a BF16."""
    code = ((words >> (4 * j)) & 15) - 8
    before = ((through << 4) >> (4 * j)) & 15
    tail = tl.load(tails + at + before, mask=((zeros >> (4 * j)) & 1) != 0, other=0).to(tl.int32)
    return _rounded(code.to(tl.float32) * scale) + ((symbols >> (8 * (j % 4))) & 255) + (tail << 8)


@triton.jit
def _pairs(words, first, second, scale, at, zeros, through, tails, ASM: tl.constexpr):
    """Weights of nibbles (0, 1), (2, 3), (4, 5), (6, 7), the even one in the low half. scale int32: a BF16's bits."""
    if ASM:
        return tl.inline_asm_elementwise(
            _WEIGHTS, "=r,=r,=r,=r,r,r,r,r,r,r,r,l",
            [words, first, second, scale * 0x10001, at, zeros, through, tails.to(tl.int64, bitcast=True)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        s = (scale << 16).to(tl.float32, bitcast=True)
        w0 = _weight(words, first, s, at, zeros, through, tails, 0)
        w1 = _weight(words, first, s, at, zeros, through, tails, 1)
        w2 = _weight(words, first, s, at, zeros, through, tails, 2)
        w3 = _weight(words, first, s, at, zeros, through, tails, 3)
        w4 = _weight(words, second, s, at, zeros, through, tails, 4)
        w5 = _weight(words, second, s, at, zeros, through, tails, 5)
        w6 = _weight(words, second, s, at, zeros, through, tails, 6)
        w7 = _weight(words, second, s, at, zeros, through, tails, 7)
        return w0 | (w1 << 16), w2 | (w3 << 16), w4 | (w5 << 16), w6 | (w7 << 16)


@triton.jit
def rebuild_group(words, first, second, scale, cursor, tails, N: tl.constexpr, ASM: tl.constexpr):
    """words, first, second int32 [N, 16]: codes and both halves of the symbols of one group per row; scale float32 [N];
    cursor int32 [N]: where the row's tails of this group begin in `tails` (uint8*, on 4 bytes).

    -> int16 [N, 128], the weights' bits, and the cursor behind this group.
    """
    coded = words ^ NIBBLE_TOPS  # nibbles 0 where the code is 0
    coded |= coded << 1
    coded |= coded << 2
    zeros = (~coded >> 3) & NIBBLE_ONES
    through = zeros * NIBBLE_ONES  # nibble j: zeros among nibbles 0 … j
    found = (through >> 28) & 15
    at = cursor[:, None] + tl.cumsum(found, axis=1) - found
    scale = _rounded(tl.abs(scale * SCALE))[:, None]
    p0, p1, p2, p3 = _pairs(words, first, second, scale, at, zeros, through, tails, ASM)
    pairs = tl.join(tl.join(p0, p2), tl.join(p1, p3))  # [N, 16, 2, 2]: nibble + 4, + 2
    tile = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16))  # + 1
    tile = tl.reshape(tl.permute(tile, (0, 2, 3, 4, 1)), (N, 128))  # input 16·nibble + word
    return tile, cursor + tl.sum(found, axis=1)


@triton.jit
def prefetch_tails(tails, cursor, LIMIT: tl.constexpr, LINES: tl.constexpr, ASM: tl.constexpr):
    """Asks for the first LINES x 128 bytes of each row's tails, so that walking the rows does not wait for memory.

    cursor int32 [N]; LIMIT: bytes from `tails` to the end of the entry.
    """
    if ASM:
        at = tails + tl.minimum(cursor[:, None] + 128 * tl.arange(0, LINES)[None, :], LIMIT - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64, bitcast=True)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
