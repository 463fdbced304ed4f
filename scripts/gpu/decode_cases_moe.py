"""Cases of router, tokens and grouped experts at the shapes of a model."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from scripts.gpu.decode_shapes import Case, Launch, Maker, Shape
from specter_core.model.kernels.head_linear import head_linear
from specter_core.model.kernels.norm import norm_rows
from specter_core.model.kernels.router import route
from specter_core.model.kernels.tokens import ARGMAX_BLOCK, append_tokens, argmax, embed
from specter_core.verify.kernels.combine_rows import combine_rows
from specter_core.verify.kernels.group_rows import group_rows
from specter_core.verify.kernels.grouped_ffn import DOWN_TILE, GATE_UP_TILE, GroupedTile, grouped_ffn


def routing_cases(shape: Shape, make: Maker, rows: int) -> Iterator[Case]:
    """Router choice, grouping, sums, tokens: small launches whose floor is the launch itself."""
    k = shape.top_k
    ids = make.empty(rows, k, dtype=torch.int64)
    logits = make.randn(rows, shape.experts + 1, dtype=torch.float32)
    weights = make.randn(rows, k, dtype=torch.float32)
    counters = torch.zeros(shape.experts, dtype=torch.int32, device=make.device)
    part_of = make.rows(rows, 5)
    members = make.empty(shape.experts, 64, dtype=torch.int32)
    counts = make.empty(shape.experts, dtype=torch.int32)
    results, summed = (
        make.randn(rows, k, shape.hidden, dtype=torch.float32),
        make.empty(rows, shape.hidden, dtype=torch.float32),
    )
    parts = -(-shape.vocab // ARGMAX_BLOCK)
    best, best_id = make.empty(rows * parts, dtype=torch.float32), make.empty(rows * parts, dtype=torch.int32)
    scores, token = (
        make.randn(rows, shape.vocab, dtype=torch.float32),
        torch.zeros(rows, dtype=torch.int64, device=make.device),
    )
    table, embedded = make.randn(shape.vocab, shape.hidden), make.empty(rows, shape.hidden)
    sequence = torch.zeros(rows, 4096, dtype=torch.int64, device=make.device)
    lengths, positions, context = (torch.zeros(rows, dtype=torch.int64, device=make.device) for _ in range(3))
    x, gain, normed = make.randn(rows, shape.hidden), make.randn(shape.hidden), make.empty(rows, shape.hidden)

    def same(name: str, moved: int, launch: Launch) -> Case:
        return Case(name, rows, moved, lambda copies: [launch] * copies)

    yield same("route+ELB", rows * shape.experts * 4, lambda: route(
        logits, ids, weights, rows=part_of, experts=shape.experts, jitter=shape.jitter, counters=counters))  # fmt: skip
    yield same("group rows", rows * k * 8, lambda: group_rows(ids, members, counts))
    yield same("combine rows", rows * k * shape.hidden * 4, lambda: combine_rows(results, weights, ids, summed))
    yield same("norm rows", rows * shape.hidden * 4, lambda: norm_rows(x, gain, None, 1e-6, normed))
    yield same("embed", rows * shape.hidden * 4, lambda: embed(token, table, embedded))
    yield same("argmax", rows * shape.vocab * 4, lambda: argmax(scores, token, best, best_id))
    yield same("append", rows * 40, lambda: append_tokens(
        token, sequence, lengths, positions, context, part_of.valid))  # fmt: skip
    head_x, head_out = make.randn(rows, shape.heads, 128), make.empty(rows, shape.heads, 512)
    head_w = make.randn(shape.heads, 128, 512)
    yield same("head linear 128x512", head_w.numel() * 2, lambda: head_linear(head_x, head_w, head_out))


def grouped_case(
    shape: Shape, make: Maker, rows: int, *, listed: bool = False,
    tiles: tuple[GroupedTile, GroupedTile] = (GATE_UP_TILE, DOWN_TILE), experts: int | None = None,
) -> Case:  # fmt: skip
    """All experts that `rows` rows route to, resident; bytes count each of them once."""
    count = experts or shape.experts
    k, hidden, width = min(shape.top_k, count), shape.hidden, shape.width
    generator = torch.Generator().manual_seed(rows)
    ids = torch.stack([torch.randperm(count, generator=generator)[:k].sort().values for _ in range(rows)])
    distinct = int(ids.unique().numel())
    entry = 3 * hidden * width + 128
    label = f"grouped experts {distinct} of {count}" + (" listed" if listed else "")

    def build(copies: int) -> list[Launch]:
        buffer = make.randn(count, entry, scale=hidden**-0.5)
        on_device = ids.to(make.device)
        slots = torch.arange(count, dtype=torch.int32).to(make.device)
        members = make.empty(count, 64, dtype=torch.int32)
        counts = make.empty(count, dtype=torch.int32)
        act, out = make.empty(rows, k, width), make.empty(rows, k, hidden, dtype=torch.float32)
        x = make.randn(rows, hidden)
        group_rows(on_device, members, counts)

        def launch() -> None:
            grouped_ffn(x, buffer, slots, members, counts, act, out, top_k=k, experts=slots if listed else None,
                        gate_up_tile=tiles[0], down_tile=tiles[1])  # fmt: skip

        return [launch] * copies

    return Case(label, rows, distinct * 3 * hidden * width * 2, build)
