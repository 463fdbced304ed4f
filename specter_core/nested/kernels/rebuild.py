# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""BF16 weights of one group per row from code words, symbol words and tails (nested/code.py), in integers.

Two weights share a register as 16-bit halves, nibbles j and j + 2 of a code word; no half ever carries into the other.
A code word's zeros are counted by one multiplication, whose nibbles then say which tail is whose: a byte permutation
puts up to eight tails, read at once, where they belong. A row is walked from its first group to its last.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specter_core.draft.kernels.nibbles import nibble_plus_offset
from specter_core.nested.code import BASE

SCALE = tl.constexpr(BASE)
HALF_BYTES = tl.constexpr(0x00FF00FF)
NIBBLE_ONES = tl.constexpr(0x11111111)
NIBBLE_TOPS = tl.constexpr(-0x77777778)  # 0x88888888
HIGH_HALF = tl.constexpr(-0x10000)

_TAILS = tl.constexpr("""{
.reg .pred p, q, high;
.reg .b64 a;
.reg .b32 i, r, c, b0, b1, b2, b3, e0, e1, s, m, even;
shr.u32 i, $4, 3;
mad.wide.u32 a, i, 8, $7;
and.b32 r, $4, 7;
setp.ne.u32 p, $6, 0;
add.u32 c, r, $6;
setp.gt.u32 q, c, 8;
@p ld.global.nc.v2.u32 {b0, b1}, [a];
@q ld.global.nc.v2.u32 {b2, b3}, [a + 8];
and.b32 c, r, 4;
setp.ne.u32 high, c, 0;
selp.b32 b0, b1, b0, high;
selp.b32 b1, b2, b1, high;
selp.b32 b2, b3, b2, high;
and.b32 r, r, 3;
mad.lo.u32 s, r, 0x1111, 0x3210;
prmt.b32 e0, b0, b1, s;
prmt.b32 e1, b1, b2, s;
shl.b32 even, $5, 4;
mov.b32 c, 0;
shl.b32 s, $8, 4;
prmt.b32 r, e0, e1, s;
prmt.b32 m, even, c, 0x9484;
and.b32 $0, r, m;
prmt.b32 r, e0, e1, $8;
prmt.b32 m, $5, c, 0x9484;
and.b32 $1, r, m;
shr.u32 s, $8, 12;
prmt.b32 r, e0, e1, s;
prmt.b32 m, even, c, 0xb4a4;
and.b32 $2, r, m;
shr.u32 s, $8, 16;
prmt.b32 r, e0, e1, s;
prmt.b32 m, $5, c, 0xb4a4;
and.b32 $3, r, m;
}""")


@triton.jit
def _times(words, scale, bits_256, bits_16, j: tl.constexpr):
    """Bits of float32(code · scale) of nibble j: exact."""
    value = nibble_plus_offset(words, bits_256, bits_16, j)
    offset: tl.constexpr = 264.0 if j % 2 == 0 else 24.0
    return (value * scale - offset * scale).to(tl.int32, bitcast=True)


@triton.jit
def _bases(words, scale, bits_256, bits_16, j: tl.constexpr, ASM: tl.constexpr):
    """What the symbols of nibbles j and j + 2 are added to."""
    first = _times(words, scale, bits_256, bits_16, j)
    second = _times(words, scale, bits_256, bits_16, j + 2)
    if ASM:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [first, second], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return ((first >> 16) & 0xFFFF) | (second & HIGH_HALF)


@triton.jit
def _tail(tails, at, before, zeros, j: tl.constexpr):
    """The tail of nibble j where the code is 0, else 0."""
    mask = ((zeros >> (4 * j + 3)) & 1) != 0
    return tl.load(tails + at + ((before >> (4 * j)) & 15), mask=mask, other=0).to(tl.int32)


@triton.jit
def _tail_pairs(tails, at, zeros, found, before, ASM: tl.constexpr):
    """Tails of nibbles (0, 2), (1, 3), (4, 6), (5, 7) in the high bytes of 16-bit halves, 0 where the code is not 0.

    tails: uint8*, on 8 bytes. at int32: index of the word's first; zeros: bit 3 of a nibble: the code is 0; found: how
    many; before: a nibble each, how many come before it in the word.
    """
    if ASM:  # two reads instead of eight, and byte permutations, which Triton has no words for
        return tl.inline_asm_elementwise(
            _TAILS, "=r,=r,=r,=r,r,r,r,l,r", [at, zeros, found, tails.to(tl.int64, bitcast=True), before],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        p0 = (_tail(tails, at, before, zeros, 0) << 8) | (_tail(tails, at, before, zeros, 2) << 24)
        p1 = (_tail(tails, at, before, zeros, 1) << 8) | (_tail(tails, at, before, zeros, 3) << 24)
        p2 = (_tail(tails, at, before, zeros, 4) << 8) | (_tail(tails, at, before, zeros, 6) << 24)
        p3 = (_tail(tails, at, before, zeros, 5) << 8) | (_tail(tails, at, before, zeros, 7) << 24)
        return p0, p1, p2, p3


@triton.jit
def rebuild_group(words, first, second, scale, cursor, tails, bits_256, bits_16, N: tl.constexpr, ASM: tl.constexpr):
    """words, first, second int32 [N, 16]: codes and both halves of the symbols of one group per row; scale float32 [N];
    cursor int32 [N]: where the row's tails of this group begin in `tails` (uint8*).

    -> int16 [N, 128], the weights' bits, and the cursor behind this group.
    """
    scale = scale[:, None] * SCALE
    coded = words ^ NIBBLE_TOPS  # nibbles 0 where the code is 0
    coded |= coded << 1
    coded |= coded << 2
    zeros = ~coded & NIBBLE_TOPS
    through = ((zeros >> 3) & NIBBLE_ONES) * NIBBLE_ONES  # nibble j: zeros among nibbles 0 … j
    found = (through >> 28) & 15
    at = cursor[:, None] + tl.cumsum(found, axis=1) - found
    t0, t1, t2, t3 = _tail_pairs(tails, at, zeros, found, through << 4, ASM)
    p0 = (_bases(words, scale, bits_256, bits_16, 0, ASM) + (first & HALF_BYTES)) | t0
    p1 = (_bases(words, scale, bits_256, bits_16, 1, ASM) + ((first >> 8) & HALF_BYTES)) | t1
    p2 = (_bases(words, scale, bits_256, bits_16, 4, ASM) + (second & HALF_BYTES)) | t2
    p3 = (_bases(words, scale, bits_256, bits_16, 5, ASM) + ((second >> 8) & HALF_BYTES)) | t3
    lower = tl.join(tl.join(p0, p2), tl.join(p1, p3))  # [N, 16, 2, 2]: nibble + 4, + 1
    tile = tl.join(lower.to(tl.int16), (lower >> 16).to(tl.int16))  # + 2
    tile = tl.reshape(tl.permute(tile, (0, 2, 4, 3, 1)), (N, 128))  # input 16·nibble + word
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
