"""Experts to nested payloads and back, in torch on any device: the encoder, and the CPU's decoder.

B experts at a time: wide [B, 2I, H] are gate and up, tall [B, H, I] is down, bfloat16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specter_core.draft.int4 import Int4Matrix, pack, unpack
from specter_core.memory.payload import ExpertViews
from specter_core.nested.code import CodedMatrix, code_matrix, decode_matrix, sanitised, tail_bytes
from specter_core.nested.layout import OVERREAD_BYTES, NestedLayout


class ExpertCodes(NamedTuple):
    """The resident half: gate_up [B, 2I, …] and down [B, H, …], in the canonical layout of draft/int4.py."""

    gate_up: Int4Matrix
    down: Int4Matrix

    def one(self, expert: int) -> ExpertCodes:
        """Of a single expert, still with a leading dimension."""
        return ExpertCodes(*(Int4Matrix(m.codes[expert : expert + 1], m.scales[expert : expert + 1]) for m in self))


class SanitisedCodes(NamedTuple):
    """codes that reach every weight; moved: how many differ from what they were; tails: bytes that each expert needs
    beyond one symbol per weight; flagged: groups whose tails are bytes, of all experts."""

    codes: ExpertCodes
    moved: int
    tails: list[int]
    flagged: int


def sanitised_codes(wide: Tensor, tall: Tensor, codes: ExpertCodes) -> SanitisedCodes:
    """First step of encoding; all on one device."""
    found, moved, flagged = [], 0, 0
    tails = torch.zeros(wide.shape[0], dtype=torch.int64, device=wide.device)
    for weight, matrix in zip((wide, tall), codes, strict=True):
        before = unpack(matrix.codes)
        rows, scales = weight.flatten(0, 1), matrix.scales.flatten(0, 1)
        flat, flags = sanitised(rows, before.flatten(0, 1), scales)
        tails += tail_bytes(flat, flags).view(weight.shape[:2]).sum(1)
        flagged += int(flags.sum())
        after = flat.view(before.shape)
        changed = int((after != before).sum())
        moved += changed
        found.append(Int4Matrix(pack(after), matrix.scales) if changed else matrix)
    return SanitisedCodes(ExpertCodes(*found), moved, tails.tolist(), flagged)


def encode_experts(wide: Tensor, tall: Tensor, codes: ExpertCodes, layout: NestedLayout, payload_bytes: int) -> Tensor:
    """Payloads uint8 [B, payload_bytes] on the weights' device. codes come from `sanitised_codes`.

    Everything is decoded again and compared: an expert that does not come back bit for bit is our bug.
    """
    count = wide.shape[0]
    payload = torch.zeros(count, payload_bytes, dtype=torch.uint8, device=wide.device)
    header = torch.empty(count, 2, layout.rows, dtype=torch.int32, device=wide.device)  # starts, flags
    at, begin = layout.symbols_at, torch.zeros(count, 1, dtype=torch.int64, device=wide.device)  # tails written so far
    filled = [0] * count
    for weight, matrix in zip((wide, tall), codes, strict=True):
        rows, inputs = weight.shape[1:]
        coded = code_matrix(weight.flatten(0, 1), unpack(matrix.codes).flatten(0, 1), matrix.scales.flatten(0, 1))
        _check(weight, coded, matrix)
        size, row = rows * inputs, 0 if at == layout.symbols_at else 2 * layout.width
        payload[:, at : at + size] = coded.symbols.view(count, size)
        at += size
        first = coded.starts.view(count, rows)[:, :1]  # [B, 1], in the batch's list
        header[:, 0, row : row + rows] = coded.starts.view(count, rows) - first + begin
        header[:, 1, row : row + rows] = coded.flags.view(count, rows)
        cuts = [*first.flatten().tolist(), coded.tails.numel()]
        for expert in range(count):
            own = coded.tails[cuts[expert] : cuts[expert + 1]]
            place = layout.tails_at + filled[expert]
            filled[expert] += own.numel()
            assert filled[expert] <= layout.capacity(payload_bytes), (filled[expert], layout.capacity(payload_bytes))
            payload[expert, place : place + own.numel()] = own
        begin = torch.tensor(filled, device=wide.device).unsqueeze(1)
    payload[:, : 8 * layout.rows] = header.flatten(1).view(torch.uint8)
    first_again = decode_expert(payload[0], codes.one(0), layout)
    wanted = ExpertViews(wide[0, : layout.width], wide[0, layout.width :], tall[0])
    assert all(_same(a, b) for a, b in zip(first_again, wanted, strict=True)), "a payload differs from its expert"
    return payload


def batch_of(weights: ExpertViews) -> tuple[Tensor, Tensor]:
    """One expert as wide [1, 2I, H] and tall [1, H, I]."""
    return torch.cat([weights.gate, weights.up])[None], weights.down[None]


def decode_expert(payload: Tensor, codes: ExpertCodes, layout: NestedLayout) -> ExpertViews:
    """gate, up, down of one payload uint8 [≥ payload bytes], fresh tensors on its device. codes: with B = 1."""
    width, hidden = layout.width, layout.hidden
    symbols = payload[layout.symbols_at : layout.tails_at]
    starts, flags = payload[: 8 * layout.rows].view(torch.int32).view(2, -1)
    tails, rows, split = payload[layout.tails_at :], 2 * width, 2 * width * hidden
    wide = CodedMatrix(symbols[:split].view(rows, hidden), tails, starts[:rows], flags[:rows])
    tall = CodedMatrix(symbols[split:].view(hidden, width), tails, starts[rows:], flags[rows:])
    gate_up = decode_matrix(wide, unpack(codes.gate_up.codes[0]), codes.gate_up.scales[0])
    down = decode_matrix(tall, unpack(codes.down.codes[0]), codes.down.scales[0])
    return ExpertViews(gate_up[:width], gate_up[width:], down)


def _check(weight: Tensor, coded: CodedMatrix, matrix: Int4Matrix) -> None:
    """Decode again: by the kernel where it runs, else in torch."""
    if weight.is_cuda:
        from specter_core.draft.kernels.blocks import repack_to_blocks
        from specter_core.nested.kernels.decode import decode_rows

        found = torch.empty(weight.shape[0] * weight.shape[1], weight.shape[2], dtype=torch.int16, device=weight.device)
        tails = torch.cat([coded.tails, coded.tails.new_zeros(OVERREAD_BYTES)])
        decode_rows(repack_to_blocks(matrix), coded.symbols.view(torch.int32), tails, coded.starts, coded.flags, found)
        assert _same(found.view(torch.bfloat16), weight.flatten(0, 1)), "rebuilt weights differ from their originals"
        return
    codes = unpack(matrix.codes).flatten(0, 1)
    again = decode_matrix(coded, codes, matrix.scales.flatten(0, 1))
    assert _same(again, weight.flatten(0, 1)), "rebuilt weights differ from their originals"


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))
