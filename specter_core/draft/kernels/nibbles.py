# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""What both GEMV kernels share: the weights of a word as floats without an integer conversion.

OR-ing a nibble into the mantissa of 256.0 at bit 15 gives 256 + n exactly, into that of 16.0 at bit 19
gives 16 + n. Four shifts place two nibbles each; one AND-OR and one FMA per weight remain. The two exponents
are kernel arguments, not constants: LOP3 takes one immediate, and with two ptxas splits every AND-OR.
The constant part is taken out once per step: with offset o and zero point 8,
sum (n - 8) x = sum (o + n) x - sum (o + 8) x.
"""

from __future__ import annotations

import triton
import triton.language as tl

BITS_256 = 0x43800000
BITS_16 = 0x41800000


@triton.jit
def nibble_plus_offset(words, bits_256, bits_16, j: tl.constexpr):
    """words int32 of any shape -> float32: nibble j + 256 for even j, nibble j + 16 for odd j."""
    if j < 2:
        shifted = words << 15
    elif j < 4:
        shifted = words << 7
    elif j < 6:
        shifted = words >> 1
    else:
        shifted = words >> 9
    if j % 2 == 0:
        bits = (shifted & 0x00078000) | bits_256
    else:
        bits = (shifted & 0x00780000) | bits_16
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def offset_part(x, j: tl.constexpr):
    """(offset + 8) x, what `nibble_plus_offset` adds to nibble j's product too much."""
    if j % 2 == 0:
        return x * 264.0
    else:
        return x * 24.0
