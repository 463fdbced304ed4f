"""Every decode kernel at the shapes of a model: what the bench times and what the compile test compiles.

On the meta device the launches compile only; on CUDA each case runs over several copies of its weights, so that no
copy is still in the L2 when its turn comes again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scripts.gpu.decode_cases_attention import attention_cases
from scripts.gpu.decode_cases_linear import linear_case, linear_cases
from scripts.gpu.decode_cases_moe import grouped_case, routing_cases
from scripts.gpu.decode_shapes import Case, Maker, Shape, norm_of
from specter_core.model.kernels.mla_attention import SplitTile
from specter_core.model.kernels.tiles import GemvTile, LinearTile, Preset, power_of_two


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
