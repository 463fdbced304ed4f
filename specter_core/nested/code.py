"""The code of one matrix: BF16 weight = resident INT4 code and scale + 8 bits, + 4 more where the code is 0.

With q the INT4 code (-8 … 7), s its group's scale and w the weight's 16 bits read as an integer:

    w = bits of bfloat16(q · t + c) + symbol + (q == 0 ? 256 · tail : 0)        t = bfloat16(|7/16 · s|)

q != 0: a weight that rounds to q lies between |q|·s/2 (for |q| = 1) and 3/2·|q|·s in size: at most 237 BF16 numbers up
from 7/16·|q|·s, whatever the scale, and the roundings move that by 2. c is so much smaller than t that it decides ties
only: they go up.

q == 0: the sum is c, `BELOW` BF16 numbers under t. The tail's top bit is the weight's sign; its other three and the
symbol count BF16 numbers up from c, 2048 of them: 16 octaves, which end just under 2t = 7/8·s, above what rounds to 0.
Such a tail is four bits, a nibble.

What no code reaches (zeros, infinities, NaNs, and of Gaussian weights five in a million) takes code 0 and flags its
group: there tails are bytes, two nibbles, and c is -0, which adds nothing, so that symbol and tail are the weight
itself. `sanitised` moves the code of a weight that only another code reaches (GPTQ's error feedback makes them, 1 to
2 %) to the nearest that does. Signs need no case: w is only ever added to and compared as an integer, and no sum
carries out of 16 bits.

Tails are listed by row, group and code as the draft kernels' layout has them (draft/kernels/blocks.py: nibble j of
word n is input 8n + (0, 4, 2, 6, 1, 5, 3, 7)[j]; `TAIL_ORDER`), a row from a whole byte on. Symbols are stored so that
32-bit words of four meet a word's pairs of neighbouring inputs: of a group's first half word n holds those of the pairs
of nibbles (0, 4) and (1, 5) of code word n, the second half those of (2, 6) and (3, 7) (`STORED_ORDER`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specter_core.draft.int4 import GROUP
from specter_core.draft.kernels.blocks import INPUT_OF_NIBBLE

BASE = 7 / 16
"""Bases are about BASE · s · q."""
BELOW = 2048 - 128
"""BF16 numbers between t and c."""
NOTHING = 0x8000
"""c of flagged groups: -0, the number whose sum with any other, zeros included, is that other."""

_WORDS = GROUP // 8
STORED_ORDER = tuple(8 * n + i for half in ((0, 1, 4, 5), (2, 3, 6, 7)) for n in range(_WORDS) for i in half)
"""Position in a stored group -> input within the group."""
TAIL_ORDER = tuple(8 * n + i for n in range(_WORDS) for i in INPUT_OF_NIBBLE)
"""Order in which a group's tails are listed, as inputs within the group."""


class CodedMatrix(NamedTuple):
    """symbols uint8 [rows, K] in stored order; tails uint8 [n], two nibbles per byte, the first one low; starts int32
    [rows]: the byte at which a row's tails begin; flags int32 [rows]: bit i is that of groups i · span … (`flag_span`).
    """

    symbols: Tensor
    tails: Tensor
    starts: Tensor
    flags: Tensor


def flag_span(groups: int) -> int:
    """Neighbouring groups of a row, of so many, that share one of its 32 flags."""
    return -(-groups // 32)


def sanitised(weight: Tensor, codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """codes int8 [rows, K] with those replaced that cannot be told from `weight`: by the nearest code, else by 0; and
    the flags, bool [rows, K/128].

    weight bfloat16 [rows, K]; scales float16 [rows, K/128]. Where codes round to nearest, none is replaced.
    """
    bits, groups = _bits(weight), _grouped(codes)
    flags = torch.zeros_like(scales, dtype=torch.bool)
    reached = _reached(bits, groups, scales, flags)
    rows = (~reached).flatten(1).any(1).nonzero()[:, 0]
    if rows.numel() == 0:
        return codes, flags
    found = groups.clone()
    found[rows] = _moved(weight[rows], bits[rows], groups[rows], scales[rows], reached[rows], flags[rows])
    flags[rows] = _shared(~_reached(bits[rows], found[rows], scales[rows], flags[rows]).all(2))
    rows = flags.any(1).nonzero()[:, 0]
    if rows.numel():
        some = bits[rows], groups[rows], scales[rows]
        again = _moved(weight[rows], *some, _reached(*some, flags[rows]), flags[rows])
        found[rows] = torch.where(flags[rows].unsqueeze(-1), again, found[rows])
    return found.flatten(1), flags


def _moved(weight: Tensor, bits: Tensor, groups: Tensor, scales: Tensor, reached: Tensor, flags: Tensor) -> Tensor:
    s = scales.to(torch.float32).unsqueeze(-1)
    nearest = torch.nan_to_num(_grouped(weight).to(torch.float32) / s, nan=0.0).round_().clamp_(-8, 7).to(torch.int8)
    return torch.where(reached, groups, torch.where(_reached(bits, nearest, scales, flags), nearest, 0))


def code_matrix(weight: Tensor, codes: Tensor, scales: Tensor) -> CodedMatrix:
    """weight bfloat16 [rows, K], codes int8 [rows, K] from `sanitised`, scales float16 [rows, K/128], on one device."""
    bits, groups = _bits(weight), _grouped(codes)
    flags = torch.zeros_like(scales, dtype=torch.bool)
    zero, symbol = groups == 0, bits - _bases(groups, scales, flags)
    flags = _shared(~_fits(symbol, zero, flags).all(2))
    rows = flags.any(1).nonzero()[:, 0]
    symbol[rows] = bits[rows] - _bases(groups[rows], scales[rows], flags[rows])
    reached = _fits(symbol[rows], zero[rows], flags[rows])
    assert bool(reached.all()), "codes do not reach their weights: sanitise them first"
    order = _order(TAIL_ORDER, weight.device)
    listed = zero[..., order]
    sizes = tail_bytes(groups, flags)
    starts = sizes.cumsum(0) - sizes
    at, wide = _places(listed, starts, flags)
    tails = torch.zeros(int(sizes.sum()), dtype=torch.int32, device=weight.device)

    def write(nibbles: Tensor, at: Tensor) -> None:
        tails.index_add_(0, at >> 1, nibbles << 4 * (at & 1).to(torch.int32))

    upper = symbol[..., order][listed] >> 8
    write(torch.where(wide, upper & 15, (upper & 7) | (upper >> 4 & 8)), at)
    write(upper[wide] >> 4 & 15, at[wide] + 1)
    stored = (symbol & 0xFF).to(torch.uint8)[..., _order(STORED_ORDER, weight.device)]
    return CodedMatrix(stored.flatten(1), tails.to(torch.uint8), starts.to(torch.int32), _flag_words(flags))


def decode_matrix(coded: CodedMatrix, codes: Tensor, scales: Tensor) -> Tensor:
    """The inverse of `code_matrix`: bfloat16 [rows, K]. Starts count from the first of the tails, which may go on."""
    groups = _grouped(codes)
    bit = torch.arange(groups.shape[1], device=codes.device) // flag_span(groups.shape[1])
    flags = (coded.flags[:, None] >> bit.to(torch.int32) & 1) != 0
    symbol = torch.empty(groups.shape, dtype=torch.int32, device=codes.device)
    symbol[..., _order(STORED_ORDER, codes.device)] = _grouped(coded.symbols).to(torch.int32)
    w = _bases(groups, scales, flags) + symbol
    order = _order(TAIL_ORDER, codes.device)
    added, listed = w[..., order], (groups == 0)[..., order]
    at, wide = _places(listed, coded.starts.to(torch.int64), flags)

    def read(at: Tensor) -> Tensor:
        return coded.tails[at >> 1].to(torch.int32) >> 4 * (at & 1).to(torch.int32) & 15

    tails = read(at)
    tails = torch.where(wide, tails, (tails & 7) | (tails & 8) << 4)
    tails[wide] |= read(at[wide] + 1) << 4
    added[listed] += tails << 8
    w[..., order] = added
    return torch.where(w >= 0x8000, w - 0x10000, w).to(torch.int16).view(torch.bfloat16).flatten(1)


def tail_bytes(codes: Tensor, flags: Tensor) -> Tensor:
    """int64 [rows]. codes int8 with the rows' inputs in any shape behind them; flags bool [rows, K/128]."""
    zeros = (codes.view(*flags.shape, GROUP) == 0).sum(2)
    return ((zeros * (1 + flags.to(torch.int64))).sum(1) + 1) // 2


def _flag_words(flags: Tensor) -> Tensor:
    """int32 [rows]: one bit for every `flag_span` groups."""
    span = flag_span(flags.shape[1])
    bit = torch.arange(0, flags.shape[1], span, device=flags.device) // span
    words = (flags[:, ::span].to(torch.int64) << bit).sum(1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _places(listed: Tensor, starts: Tensor, flags: Tensor) -> tuple[Tensor, Tensor]:
    """Of every tail: its nibble, int64, and whether it has two. listed bool [rows, G, 128]: codes 0 in tail order."""
    wide = flags.unsqueeze(-1).expand_as(listed)
    sizes = (listed.to(torch.int32) * (1 + wide.to(torch.int32))).flatten(1)
    before = sizes.cumsum(1, dtype=torch.int32) - sizes
    at = before + (2 * starts[:, None]).to(torch.int32)
    return at.view(listed.shape)[listed].to(torch.int64), wide[listed]


def _shared(missed: Tensor) -> Tensor:
    """bool [rows, G]: that a group or one that shares its flag is missed."""
    groups, span = missed.shape[1], flag_span(missed.shape[1])
    whole = torch.nn.functional.pad(missed, (0, -groups % span)).unflatten(1, (-1, span))
    return whole.any(2).repeat_interleave(span, dim=1)[:, :groups]


def _reached(bits: Tensor, groups: Tensor, scales: Tensor, flags: Tensor) -> Tensor:
    return _fits(bits - _bases(groups, scales, flags), groups == 0, flags)


def _fits(symbol: Tensor, zero: Tensor, flags: Tensor) -> Tensor:
    """What is added to a base: 8 bits, with a nibble 11 and the sign, with a byte 16."""
    tailed = torch.where(flags, 0xFFFF, 0x87FF).unsqueeze(-1)
    return symbol & ~torch.where(zero, tailed, 0xFF) == 0


def _bases(groups: Tensor, scales: Tensor, flags: Tensor) -> Tensor:
    """int32 [rows, G, 128]: bits of q · t + c, rounded once to BF16: what symbols are added to.

    A product is exact in float32, and c too small to matter but where the product lies between two BF16 numbers.
    """
    assert bool(scales.isfinite().all()), "scales must be finite"
    t = (scales.to(torch.float32) * BASE).abs().to(torch.bfloat16).to(torch.float32)
    c = torch.where(flags, NOTHING, ((t.view(torch.int32) >> 16) - BELOW).clamp_(min=0)).unsqueeze(-1)
    product = groups.to(torch.float32) * t.unsqueeze(-1)
    bits = product.view(torch.int32)
    up = torch.where((c & 0x7FFF) != 0, bits >= 0, (bits >> 16 & 1) != 0)  # what a tie does
    rounded = (bits + 0x7FFF + up.to(torch.int32)) >> 16 & 0xFFFF
    return torch.where((product == 0) & (c != NOTHING), c, rounded)


def _bits(weight: Tensor) -> Tensor:
    """bfloat16 [rows, K] -> int32 [rows, G, 128], 0 … 65535."""
    assert weight.dtype == torch.bfloat16, weight.dtype
    return _grouped(weight.contiguous().view(torch.int16)).to(torch.int32) & 0xFFFF


def _grouped(t: Tensor) -> Tensor:
    return t.unflatten(-1, (-1, GROUP))


def _order(order: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(order, device=device)
