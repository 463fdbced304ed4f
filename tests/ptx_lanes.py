"""PTX of the nested kernels' inline assembly in NumPy: integers, pairs of BF16, loads, branches."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

Registers = dict[str, np.ndarray]
Load = Callable[[np.ndarray], np.ndarray]
"""Addresses int64 -> words uint32."""
_ADDRESS = re.compile(r"\[(\w+)(?: \+ (\d+))?\]")


def words_within(memory: np.ndarray) -> Load:
    """Addresses are indices into memory, uint8, and must lie inside."""

    def load(at: np.ndarray) -> np.ndarray:
        assert (at % 4 == 0).all() and at.min() >= 0 and at.max() + 4 <= memory.size, "read outside"
        return memory.view(np.uint32)[at // 4]

    return load


def run(text: str, inputs: Registers, load: Load | None = None) -> Registers:
    """Operands "$0", … after the text, uint32 [lanes]; inputs: those that it reads, of one length."""
    lines = [line.strip() for line in re.sub(r"^\{|\}$", "", text.strip()).replace(":", ";").split(";")]
    lines = [line for line in lines if line and not line.startswith(".reg")]
    lanes = len(next(iter(inputs.values())))
    found = _from(0, lines, {name: np.asarray(value) for name, value in inputs.items()}, lanes, load)
    return {name: value for name, value in found.items() if name.startswith("$")}


def _from(start: int, lines: list[str], registers: Registers, lanes: int, load: Load | None) -> Registers:
    registers = dict(registers)
    at = start
    while at < len(lines):
        line, at = lines[at], at + 1
        if line.isupper() and " " not in line:
            continue  # a label
        if line.startswith("@"):
            guard, _, label = line.split()
            taken = registers[guard[1:]]
            parts = [
                _from(to, lines, {name: value[of] for name, value in registers.items()}, int(of.sum()), load)
                for of, to in ((taken, lines.index(label)), (~taken, at)) if of.any()
            ]  # fmt: skip
            if len(parts) == 1:
                return parts[0]
            return {name: _merged(taken, parts[0][name], parts[1][name]) for name in parts[0] if name in parts[1]}
        name, rest = line.split(None, 1)
        if name == "bra":
            at = lines.index(rest)
            continue
        _step(name, [part.strip() for part in re.split(r",\s*(?![^{]*\})", rest)], registers, lanes, load)
    return registers


def _merged(taken: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    whole = np.empty(taken.shape, a.dtype)
    whole[taken], whole[~taken] = a, b
    return whole


def _step(name: str, operands: list[str], registers: Registers, lanes: int, load: Load | None) -> None:
    target, rest = operands[0], operands[1:]
    if name.startswith("ld.global"):
        assert load is not None
        register, offset = _ADDRESS.fullmatch(rest[0]).groups()  # type: ignore[union-attr]
        registers[target] = load(registers[register].astype(np.int64) + int(offset or 0))
        return
    if name.startswith("prefetch"):
        return
    if name == "mov.b64":
        if target.startswith("{"):
            low, high = target.strip("{}").split(", ")
            value = registers[rest[0]]
            registers[low], registers[high] = (value & 0xFFFFFFFF).astype(np.uint32), (value >> 32).astype(np.uint32)
        else:
            low, high = (registers[part].astype(np.uint64) for part in rest[0].strip("{}").split(", "))
            registers[target] = low | high << np.uint64(32)
        return
    values = [registers[o] if o in registers else _constant(o, lanes) for o in rest]
    registers[target] = OPERATIONS[name](*values)


def _constant(text: str, lanes: int) -> np.ndarray:
    if text.startswith("0f"):
        return np.full(lanes, np.array(int(text[2:], 16), np.uint32).view(np.float32))
    return np.full(lanes, int(text, 0), np.uint32)


def _lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    result = np.zeros_like(a)
    for row in range(8):
        if int(table[0]) >> row & 1:
            result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return result


def _prmt(a: np.ndarray, b: np.ndarray, select: np.ndarray) -> np.ndarray:
    both, result = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32), np.zeros_like(a)
    for byte in range(4):
        nibble = (select >> 4 * byte).astype(np.uint64) & np.uint64(15)
        assert (nibble < 8).all(), "sign replication"
        result |= ((both >> nibble * np.uint64(8)) & np.uint64(255)).astype(np.uint32) << np.uint32(8 * byte)
    return result


def _funnel(low: np.ndarray, high: np.ndarray, amount: np.ndarray) -> np.ndarray:
    both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    return (both >> (amount & 31).astype(np.uint64)).astype(np.uint32)


def _clamped(value: np.ndarray, amount: np.ndarray) -> np.ndarray:
    """Shift right; by the width or more: 0."""
    width = 8 * value.dtype.itemsize
    shifted = value >> np.minimum(amount, width - 1).astype(value.dtype)
    return np.where(amount < width, shifted, 0).astype(value.dtype)


def _pairs(operation: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Of float64 -> of BF16 pairs: both halves exactly, rounded once, ties to even."""

    def packed(*operands: np.ndarray) -> np.ndarray:
        low, high = (
            to_bf16(operation(*(from_bf16(o >> np.uint32(shift) & np.uint32(0xFFFF)) for o in operands)))
            for shift in (0, 16)
        )
        return low | high << np.uint32(16)

    return packed


def to_bf16(value: np.ndarray) -> np.ndarray:
    """float64 of a normal BF16's size, or 0 -> bits, uint32."""
    exponent = np.frexp(value)[1] - 8
    rounded = np.ldexp(np.rint(np.ldexp(value, -exponent)), exponent)  # 8 bits: exact in float32
    assert ((np.abs(rounded) >= 2.0**-126) | (value == 0)).all()
    return rounded.astype(np.float32).view(np.uint32) >> np.uint32(16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """uint32 -> float64."""
    return (bits << np.uint32(16)).view(np.float32).astype(np.float64)


def _signed(value: np.ndarray) -> np.ndarray:
    return value.view(np.int32)


OPERATIONS: dict[str, Callable[..., np.ndarray]] = {
    "mov.b32": lambda a: a,
    "add.u32": lambda a, b: a + b,
    "sub.u32": lambda a, b: a - b,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "max.u32": np.maximum,
    "mul.lo.u32": lambda a, b: a * b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "mad.wide.u32": lambda a, b, c: a.astype(np.uint64) * b + c.astype(np.uint64),
    "shl.b32": lambda a, b: np.where(b < 32, a << (b & 31), 0).astype(np.uint32),
    "shr.u32": _clamped,
    "shr.u64": _clamped,
    "shr.s32": lambda a, b: (_signed(a) >> np.minimum(b, 31).astype(np.int32)).view(np.uint32),
    "shf.r.wrap.b32": _funnel,
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "selp.b32": lambda a, b, p: np.where(p, a, b),
    "setp.lt.s32": lambda a, b: _signed(a) < _signed(b),
    "setp.ne.u32": lambda a, b: a != b,
    "setp.gt.or.u32": lambda a, b, p: (a > b) | p,
    "mul.rn.f32": lambda a, b: a.view(np.float32) * b.view(np.float32),
    "abs.f32": np.abs,
    "cvt.rn.bf16x2.f32": lambda a, b: to_bf16(a.astype(float)) << np.uint32(16) | to_bf16(b.astype(float)),
    "add.rn.bf16x2": _pairs(lambda a, b: a + b),
    "fma.rn.bf16x2": _pairs(lambda a, b, c: a * b + c),
}
