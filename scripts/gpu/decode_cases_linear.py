"""Cases of the decode kernels' linear layers at the shapes of a model: its projections, shared expert and head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from scripts.gpu.decode_shapes import Case, Launch, Maker, Shape, norm_of
from specter_core.model.kernels.gemv import gemv
from specter_core.model.kernels.linear import NormWeights, linear
from specter_core.model.kernels.norm import norm_rows
from specter_core.model.kernels.tiles import GemvTile, LinearTile, Preset, gemv_tile, linear_tile


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
