"""As much of a warp as the INT4 kernels' inline assembly needs, in NumPy: registers of 32 lanes, mma.m16n8k16."""

from __future__ import annotations

import re

import numpy as np

LANE = np.arange(32)
ROW, QUAD = LANE // 4, LANE % 4


def run(text: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All registers after the text; inputs: operand ($2, …) -> uint32 [32]. Floats are kept as float64."""
    registers: dict[str, np.ndarray] = dict(inputs)
    for line in text.strip("{} ").split(";"):
        words = line.split(None, 1)
        if not words or words[0].startswith("."):
            continue
        name, operands = words[0], re.findall(r"\{[^}]*\}|[^,{}\s]+", words[1])
        if name.startswith("mma."):
            d, a, b, c = ([register.strip() for register in group.strip("{}").split(",")] for group in operands)
            kind = "bf16" if ".bf16." in name else "f16"
            results = _mma(*([registers[r] for r in part] for part in (a, b, c)), kind)
            registers.update(zip(d, results, strict=True))
            continue
        values = [registers[o] if o in registers else _constant(o) for o in operands[1:]]
        registers[operands[0]] = _step(name, values)
    return registers


def _constant(text: str) -> np.ndarray:
    if text.startswith("0f"):
        return np.full(32, np.array([int(text[2:], 16)], np.uint32).view(np.float32)[0], np.float64)
    return np.full(32, int(text, 0), np.uint32)


def _step(name: str, values: list[np.ndarray]) -> np.ndarray:
    if name == "shr.u32":
        return values[0] >> values[1]
    if name == "lop3.b32":
        assert int(values[3][0]) == 0xEA, "(a & b) | c"
        return (values[0] & values[1]) | values[2]
    if name == "mov.f32":
        return values[0]
    if name == "add.f32":
        return values[0] + values[1]
    assert name == "fma.rn.f32", name
    return values[0] * values[1] + values[2]


def _halves(register: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """The low and the high 16-bit float of each lane."""
    low, high = register & 0xFFFF, register >> 16
    if kind == "bf16":
        return tuple((half << 16).astype(np.uint32).view(np.float32).astype(np.float64) for half in (low, high))
    return tuple(half.astype(np.uint16).view(np.float16).astype(np.float64) for half in (low, high))


def _mma(a: list[np.ndarray], b: list[np.ndarray], c: list[np.ndarray], kind: str) -> list[np.ndarray]:
    """D = A B + C with the lanes' places of the PTX manual."""
    whole_a, whole_b = np.zeros((16, 16)), np.zeros((16, 8))
    for number, register in enumerate(a):
        for half, value in enumerate(_halves(register, kind)):
            whole_a[ROW + 8 * (number % 2), 2 * QUAD + half + 8 * (number // 2)] = value
    for number, register in enumerate(b):
        for half, value in enumerate(_halves(register, kind)):
            whole_b[2 * QUAD + half + 8 * number, ROW] = value
    product = whole_a @ whole_b
    places = [(ROW, 2 * QUAD), (ROW, 2 * QUAD + 1), (ROW + 8, 2 * QUAD), (ROW + 8, 2 * QUAD + 1)]
    return [product[place] + old for place, old in zip(places, c, strict=True)]
