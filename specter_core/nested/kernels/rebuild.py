# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""BF16 weights of one group per row from code words, symbol words and tails (nested/code.py).

Two weights share a register as 16-bit halves, and no half ever carries into the other. A code word's zeros are counted
by one multiplication, whose nibbles then say which tail is whose. A row is walked from its first group to its last.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specter_core.nested import code
from specter_core.nested.kernels import assembly

SCALE = tl.constexpr(code.BASE)
BELOW = tl.constexpr(code.BELOW)
NOTHING = tl.constexpr(code.NOTHING)
NIBBLE_ONES = tl.constexpr(0x11111111)
NIBBLE_TOPS = tl.constexpr(-0x77777778)  # 0x88888888
NIBBLE_LOWS = tl.constexpr(0x77777777)
COUNT, SCALES = tl.constexpr(assembly.COUNT), tl.constexpr(assembly.SCALES)
TWO_WORDS, FOUR_WORDS = tl.constexpr(assembly.assembly(2)), tl.constexpr(assembly.assembly(4))
OF_TWO, OF_FOUR = tl.constexpr(assembly.constraints(2)), tl.constexpr(assembly.constraints(4))


def uses_assembly(tensor: Tensor) -> bool:
    """ASM of the kernels that work on it: Triton's interpreter has none."""
    return tensor.device.type != "cpu"


@triton.jit
def _rounded(value, ties_up):
    """float32 -> bits of the nearest BF16, of two the even one or, if so told, the upper; finite values."""
    bits = value.to(tl.int32, bitcast=True)
    up = tl.where(ties_up, (bits >= 0).to(tl.int32), (bits >> 16) & 1)
    return ((bits + 0x7FFF + up) >> 16) & 0xFFFF


@triton.jit
def _nibble(tails, at, mask):
    return (tl.load(tails + (at >> 1), mask=mask, other=0).to(tl.int32) >> (4 * (at & 1))) & 15


@triton.jit
def _weight(codes, zeros, symbols, t, c, begin, before, tails, j: tl.constexpr, byte: tl.constexpr):
    """Bits of the weight of a word's code j, one by one: what the assembly does for eight. t float32 of a BF16, c a
    BF16's bits; symbols: the word in whose `byte` the weight's is."""
    flagged, zero = c == NOTHING, ((zeros >> (4 * j)) & 1) != 0
    number = before + ((((zeros * NIBBLE_ONES) << 4) >> (4 * j)) & 15)
    at = begin + tl.where(flagged, 2 * number, number)
    low, high = _nibble(tails, at, zero), _nibble(tails, at + 1, zero & flagged)
    tail = tl.where(flagged, low | (high << 4), (low & 7) | ((low & 8) << 4))
    product = (((codes >> (4 * j)) & 15) - 8).to(tl.float32) * t
    base = tl.where((product == 0) & (c != NOTHING), c, _rounded(product, (c & 0x7FFF) != 0))
    return base + ((symbols >> (8 * byte)) & 255) + (tail << 8)


@triton.jit
def _word(codes, first, second, t, c, begin, before, tails):
    """Pairs of a word's weights (0, 4), (1, 5), (2, 6), (3, 7), the first in the low half."""
    zeros = _zeros(codes)
    w0 = _weight(codes, zeros, first, t, c, begin, before, tails, 0, 0)
    w4 = _weight(codes, zeros, first, t, c, begin, before, tails, 4, 1)
    w1 = _weight(codes, zeros, first, t, c, begin, before, tails, 1, 2)
    w5 = _weight(codes, zeros, first, t, c, begin, before, tails, 5, 3)
    w2 = _weight(codes, zeros, second, t, c, begin, before, tails, 2, 0)
    w6 = _weight(codes, zeros, second, t, c, begin, before, tails, 6, 1)
    w3 = _weight(codes, zeros, second, t, c, begin, before, tails, 3, 2)
    w7 = _weight(codes, zeros, second, t, c, begin, before, tails, 7, 3)
    return w0 | (w4 << 16), w1 | (w5 << 16), w2 | (w6 << 16), w3 | (w7 << 16)


@triton.jit
def _halves(words, N: tl.constexpr, M: tl.constexpr):
    """[N, 2M] -> those at even places and those at odd ones."""
    return tl.split(tl.reshape(words, (N, M, 2)))


@triton.jit
def _zeros(codes):
    """Nibbles 1 where the code is 0."""
    return ((codes & ~((codes & NIBBLE_LOWS) + NIBBLE_LOWS) & NIBBLE_TOPS) >> 3) & NIBBLE_ONES


@triton.jit
def _count(codes, ASM: tl.constexpr):
    """How many codes of a word are 0."""
    if ASM:
        return tl.inline_asm_elementwise(COUNT, "=r,r", [codes], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return ((_zeros(codes) * NIBBLE_ONES) >> 28) & 15


@triton.jit
def _t_and_c(scale, flagged, ASM: tl.constexpr):
    """float32 [N], int32 [N] -> int32 [N, 1] each: a BF16's bits in both halves."""
    if ASM:
        t, c = tl.inline_asm_elementwise(
            SCALES, "=r,=r,f,r", [scale, flagged], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
    else:
        t = _rounded(tl.abs(scale * SCALE), False)
        c = tl.where(flagged != 0, NOTHING, tl.maximum(t - BELOW, 0)) * 0x10001
        t *= 0x10001
    return t[:, None], c[:, None]


@triton.jit
def _neighbours(p0, p1, p2, p3):
    """A word's pairs [N, M] -> [N, M, 2, 2], in the order of inputs."""
    return tl.join(tl.join(p0, p1), tl.join(p2, p3))


@triton.jit
def _inputs(pairs):
    """[…] -> int16 […, 2]: low and high half."""
    return tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16))


@triton.jit
def rebuild_group(
    words, first, second, scale, cursor, flagged, tails, N: tl.constexpr, QUADS: tl.constexpr, ASM: tl.constexpr
):
    """words, first, second int32 [N, 16]: codes and both halves of the symbols of one group per row; scale float32 [N];
    cursor int32 [N]: the nibble of `tails` (uint8*, on 4 bytes) at which the row's of this group begin; flagged int32
    [N]: 0 or 1. QUADS: the assembly takes four words at once, else two; threads should hold as many neighbours.

    -> int16 [N, 128], the weights' bits, and the cursor behind this group.
    """
    found = _count(words, ASM)
    t, c = _t_and_c(scale, flagged, ASM)
    total, begin = tl.sum(found, axis=1), cursor[:, None]
    if ASM:
        address = tails.to(tl.int64, bitcast=True)
        even, odd = _halves(words, N, 8)
        first_even, first_odd = _halves(first, N, 8)
        second_even, second_odd = _halves(second, N, 8)
        found_even, found_odd = _halves(found, N, 8)
        found = found_even + found_odd
        if QUADS:
            w0, w2 = _halves(even, N, 4)
            w1, w3 = _halves(odd, N, 4)
            f0, f2 = _halves(first_even, N, 4)
            f1, f3 = _halves(first_odd, N, 4)
            s0, s2 = _halves(second_even, N, 4)
            s1, s3 = _halves(second_odd, N, 4)
            found0, found1 = _halves(found, N, 4)
            found = found0 + found1
            at = begin + tl.cumsum(found, axis=1) - found
            a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3 = tl.inline_asm_elementwise(
                FOUR_WORDS, OF_FOUR, [w0, w1, w2, w3, f0, f1, f2, f3, s0, s1, s2, s3, t, c, begin, at, address],
                dtype=(tl.int32,) * 16, is_pure=False, pack=1,
            )  # fmt: skip
            low = tl.join(_neighbours(a0, a1, a2, a3), _neighbours(c0, c1, c2, c3))
            high = tl.join(_neighbours(b0, b1, b2, b3), _neighbours(d0, d1, d2, d3))
            tile = tl.permute(_inputs(tl.join(low, high)), (0, 1, 4, 5, 2, 3, 6))
        else:
            at = begin + tl.cumsum(found, axis=1) - found
            a0, a1, a2, a3, b0, b1, b2, b3 = tl.inline_asm_elementwise(
                TWO_WORDS, OF_TWO,
                [even, odd, first_even, first_odd, second_even, second_odd, t, c, begin, at, address],
                dtype=(tl.int32,) * 8, is_pure=False, pack=1,
            )  # fmt: skip
            pairs = tl.join(_neighbours(a0, a1, a2, a3), _neighbours(b0, b1, b2, b3))
            tile = tl.permute(_inputs(pairs), (0, 1, 4, 2, 3, 5))
    else:
        before = tl.cumsum(found, axis=1) - found
        t, c = (t << 16).to(tl.float32, bitcast=True), c & 0xFFFF
        p0, p1, p2, p3 = _word(words, first, second, t, c, begin, before, tails)
        tile = _inputs(_neighbours(p0, p1, p2, p3))
    return tl.reshape(tile, (N, 128)), cursor + (total << flagged)


@triton.jit
def prefetch_tails(tails, starts, LIMIT: tl.constexpr, LINES: tl.constexpr, ASM: tl.constexpr):
    """Asks for the first LINES x 128 bytes of each row's tails, so that walking the rows does not wait for memory.

    starts int32 [N]; LIMIT: bytes from `tails` to the end of the entry.
    """
    if ASM:
        at = tails + tl.minimum(starts[:, None] + 128 * tl.arange(0, LINES)[None, :], LIMIT - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64, bitcast=True)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
