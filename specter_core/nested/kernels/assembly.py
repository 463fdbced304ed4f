"""The inline assembly (PTX) of rebuild.py: eight weights per word of codes, two or four words of a row at once.

In short: read 64 bits of the row's tails, from the nibble on at which the first word's begin; shift each word's to
the front; spread eight nibbles to bytes, the sign on top; put them where they belong, by selectors that are the number
of zeros before a code, or 7, where a nought is put unless all eight codes are 0. Then 128 + code + 8 as BF16 pairs,
less 136, times t, plus c; symbols and tails interleaved; sum.

Where the group is flagged (c is -0) or four words have more than 16 tails, a branch that is seldom taken reads the
tails word by word, from the nibble on at which they begin: nibbles or bytes.
"""

from __future__ import annotations

import struct

from specter_core.nested.code import BASE, BELOW, NOTHING

_REGISTERS = """
.reg .pred wide, rare;
.reg .b64 a, v;
.reg .b32 i, x, y, b0, b1, b2, p0, p1, less, unit, before;
mov.b32 less, 0xc308c308;
"""

_ZEROS = """
and.b32 x, {codes}, 0x77777777;
add.u32 x, x, 0x77777777;
lop3.b32 x, {codes}, x, 0x88888888, 0x20;
shr.u32 zeros{b}, x, 3;
mul.lo.u32 through{b}, zeros{b}, 0x11111111;
"""
"""Nibbles 1 where the code is 0, and those added up from nibble 0 on."""

_FETCH = """
mad.wide.u32 a, i, 4, {tails};
ld.global.nc.b32 b0, [a];
ld.global.nc.b32 b1, [a + 4];
ld.global.nc.b32 b2, [a + 8];
shf.r.wrap.b32 b0, b0, b1, x;
shf.r.wrap.b32 b1, b1, b2, x;
"""
"""64 bits from bit x of word i on -> b0, b1."""

_SPREAD = """
shl.b32 x, {word}, 4;
lop3.b32 x, {word}, x, 0x07070707, 0xe4;
shr.u32 y, {word}, 4;
lop3.b32 y, y, {word}, 0x07070707, 0xe4;
prmt.b32 p0, x, y, 0x5140;
prmt.b32 p1, x, y, 0x7362;
and.b32 p0, p0, 0x87878787;
and.b32 p1, p1, 0x87878787;
"""
"""Eight nibbles -> bytes p0, p1."""

_PLACE = """
shr.s32 x, {through}, 31;
lop3.b32 p1, p1, x, 0x00ffffff, 0xe0;
mad.lo.u32 x, {zeros}, 0xfffffff9, 0x77777777;
shl.b32 y, {through}, 4;
or.b32 x, x, y;
prmt.b32 y, p0, p1, x;
shr.u32 x, x, 16;
prmt.b32 x, p0, p1, x;
prmt.b32 p0, y, x, 0x5140;
prmt.b32 p1, y, x, 0x7362;
"""
"""Tails in their order -> those of codes 0, 4, 1, 5 and of 2, 6, 3, 7."""

_PAIR = """
shr.u32 x, {codes}, {bit};
lop3.b32 x, x, 0x000f000f, 0x43004300, 0xea;
add.rn.bf16x2 x, x, less;
fma.rn.bf16x2 x, x, {t}, {c};
prmt.b32 y, {symbols}, {tails}, {bytes};
add.u32 {out}, x, y;
"""


COUNT = """{
.reg .b32 x, zeros, through;
ZEROS
shr.u32 $0, through, 28;
}""".replace("ZEROS", _ZEROS.format(b="", codes="$1"))
"""A word of codes -> how many are 0."""

SCALES = """{{
.reg .pred flagged;
.reg .f32 f;
.reg .b32 x;
mul.rn.f32 f, $2, {base};
abs.f32 f, f;
cvt.rn.bf16x2.f32 $0, f, f;
max.u32 x, $0, {below};
sub.u32 x, x, {below};
setp.ne.u32 flagged, $3, 0;
selp.b32 $1, {nothing}, x, flagged;
}}""".format(base=f"0f{struct.pack('>f', BASE).hex()}", below=BELOW * 0x10001, nothing=NOTHING * 0x10001)
"""Scale (float32) and flag -> pairs of t and of c."""


def assembly(count: int) -> str:
    """Operands: outputs, 4 per word: pairs of codes (0, 4), (1, 5), (2, 6), (3, 7), the first in the low half; then of
    all words codes, symbols of pairs 0 and 1, of pairs 2 and 3; pairs of t and of c; the nibbles at which the tails of
    the group and, were it not flagged, of the first word begin; address of the tails."""
    c, begin, at, tails = (f"${7 * count + i}" for i in (1, 2, 3, 4))
    text = _REGISTERS
    for b in range(count):
        text += f".reg .b32 n{b + 1}, zeros{b}, through{b};\n" + _ZEROS.format(b=b, codes=f"${4 * count + b}")
        text += f"shr.u32 n{b + 1}, through{b}, 28;\n" + (f"add.u32 n{b + 1}, n{b + 1}, n{b};\n" if b else "")
    text += f"setp.lt.s32 wide, {c}, 0;\nsetp.gt.or.u32 rare, n{count}, 16, wide;\n@rare bra RARE;\n"
    text += f"shr.u32 i, {at}, 3;\nshl.b32 x, {at}, 2;\n" + _FETCH.format(tails=tails) + "mov.b64 v, {b0, b1};\n"
    for b in range(count):
        if b:
            text += f"shl.b32 x, n{b}, 2;\nshr.u64 a, v, x;\nmov.b64 {{b0, i}}, a;\n"
        text += _SPREAD.format(word="b0") + _weights(b, count)
    text += f"bra DONE;\nRARE:\nselp.b32 unit, 1, 0, wide;\nsub.u32 before, {at}, {begin};\n"
    for b in range(count):
        text += f"add.u32 x, before, {f'n{b}' if b else 0};\nshl.b32 x, x, unit;\nadd.u32 x, x, {begin};\n"
        text += "shr.u32 i, x, 3;\nshl.b32 x, x, 2;\n"
        text += _FETCH.format(tails=tails) + _SPREAD.format(word="b0")
        text += "selp.b32 p0, b0, p0, wide;\nselp.b32 p1, b1, p1, wide;\n" + _weights(b, count)
    return "{" + text.replace("\n\n", "\n") + "DONE:\n}"


def constraints(count: int) -> str:
    """Of the operands that `assembly` names."""
    return ",".join(["=r"] * (4 * count) + ["r"] * (3 * count + 4) + ["l"])


def _weights(b: int, count: int) -> str:
    """Word b's outputs from its tails, one per byte, in p0 and p1."""
    codes, first, second = (f"${count * kind + b}" for kind in range(4, 7))
    text = _PLACE.format(zeros=f"zeros{b}", through=f"through{b}")
    for pair in range(4):
        text += _PAIR.format(
            codes=codes, bit=4 * pair, t=f"${7 * count}", c=f"${7 * count + 1}", out=f"${4 * b + pair}",
            symbols=(first, second)[pair // 2], tails=f"p{pair // 2}", bytes=("0x5140", "0x7362")[pair % 2],
        )  # fmt: skip
    return text
