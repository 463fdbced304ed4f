"""One expert to a nested payload and back, in plain torch on any device: the encoder, and the CPU's decoder."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specter_core.draft.int4 import Int4Matrix, pack, unpack
from specter_core.memory.payload import ExpertViews
from specter_core.nested.code import CodedMatrix, code_matrix, decode_matrix, sanitised
from specter_core.nested.layout import NestedLayout


class ExpertCodes(NamedTuple):
    """The resident half of one expert: gate_up [2I, …] and down [H, …], in the canonical layout of draft/int4.py."""

    gate_up: Int4Matrix
    down: Int4Matrix


class SanitisedCodes(NamedTuple):
    """codes that reach every weight; moved: how many differ from what they were; tails: bytes the weights need beyond
    one symbol each."""

    codes: ExpertCodes
    moved: int
    tails: int


def sanitised_codes(weights: ExpertViews, codes: ExpertCodes) -> SanitisedCodes:
    """gate, up bfloat16 [I, H] and down [H, I] with their codes, on one device."""
    found, moved, tails = [], 0, 0
    for weight, matrix in zip(_stacked(weights), codes, strict=True):
        before = unpack(matrix.codes)
        after = sanitised(weight, before, matrix.scales)
        moved += int((after != before).sum())
        tails += int((after == 0).sum())
        found.append(Int4Matrix(pack(after), matrix.scales))
    return SanitisedCodes(ExpertCodes(*found), moved, tails)


def encode_expert(weights: ExpertViews, codes: ExpertCodes, layout: NestedLayout, payload_bytes: int) -> Tensor:
    """The payload, uint8 [payload_bytes] on the weights' device. codes come from `sanitised_codes`.

    Decoded again and compared: an expert that does not come back bit for bit is our bug.
    """
    stacked = _stacked(weights)
    coded = [code_matrix(w, unpack(m.codes), m.scales) for w, m in zip(stacked, codes, strict=True)]
    tails = torch.cat([part.tails for part in coded])
    assert tails.numel() <= layout.capacity(payload_bytes), (tails.numel(), layout.capacity(payload_bytes))
    payload = torch.zeros(payload_bytes, dtype=torch.uint8, device=stacked[0].device)
    payload[: 4 * layout.rows] = _starts(coded).view(torch.uint8)
    payload[layout.symbols_at : layout.tails_at] = torch.cat([part.symbols.flatten() for part in coded])
    payload[layout.tails_at : layout.tails_at + tails.numel()] = tails
    for weight, found in zip(weights, decode_expert(payload, codes, layout), strict=True):
        assert torch.equal(found.view(torch.int16), weight.view(torch.int16)), (
            "a nested expert differs from its original"
        )
    return payload


def decode_expert(payload: Tensor, codes: ExpertCodes, layout: NestedLayout) -> ExpertViews:
    """gate, up, down of a payload uint8 [≥ payload bytes], fresh tensors on its device."""
    width, hidden = layout.width, layout.hidden
    symbols = payload[layout.symbols_at : layout.tails_at]
    starts = payload[: 4 * layout.rows].view(torch.int32)
    tails = payload[layout.tails_at :]
    split, down_starts = 2 * width * hidden, int(starts[2 * width])
    gate_up = decode_matrix(symbols[:split].view(2 * width, hidden), tails, unpack(codes.gate_up.codes),
                            codes.gate_up.scales)  # fmt: skip
    down = decode_matrix(symbols[split:].view(hidden, width), tails[down_starts:], unpack(codes.down.codes),
                         codes.down.scales)  # fmt: skip
    return ExpertViews(gate_up[:width], gate_up[width:], down)


def _stacked(weights: ExpertViews) -> tuple[Tensor, Tensor]:
    return torch.cat([weights.gate, weights.up]), weights.down


def _starts(coded: list[CodedMatrix]) -> Tensor:
    gate_up, down = coded
    return torch.cat([gate_up.starts, down.starts + gate_up.tails.numel()])  # int32 [2I + H]
