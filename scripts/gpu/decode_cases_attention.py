"""Cases of the decode kernels between the projections, at the shapes of a model: rotary embedding, cache, attention."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from scripts.gpu.decode_shapes import Case, Launch, Maker, Shape
from specter_core.model.kernels.attention import combine_splits, gqa_splits
from specter_core.model.kernels.mla import mla_prepare
from specter_core.model.kernels.mla_attention import SplitTile, mla_splits, mla_values
from specter_core.model.kernels.partials import Partials
from specter_core.model.kernels.rope import RopeTables, rope_append


def attention_cases(
    shape: Shape,
    make: Maker,
    rows: int,
    context: int,
    *,
    steps_per_program: int = 1,
    row_tile: int = 16,
    tile: SplitTile | None = None,
) -> Iterator[Case]:
    """The launches between the projections, for `rows` rows of one sequence that ends at `context` positions."""
    capacity = -(-context // 64) * 64
    part_of = make.rows(rows, context - rows)
    where = f"ctx={context}"
    heads, d = shape.heads, shape.head_dim
    angles = [make.randn(1, capacity, shape.rope, dtype=torch.float32) for _ in range(2)]
    tables = RopeTables(*angles, bool(shape.rank), 1 << 30)
    if shape.rank:
        rank, width = shape.rank, shape.rank + shape.rope
        gain = 1.0 + make.randn(rank, scale=0.1)
        part = Partials.allocate(rows, heads, rank, capacity, make.device)
        query, out = make.randn(rows, heads, width), make.empty(rows, heads * d)
        mix = make.empty(rows, heads, rank) if row_tile == 32 else None
        split = [heads * shape.nope, heads * shape.rope, shape.rope, rank]

        def prepare(copies: int) -> list[Launch]:
            pieces, cache = make.randn(rows, sum(split)).split(split, dim=1), make.randn(1, capacity + 1, width)

            def launch(key_up: Tensor) -> Launch:
                return lambda: mla_prepare(
                    *pieces, key_up, gain, 1e-6, part_of, tables, query, cache, row_tile=row_tile
                )

            return [launch(make.randn(heads, shape.nope, rank, scale=0.1)) for _ in range(copies)]

        def splits(copies: int) -> list[Launch]:
            def launch(cache: Tensor) -> Launch:
                return lambda: mla_splits(
                    query, cache, rank, part_of, 0.1, capacity, part, steps_per_program=steps_per_program, tile=tile
                )

            return [launch(make.randn(1, capacity + 1, width)) for _ in range(copies)]

        def values(copies: int) -> list[Launch]:
            def launch(value_up: Tensor) -> Launch:
                return lambda: mla_values(part, value_up, part_of, capacity, out, latent=mix, row_tile=row_tile)

            return [launch(make.randn(heads, rank, d, scale=0.05)) for _ in range(copies)]

        yield Case(
            f"MLA absorb+rope+append {where}", rows, heads * shape.nope * rank * 2 + rows * heads * width * 2, prepare
        )
        yield Case(
            f"MLA splits x{steps_per_program} {where}", rows, context * width * 2 + rows * heads * width * 2, splits
        )
        yield Case(f"MLA combine+values {where}", rows, heads * rank * d * 2 + rows * heads * rank * 4, values)
        return
    kv = shape.kv_heads
    part = Partials.allocate(rows, heads, d, capacity, make.device)
    query, out = make.randn(rows, heads, d), make.empty(rows, heads, d)

    def append(copies: int) -> list[Launch]:
        qkv = make.randn(rows, (heads + 2 * kv) * d)

        def launch(keys: Tensor, values: Tensor) -> Launch:
            return lambda: rope_append(qkv, query, keys, values, part_of, tables)

        return [launch(make.randn(1, capacity + 1, kv, d), make.randn(1, capacity + 1, kv, d)) for _ in range(copies)]

    def attend(copies: int) -> list[Launch]:
        def launch(keys: Tensor, values: Tensor) -> Launch:
            return lambda: gqa_splits(query, keys, values, part_of, d**-0.5, capacity, part)

        return [launch(make.randn(1, capacity + 1, kv, d), make.randn(1, capacity + 1, kv, d)) for _ in range(copies)]

    def combine(copies: int) -> list[Launch]:
        return [lambda: combine_splits(part, part_of, capacity, out)] * copies

    yield Case(f"GQA rope+append {where}", rows, rows * (heads + 2 * kv) * d * 4, append)
    yield Case(f"GQA splits {where}", rows, 2 * context * kv * d * 2, attend)
    yield Case(f"GQA combine {where}", rows, rows * heads * d * 4, combine)
