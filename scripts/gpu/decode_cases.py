"""Every decode kernel at the shapes of a model: what the bench times and what the compile test compiles.

On the meta device the launches compile only; on CUDA each case runs over several copies of its weights, so that no
copy is still in the L2 when its turn comes again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specter_core.model.kernels.attention import combine_splits, gqa_splits
from specter_core.model.kernels.gemv import gemv
from specter_core.model.kernels.head_linear import head_linear
from specter_core.model.kernels.linear import NormWeights, linear
from specter_core.model.kernels.mla import mla_prepare
from specter_core.model.kernels.mla_attention import SplitTile, mla_splits, mla_values
from specter_core.model.kernels.norm import norm_rows
from specter_core.model.kernels.partials import Partials
from specter_core.model.kernels.rope import RopeTables, RowTensors, rope_append
from specter_core.model.kernels.router import route
from specter_core.model.kernels.tiles import GemvTile, LinearTile, Preset, gemv_tile, linear_tile, power_of_two
from specter_core.model.kernels.tokens import ARGMAX_BLOCK, append_tokens, argmax, embed
from specter_core.verify.kernels.combine_rows import combine_rows
from specter_core.verify.kernels.group_rows import group_rows
from specter_core.verify.kernels.grouped_ffn import DOWN_TILE, GATE_UP_TILE, GroupedTile, grouped_ffn

Launch = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    """One model's decode shapes; rank 0: grouped-query attention."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    nope: int
    rope: int
    rank: int
    experts: int
    top_k: int
    width: int
    shared: int
    dense: int
    vocab: int
    moe_layers: int
    layer_norm: bool = False
    qkv_bias: bool = False
    jitter: float | None = None


SHAPES = (
    Shape("deepseek_v2_lite", 2048, 16, 16, 128, 128, 64, 512, 64, 6, 1408, 2816, 10944, 102400, 26),
    Shape("qwen1.5_moe", 2048, 16, 16, 128, 0, 128, 0, 60, 4, 1408, 5632, 0, 151936, 24, qkv_bias=True),
    Shape("phi3.5_moe", 4096, 32, 8, 128, 0, 128, 0, 16, 2, 6400, 0, 0, 32064, 32, True, True, 0.01),
)


@dataclass(frozen=True)
class Case:
    """build(n): n launches with weights of their own. bytes: what one launch must read and write at least."""

    name: str
    rows: int
    bytes: int
    build: Callable[[int], list[Launch]]


@dataclass(frozen=True)
class Maker:
    """Random tensors on a device; meta tensors have no content and need none."""

    device: str
    dtype: torch.dtype

    def randn(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        if self.device == "meta":
            return self.empty(*shape, dtype=dtype)
        return torch.randn(*shape, device=self.device, dtype=dtype or self.dtype) * scale

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(*shape, device=self.device, dtype=dtype or self.dtype)

    def rows(self, steps: int, position: int) -> RowTensors:
        positions = torch.arange(steps, device=self.device) + position
        valid = torch.ones(steps, dtype=torch.bool, device=self.device)
        return RowTensors(positions, valid, positions + 1, steps)


def linear_case(
    make: Maker, name: str, rows: int, n: int, k: int, preset: Preset, *, norm: NormWeights | None = None,
    swiglu: bool = False, bias: bool = False, residual: bool = False, addend: bool = False, gate: bool = False,
    keep: bool = False, fp32: bool = False, router: int = 0, tile: LinearTile | GemvTile | None = None,
) -> Case:  # fmt: skip
    """As the fused pass launches it: the draft's products take their norm along (and the router's logits with
    `router`), the target's follow a norm of their own unless `keep`.
    """
    own = gemv_tile(n, k, pair=swiglu) if preset is Preset.DRAFT else linear_tile(n, k, pair=swiglu, preset=preset)
    chosen = tile or own

    def build(copies: int) -> list[Launch]:
        x, out = make.randn(rows, k), make.empty(rows, n, dtype=torch.float32 if fp32 else None)
        options: dict[str, Any] = {
            "bias": make.randn(n) if bias else None,
            "residual": make.randn(rows, n) if residual else None,
            "addend": make.randn(rows, n, dtype=torch.float32) if addend else None,
            "row_gate": make.randn(rows, dtype=torch.float32) if gate else None,
            "swiglu": swiglu,
        }
        normed = make.empty(rows, k)
        if isinstance(chosen, GemvTile):
            options |= {"norm": norm}
            if router:
                options |= {"router": make.randn(router, k), "normed": normed}
                options |= {"logits": make.empty(rows, router, dtype=torch.float32)}
        else:
            options |= {"partial": make.empty(chosen.split * rows * n, dtype=torch.float32)}
            if keep:
                options |= {"norm": norm, "normed": normed}

        def launch(w: Tensor) -> Launch:
            def run() -> None:
                if isinstance(chosen, GemvTile):
                    gemv(x, w, out, chosen, **options)
                    return
                if norm is not None and not keep:
                    norm_rows(x, norm.weight, norm.bias, norm.eps, normed)
                linear(x if norm is None or keep else normed, w, out, chosen, **options)

            return run

        return [launch(make.randn(n * (2 if swiglu else 1), k, scale=k**-0.5)) for _ in range(copies)]

    weight = (n * (2 if swiglu else 1) + router) * k * 2
    return Case(name, rows, weight + rows * (2 * k + (4 if fp32 else 2) * n), build)


def norm_of(shape: Shape, make: Maker) -> NormWeights:
    shift = make.randn(shape.hidden, scale=0.1) if shape.layer_norm else None
    return NormWeights(1.0 + make.randn(shape.hidden, scale=0.1), shift, 1e-5, shape.layer_norm)


def linear_cases(shape: Shape, make: Maker, rows: int, preset: Preset) -> Iterator[Case]:
    """The projections of one layer and the head."""
    h, norm = shape.hidden, norm_of(shape, make)

    def case(name: str, n: int, k: int, **options: Any) -> Case:
        with_norm = norm if options.pop("norm", False) else None
        return linear_case(make, name, rows, n, k, preset, norm=with_norm, **options)

    if shape.rank:
        yield case("norm+q|kv_a", shape.heads * (shape.nope + shape.rope) + shape.rope + shape.rank, h, norm=True)
    else:
        qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        yield case("norm+qkv", qkv, h, norm=True, bias=shape.qkv_bias)
    yield case("o_proj+residual", h, shape.heads * shape.head_dim, residual=True)
    logits = shape.experts + (1 if shape.qkv_bias and shape.shared else 0)
    draft = preset is Preset.DRAFT
    if not (draft and shape.shared):
        yield case("norm+router logits", logits, h, norm=True, fp32=True)
    if shape.shared:
        if draft:
            yield case("norm+router+shared gate|up", shape.shared, h, norm=True, swiglu=True, router=logits)
        else:
            yield case("shared gate|up", shape.shared, h, swiglu=True)
        yield case("shared down+sum", h, shape.shared, residual=True, addend=True, gate=shape.qkv_bias)
    if shape.dense:
        yield case("dense norm+gate|up", shape.dense, h, swiglu=True, norm=True)
        yield case("dense down", h, shape.dense, residual=True)
    yield case("norm+head fp32", shape.vocab, h, norm=True, fp32=True)


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


def model_cases(shape: Shape, make: Maker) -> Iterator[Case]:
    """Drafting one token, then verifying 17."""
    for rows, preset in ((1, Preset.DRAFT), (17, Preset.TARGET)):
        yield from linear_cases(shape, make, rows, preset)
        tile = 16 if preset is Preset.DRAFT else 32
        for context in (160, 4096):
            yield from attention_cases(shape, make, rows, context, row_tile=tile)
        yield from routing_cases(shape, make, rows)
    yield grouped_case(shape, make, 1)
    yield grouped_case(shape, make, 17)
    yield grouped_case(shape, make, 17, listed=True)


DRAFT_TILES = ((2, 2), (2, 4), (4, 2), (4, 4), (4, 8), (8, 4), (8, 8))
TARGET_TILES = (
    (16, 256, 1, 4, 3), (16, 256, 1, 4, 4), (16, 128, 1, 4, 6), (16, 512, 1, 4, 3), (16, 256, 1, 2, 4),
    (32, 128, 1, 4, 4), (32, 256, 1, 4, 3), (32, 256, 1, 8, 3), (64, 128, 1, 4, 3), (64, 128, 1, 8, 4),
)  # fmt: skip
SPLIT_TILES = ((32, 4, 2), (32, 4, 1), (32, 4, 3), (32, 8, 2), (64, 8, 1), (64, 8, 2), (64, 4, 1))


def sweep_cases(shape: Shape, make: Maker) -> Iterator[Case]:
    """Candidate tiles of the linear layers at 1 and 17 rows, and of MLA's splits."""
    norm, h, heads = norm_of(shape, make), shape.hidden, shape.heads
    down = heads * (shape.nope + shape.rope) + shape.rope + shape.rank
    if not shape.rank:
        down = (heads + 2 * shape.kv_heads) * shape.head_dim
    layers: list[tuple[str, int, int, dict[str, Any]]] = [
        ("qkv", down, h, {"norm": norm}),
        ("head", shape.vocab, h, {}),
    ]
    layers.append(("o", h, heads * shape.head_dim, {"residual": True}))
    for name, width in (("shared", shape.shared), ("dense", shape.dense)):
        if width:
            layers.append((f"{name} gate|up", width, h, {"swiglu": True}))
            layers.append((f"{name} down", h, width, {"residual": True}))
    if shape.rank:
        for rows, context, shared in (
            (1, 160, 1),
            (1, 4096, 1),
            (17, 160, 1),
            (17, 160, 2),
            (17, 4096, 1),
            (17, 4096, 2),
        ):
            for values in SPLIT_TILES:
                tile = SplitTile(*values)
                for case in attention_cases(shape, make, rows, context, steps_per_program=shared, tile=tile):
                    if "splits" in case.name:
                        label = f"{case.name} {values[0]} w{values[1]} s{values[2]}"
                        yield Case(label, rows, case.bytes, case.build)
    for name, n, k, options in layers:
        streams = 2 if options.get("swiglu") else 1
        padded = power_of_two(k)
        for block_n, warps in DRAFT_TILES:
            scale = max(1, padded // 2048) * streams
            if block_n // scale or scale > 4:
                gemv_choice = GemvTile(max(1, block_n // scale), padded, warps * (2 if padded > 8192 else 1))
                label = f"{name} n{gemv_choice.block_n} w{gemv_choice.warps}"
                yield linear_case(make, label, 1, n, k, Preset.DRAFT, tile=gemv_choice, **options)
        for block_n, block_k, split, warps, stages in TARGET_TILES:
            linear_choice = LinearTile(32, block_n, block_k, split, warps, stages)
            label = f"{name} {block_n}x{block_k} split{split} w{warps} s{stages}"
            plain = {key: value for key, value in options.items() if key != "norm"}
            yield linear_case(make, label, 17, n, k, Preset.TARGET, tile=linear_choice, **plain)
