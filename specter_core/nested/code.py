"""The code of one matrix: BF16 weight = resident INT4 code and scale + 8 bits, + 8 more where the code is 0.

With q the INT4 code (-8 … 7), s its group's scale and w the weight's 16 bits read as an integer:

    q != 0    w = bits of bfloat16(q · t) + symbol                       t = bfloat16(|7/16 · s|)
    q == 0    w = symbol + 256 · tail

A weight that rounds to q lies between |q|·s/2 (for |q| = 1) and 3/2·|q|·s in size: at most 237 BF16 numbers up from
7/16·|q|·s, whatever the scale, and the roundings move that by 2. What rounds to 0 has no such neighbourhood, so it is
stored as it is, and so is any pattern that no code reaches: `sanitised` moves the code of such a weight (GPTQ's error
feedback makes them, 1 to 2 %) to the nearest that does, in the last resort to 0. Signs, infinities, NaNs and -0 need no
case: w is only ever added to and compared as an integer.

Tails are listed by row, group and, within a group, in `TAIL_ORDER`. Symbols are stored so that 32-bit words of four
meet the 32-bit words of eight codes in the draft kernels' layout (draft/kernels/layout.py: nibble j of word n is input
16j + n): word n of a group's first half holds the symbols of nibbles 0 … 3 of code word n, of its second half those of
nibbles 4 … 7 (`STORED_ORDER`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specter_core.draft.int4 import GROUP

BASE = 7 / 16
"""Bases are about BASE · s · q."""

_WORDS = GROUP // 8
STORED_ORDER = tuple(16 * j + n for half in (range(4), range(4, 8)) for n in range(_WORDS) for j in half)
"""Position in a stored group -> input within the group."""
TAIL_ORDER = tuple(16 * j + n for n in range(_WORDS) for j in range(8))
"""Order in which a group's tails are listed, as inputs within the group."""


class CodedMatrix(NamedTuple):
    """symbols uint8 [rows, K] in stored order; tails uint8 [n]; starts int32 [rows]: where a row's tails begin."""

    symbols: Tensor
    tails: Tensor
    starts: Tensor


def sanitised(weight: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """codes int8 [rows, K] with those replaced that cannot be told from `weight`: by the nearest code, else by 0.

    weight bfloat16 [rows, K]; scales float16 [rows, K/128]. Where codes round to nearest, nothing changes.
    """
    bits, groups = _bits(weight), _grouped(codes)
    reached = _reached(bits, groups, scales)
    if bool(reached.all()):
        return codes
    s = scales.to(torch.float32).unsqueeze(-1)
    nearest = torch.nan_to_num(_grouped(weight).to(torch.float32) / s, nan=0.0).round_().clamp_(-8, 7).to(torch.int8)
    nearest = torch.where(_reached(bits, nearest, scales), nearest, 0)
    return torch.where(reached, groups, nearest).flatten(1)


def code_matrix(weight: Tensor, codes: Tensor, scales: Tensor) -> CodedMatrix:
    """weight bfloat16 [rows, K], codes int8 [rows, K] from `sanitised`, scales float16 [rows, K/128], on one device."""
    bits, groups = _bits(weight), _grouped(codes)
    symbol = bits - _bases(groups, scales)
    zero = groups == 0
    assert bool(((symbol >> 8 == 0) | zero).all()), "codes do not reach their weights: sanitise them first"
    order = _order(TAIL_ORDER, weight.device)
    tails = (bits >> 8)[..., order][zero[..., order]]
    per_row = zero.flatten(1).sum(1)
    stored = (symbol & 0xFF).to(torch.uint8)[..., _order(STORED_ORDER, weight.device)]
    return CodedMatrix(stored.flatten(1), tails.to(torch.uint8), (per_row.cumsum(0) - per_row).to(torch.int32))


def decode_matrix(symbols: Tensor, tails: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """The inverse of `code_matrix`: bfloat16 [rows, K]. tails uint8 begins with the first row's; it may go on."""
    groups = _grouped(codes)
    symbol = torch.empty(groups.shape, dtype=torch.int32, device=codes.device)
    symbol[..., _order(STORED_ORDER, codes.device)] = _grouped(symbols).to(torch.int32)
    w = _bases(groups, scales) + symbol
    order = _order(TAIL_ORDER, codes.device)
    listed, zero = w[..., order], (groups == 0)[..., order]
    listed[zero] += tails[: int(zero.sum())].to(torch.int32) << 8
    w[..., order] = listed
    return torch.where(w >= 0x8000, w - 0x10000, w).to(torch.int16).view(torch.bfloat16).flatten(1)


def _reached(bits: Tensor, groups: Tensor, scales: Tensor) -> Tensor:
    symbol = bits - _bases(groups, scales)
    return (groups == 0) | (symbol >> 8 == 0)


def _bases(groups: Tensor, scales: Tensor) -> Tensor:
    """int32 [rows, G, 128]: what symbols are added to, 0 where the code is 0. Products are rounded once, to BF16."""
    assert bool(scales.isfinite().all()), "scales must be finite"
    t = (scales.to(torch.float32) * BASE).abs().to(torch.bfloat16).to(torch.float32).unsqueeze(-1)
    product = (groups.to(torch.float32) * t).to(torch.bfloat16)
    return product.view(torch.int16).to(torch.int32) & 0xFFFF


def _bits(weight: Tensor) -> Tensor:
    """bfloat16 [rows, K] -> int32 [rows, G, 128], 0 … 65535."""
    assert weight.dtype == torch.bfloat16, weight.dtype
    return _grouped(weight.contiguous().view(torch.int16)).to(torch.int32) & 0xFFFF


def _grouped(t: Tensor) -> Tensor:
    return t.unflatten(-1, (-1, GROUP))


def _order(order: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(order, device=device)
