# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""What both kernels share: INT4 codes reach the tensor cores from the registers of the thread that loaded them.

The kernels are written thread by thread: tensors are [THREADS], element i lives in thread i. Of a block (blocks.py) a
thread (row r = lane / 4, quarter q = lane % 4 of its warp) loads the codes of inputs 32q … 32q + 31 of rows r and
r + 8. That is its part of the A operand of mma.m16n8k16 once the codes are 16-bit floats: OR-ing a nibble into the
mantissa of 128 (bfloat16) gives 128 + n exactly, two nibbles by one AND-OR; into that of 1024 (float16) 1024 + n, or
1024 + 16n four bits further up, which saves shifts. The B operand is the group's activations, 64 contiguous bytes per
thread, the same in every column: so all eight columns hold the result, and no thread asks another for it. The constant
part is taken out once per group: sum (n - 8) x = sum (128 + n) x - sum 136 x, the last from the tensor cores too
(activations as A, constants as B). Accumulation is FP32 throughout.

MMA false: the same sums in plain arithmetic, for Triton's interpreter, which runs no inline assembly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs

MMA = not knobs.runtime.interpret
_BITS = {torch.bfloat16: (0x43004300, 0x43084308, 0x43084308), torch.float16: (0x64006400, 0x64086408, 0x54805480)}


def constant_bits(dtype: torch.dtype) -> tuple[int, int, int]:
    """Twice each: the offset (128 or 1024), and what it adds too much per unit of activation, zero point included: 136;
    1032 and (1024 + 16 * 8) / 16 = 72. Kernel arguments: LOP3 takes one immediate, and that is the mask.
    """
    assert dtype in _BITS or not MMA, f"{dtype} activations, the kernels take float16 and bfloat16"
    return _BITS.get(dtype, (0, 0, 0))


def _mma(c: str, a: tuple[str, ...], b: tuple[str, str], dtype: str) -> str:
    sums = ", ".join(f"{c}{i}" for i in range(4))
    operands = f"{{{sums}}}, {{{', '.join(a)}}}, {{{', '.join(b)}}}, {{{sums}}}"
    return f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 {operands};"


def _clear(c: str) -> str:
    return f".reg .f32 {c}<4>; " + " ".join(f"mov.f32 {c}{i}, 0f00000000;" for i in range(4))


_AND_OR = "lop3.b32 {}, {}, {}, $26, 0xEA;"


def _product_bf16() -> str:
    """$0, $1: both rows' sums; $2 … $5 and $6 … $9: their words; $10 … $25: activations; $26: offset bits."""
    lines = ["{ .reg .b32 t, a<4>;", _clear("c")]
    for word in range(4):
        for half in range(2):
            for register in range(4):  # a0, a1: inputs k of both rows; a2, a3: inputs k + 8
                source = f"${(2, 6)[register % 2] + word}"
                shift = 4 * half + 8 * (register // 2)
                if shift:
                    lines.append(f"shr.u32 t, {source}, {shift};")
                lines.append(_AND_OR.format(f"a{register}", "t" if shift else source, "0x000f000f"))
            first = 10 + 4 * word + 2 * half
            lines.append(_mma("c", ("a0", "a1", "a2", "a3"), (f"${first}", f"${first + 1}"), "bf16"))
    return " ".join([*lines, "mov.f32 $0, c0; mov.f32 $1, c2; }"])


def _product_fp16() -> str:
    """As _product_bf16; c sums the nibbles in place, d those four bits further up."""
    lines = ["{ .reg .b32 t, u, a<4>;", _clear("c"), _clear("d")]
    for word in range(4):
        low, high = f"${2 + word}", f"${6 + word}"
        lines.append(f"shr.u32 t, {low}, 8; shr.u32 u, {high}, 8;")
        for c, mask, first in (("c", "0x000f000f", 10), ("d", "0x00f000f0", 12)):
            lines += [_AND_OR.format(f"a{i}", source, mask) for i, source in enumerate((low, high, "t", "u"))]
            b = first + 4 * word
            lines.append(_mma(c, ("a0", "a1", "a2", "a3"), (f"${b}", f"${b + 1}"), "f16"))
    return " ".join([*lines, "fma.rn.f32 $0, d0, 0f3D800000, c0; fma.rn.f32 $1, d2, 0f3D800000, c2; }"])


def _excess(dtype: str) -> str:
    """$0: what the offset adds too much over a group; $1 … $16: activations; $17, $18: constants."""
    lines = ["{", _clear("c")]
    for first in range(1, 17, 4):
        lines.append(_mma("c", tuple(f"${first + i}" for i in range(4)), ("$17", "$18"), dtype))
    return " ".join([*lines, "add.f32 $0, c0, c2; }"])


ASSEMBLY = {torch.bfloat16: (_product_bf16(), _excess("bf16")), torch.float16: (_product_fp16(), _excess("f16"))}
_PRODUCT_BF16, _EXCESS_BF16 = (tl.constexpr(text) for text in ASSEMBLY[torch.bfloat16])
_PRODUCT_FP16, _EXCESS_FP16 = (tl.constexpr(text) for text in ASSEMBLY[torch.float16])
_PRODUCT_OPERANDS = tl.constexpr("=f,=f" + ",r" * 25)
_EXCESS_OPERANDS = tl.constexpr("=f" + ",r" * 18)
_LOAD_FOUR = tl.constexpr("ld.global.v4.b32 {$0, $1, $2, $3}, [$4];")
_LOAD = "ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {{{}}}, [$8+{}];"
_LOW, _HIGH = _LOAD.format("$0, $1, $2, $3", 0), _LOAD.format("$4, $5, $6, $7", 512)
_LOAD_BLOCK = tl.constexpr(f"{_LOW} {_HIGH}")
_LOAD_BLOCK_IF = tl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $9, 0; "
    + " ".join(f"mov.b32 ${i}, 0;" for i in range(8))
    + f" @p {_LOW} @p {_HIGH} }}"
)


@triton.jit
def load_block(at, active, ALL: tl.constexpr, MMA: tl.constexpr):
    """A block's words for each thread, whose address in it is `at`: four of row r, four of row r + 8. Zeros where not
    active; ALL: every thread is.
    """
    if not MMA:
        words = at[:, None] + tl.arange(0, 4)[None, :]  # [THREADS, 4]
        mask = active[:, None]
        return tl.load(words, mask=mask, other=0), tl.load(words + 128, mask=mask, other=0)
    elif ALL:
        return tl.inline_asm_elementwise(
            _LOAD_BLOCK, "=r,=r,=r,=r,=r,=r,=r,=r,l", [at],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            _LOAD_BLOCK_IF, "=r,=r,=r,=r,=r,=r,=r,=r,l,r", [at, active.to(tl.int32)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def scale_pair(at):
    """The scales of rows r and r + 8, as float32."""
    both = tl.load(at.to(tl.pointer_type(tl.int32)))
    low = both.to(tl.int16).to(tl.float16, bitcast=True)
    high = (both >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _load_four(at):
    return tl.inline_asm_elementwise(
        _LOAD_FOUR, "=r,=r,=r,=r,l", [at], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1
    )


@triton.jit
def load_activations(at, MMA: tl.constexpr):
    """Each thread's 32 activations, two to a register."""
    if not MMA:
        inputs = tl.arange(0, 4)[:, None] * 8 + tl.arange(0, 8)[None, :]
        return (tl.load(at[:, None, None] + inputs[None, :, :]).to(tl.float32),)  # [THREADS, 4, 8]
    else:
        at = at.to(tl.pointer_type(tl.int32))
        return _load_four(at) + _load_four(at + 4) + _load_four(at + 8) + _load_four(at + 12)


@triton.jit
def _plain_product(words, x):
    """[THREADS, 4] words, [THREADS, 4, 8] activations -> sum (n - 8) x over each quad of threads, in all four."""
    i = tl.arange(0, 8)
    shift = i // 4 * 4 + i // 2 % 2 * 8 + i % 2 * 16
    codes = ((words[:, :, None] >> shift[None, None, :]) & 15).to(tl.float32) - 8.0
    part = tl.sum(tl.sum(codes * x, axis=2), axis=1)
    quads = tl.reshape(part, (part.shape[0] // 4, 4))
    return tl.reshape(tl.broadcast_to(tl.sum(quads, axis=1)[:, None], quads.shape), part.shape)


@triton.jit
def block_product(w, x, offset_bits, BF16: tl.constexpr, MMA: tl.constexpr):
    """Sums (offset + n) x over a block's group, of rows r and r + 8; MMA false: (n - 8) x."""
    if not MMA:
        return _plain_product(w[0], x[0]), _plain_product(w[1], x[0])
    elif BF16:
        return tl.inline_asm_elementwise(
            _PRODUCT_BF16, _PRODUCT_OPERANDS,
            [w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7],
             x[8], x[9], x[10], x[11], x[12], x[13], x[14], x[15], offset_bits],
            dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            _PRODUCT_FP16, _PRODUCT_OPERANDS,
            [w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7],
             x[8], x[9], x[10], x[11], x[12], x[13], x[14], x[15], offset_bits],
            dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def excess(x, one_bits, other_bits, BF16: tl.constexpr, MMA: tl.constexpr):
    """What `block_product` adds too much."""
    if not MMA:
        return 0.0
    elif BF16:
        return tl.inline_asm_elementwise(
            _EXCESS_BF16, _EXCESS_OPERANDS,
            [x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9], x[10], x[11], x[12], x[13], x[14], x[15],
             one_bits, other_bits],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            _EXCESS_FP16, _EXCESS_OPERANDS,
            [x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9], x[10], x[11], x[12], x[13], x[14], x[15],
             one_bits, other_bits],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def over_splits(a, b, BANDS: tl.constexpr, SPLIT: tl.constexpr):
    """[THREADS] parts of two kinds -> [32 * BANDS] each: thread t of a band sums those of its band's SPLIT warps."""
    if SPLIT == 1:
        return a, b
    else:
        both = tl.sum(tl.reshape(tl.join(a, b), (BANDS, SPLIT, 32, 2)), axis=1)
        return tl.split(tl.reshape(both, (BANDS * 32, 2)))
