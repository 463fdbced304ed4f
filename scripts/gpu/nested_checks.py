"""Checks of the nested kernels in the manner of decode_checks.py: rebuilt weights are the originals bit for bit, and
grouped products on nested slots have the bits of those on plain ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from scripts.gpu.decode_checks import Check, Env, bit_mismatches
from specter_core.draft import rtn
from specter_core.draft.int4 import GROUP, Int4Matrix, pack, unpack
from specter_core.draft.kernels.blocks import BlockMatrix, repack_to_blocks
from specter_core.memory.payload import ExpertViews, PayloadLayout
from specter_core.nested.code import code_matrix, sanitised
from specter_core.nested.expert import ExpertCodes, batch_of, encode_experts, sanitised_codes
from specter_core.nested.kernels.decode import decode_rows
from specter_core.nested.layout import OVERREAD_BYTES, NestedLayout
from specter_core.verify.kernels import grouped_ffn as plain_ffn
from specter_core.verify.kernels.group_rows import group_rows
from specter_core.verify.kernels.grouped_ffn import GroupedTile, grouped_ffn
from specter_core.verify.kernels.nested_ffn import DOWN_TILE, GATE_UP_TILE, ResidentCodes, nested_ffn


def rebuild_checks(env: Env, rows: int, inputs: int) -> Iterator[Check]:
    """The decode kernel on round-to-nearest codes (some groups flagged), on arbitrary patterns with arbitrary codes,
    and on codes 0 alone, of patterns and of weights that nibbles reach."""

    def check(name: str, weight: Tensor, matrix: Int4Matrix) -> Check:
        codes, _ = sanitised(weight, unpack(matrix.codes), matrix.scales)
        coded, blocks = (
            code_matrix(weight, codes, matrix.scales),
            repack_to_blocks(Int4Matrix(pack(codes), matrix.scales)),
        )
        out = torch.full(weight.shape, -9, dtype=torch.int16, device=env.device)
        tails = torch.cat([coded.tails, coded.tails.new_full((OVERREAD_BYTES,), 255)])
        decode_rows(blocks, coded.symbols.view(torch.int32), tails, coded.starts, coded.flags, out)
        return Check(f"{name} {rows}x{inputs}", bit_mismatches(out, weight.view(torch.int16)), 0.0)

    for name, spread in (("gauss", 0.0), ("heavy tails", 1.5)):
        size = torch.exp(env.randn(rows, inputs, dtype=torch.float32) * spread) * 0.02
        weight = (env.randn(rows, inputs, dtype=torch.float32) * size).bfloat16()
        weight[::8, 5] = 0
        yield check(f"rebuilt weights that differ: {name}", weight, rtn.quantize(weight))
    patterns = env.randint(-32768, 32768, rows, inputs).to(torch.int16).view(torch.bfloat16)
    codes = env.randint(-8, 8, rows, inputs).to(torch.int8)
    scales = env.randn(rows, inputs // GROUP, dtype=torch.float32) * torch.tensor(
        [0.0, 1e-6, 1.0, 1e4], device=env.device
    ).repeat(rows * inputs // GROUP)[: rows * inputs // GROUP].view(rows, -1)
    yield check("rebuilt weights that differ: any pattern, any code", patterns, Int4Matrix(pack(codes), scales.half()))
    zeros = Int4Matrix(torch.full((rows, inputs // 2), 0x88, dtype=torch.uint8, device=env.device), scales.half())
    yield check("rebuilt weights that differ: no code but 0", patterns, zeros)
    small = env.randn(rows, inputs, dtype=torch.float32).clamp_(-2, 2) * 0.2
    near = (small * scales.half().float().repeat_interleave(GROUP, dim=1)).bfloat16()
    yield check("rebuilt weights that differ: no code but 0, nibbles", near, zeros)


def nested_checks(
    env: Env, experts: int, top_k: int, hidden: int, width: int, count: int,
    tiles: tuple[GroupedTile, GroupedTile] = (GATE_UP_TILE, DOWN_TILE),
    plain_tiles: tuple[GroupedTile, GroupedTile] = (plain_ffn.GATE_UP_TILE, plain_ffn.DOWN_TILE),
) -> Iterator[Check]:  # fmt: skip
    """Grouped products from nested slots, by table and by list, against `grouped_ffn` on the same weights in env.dtype.

    Two layers' codes are resident, the second is meant. Expert 0 has nothing but codes 0, expert 1 flagged groups.
    """
    layout = NestedLayout(hidden, width)
    weights = [_expert(env, hidden, width) for _ in range(experts)]
    for matrix in weights[1]:
        matrix[::5, :: GROUP * 2] = 0
    codes = [round_to_nearest(w) for w in weights]
    assert sanitised_codes(*batch_of(weights[1]), codes[1]).flagged > layout.rows // 5
    codes[0] = ExpertCodes(*(Int4Matrix(torch.full_like(m.codes, 0x88), m.scales) for m in codes[0]))
    found = [sanitised_codes(*batch_of(w), c) for w, c in zip(weights, codes, strict=True)]
    size = layout.payload_bytes(max(f.tails[0] for f in found))
    entry = PayloadLayout(hidden, width, torch.bfloat16, "nested", size).entry_bytes
    places = torch.randperm(experts + 1, generator=env.generator)[:experts].tolist()
    nested = torch.full((experts + 1, entry), 255, dtype=torch.uint8, device=env.device)
    plain = env.poison(experts + 1, 3 * hidden * width + 128)
    for place, weight, one in zip(places, weights, found, strict=True):
        nested[place, :size] = encode_experts(*batch_of(weight), one.codes, layout, size)[0]
        plain[place, : layout.weights] = torch.cat([m.flatten() for m in weight]).to(env.dtype)
    sides = [
        repack_to_blocks(Int4Matrix(torch.cat([m.codes for m in side]), torch.cat([m.scales for m in side])), halves)
        for side, halves in zip(zip(*(f.codes for f in found), strict=True), (True, False), strict=True)
    ]
    other = [BlockMatrix(side.words + 1, side.scales * 2) for side in sides]
    resident = ResidentCodes([other[0], sides[0]], [other[1], sides[1]])
    ids = torch.stack([torch.randperm(experts, generator=env.generator)[:top_k] for _ in range(count)])
    ids = ids.sort(dim=1).values
    if count > 2:
        ids[count // 2] = -1
    ids, x = ids.to(env.device), env.randn(count, hidden)
    members = torch.full((experts, count), -9, dtype=torch.int32, device=env.device)
    counts = torch.full((experts,), -9, dtype=torch.int32, device=env.device)
    group_rows(ids, members, counts)
    table = torch.tensor(places, dtype=torch.int32, device=env.device)

    def run(groups: list[list[int]] | None, of_nested: bool) -> Tensor:
        act, out = env.poison(count, top_k, width), env.poison(count, top_k, hidden, dtype=torch.float32)
        lists: list[tuple[Tensor, Tensor | None]] = [(table, None)]
        if groups is not None:
            padded = [torch.tensor([*group, -1], dtype=torch.int32, device=env.device) for group in groups]
            lists = [(torch.where(p >= 0, table[p.clamp(min=0).long()], -1), p) for p in padded]
        for slots, listed in lists:
            if of_nested:
                nested_ffn(x, nested, resident, resident.layers[1:], slots, members, counts, act, out, layout=layout,
                           top_k=top_k, experts=listed, gate_up_tile=tiles[0], down_tile=tiles[1])  # fmt: skip
            else:
                grouped_ffn(x, plain, slots, members, counts, act, out, top_k=top_k, experts=listed,
                            gate_up_tile=plain_tiles[0], down_tile=plain_tiles[1])  # fmt: skip
        return out

    wanted, name = run(None, False), f"nested {experts}/{top_k} {hidden}x{width} R={count}"
    order = torch.randperm(experts, generator=env.generator).tolist()
    for how, groups in (("table", None), ("lists", [order[: experts // 2], order[experts // 2 :]])):
        out = run(groups, True)
        live = ids >= 0
        yield Check(f"{name} {how}: pairs with other bits than plain", bit_mismatches(out[live], wanted[live]), 0.0)
        yield Check(f"{name} {how}: invalid pairs written", float((~torch.isnan(out[~live])).sum()), 0.0)


def round_to_nearest(weights: ExpertViews) -> ExpertCodes:
    """One expert's codes, with a leading dimension of 1."""
    matrices = (rtn.quantize(w[0]) for w in batch_of(weights))
    return ExpertCodes(*(Int4Matrix(m.codes[None], m.scales[None]) for m in matrices))


def _expert(env: Env, hidden: int, width: int) -> ExpertViews:
    def matrix(rows: int, inputs: int) -> Tensor:
        return env.randn(rows, inputs, scale=inputs**-0.5, dtype=torch.float32).bfloat16()

    return ExpertViews(matrix(width, hidden), matrix(width, hidden), matrix(hidden, width))
