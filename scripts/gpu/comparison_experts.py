"""Rows of one layer's routed experts in every backend's forms: expert by expert, as a model's modules do it, and fused.
Values are checked against float64 at the fewest tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear, silu

from scripts.gpu.bench_decode_kernels import graph_us
from scripts.gpu.comparison_times import Call, eager_us, finished, launches
from scripts.gpu.int4_checks import SHAPES, Case, Inputs, make_inputs, reference
from scripts.gpu.int4_layer import rotation
from scripts.gpu.marlin import Aligned, DenseMarlin, MarlinMissing, MoeMarlin, align, marlin_layout
from specter_core.draft.int4 import Int4Matrix, dequantize, matrix_bytes
from specter_core.draft.kernels.block_configs import block_path_config
from specter_core.draft.kernels.block_down import down_blocks
from specter_core.draft.kernels.block_gate_up import gate_up_blocks
from specter_core.draft.kernels.blocks import repack_to_blocks

MOE_TOKENS = (1, 2, 4, 8, 16)


class Form(NamedTuple):
    """One way to compute a layer's experts: turns[i] is the work of the i-th routing."""

    backend: str
    variant: str
    turns: list[Call]


@triton.jit
def _silu_mul(x, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + row * 2 * width + column, mask=column < width, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=column < width)


def silu_mul(x: Tensor, out: Tensor) -> None:
    """x [rows, 2I] (gate, then up) -> out [rows, I], one launch."""
    rows, width = out.shape
    _silu_mul[(triton.cdiv(width, 1024), rows)](x, out, width, BLOCK=1024)


class Experts:
    """One layer's experts of a model in every backend's layout, inputs and routings."""

    def __init__(self, model: str, tokens: int, layer: Inputs) -> None:
        self.hidden, self.width, self.experts, self.top_k = SHAPES[model]
        self.layer = layer
        generator = torch.Generator("cuda").manual_seed(tokens)
        self.x = torch.randn(tokens, self.hidden, generator=generator, device="cuda").to(torch.bfloat16)
        self.weights = torch.rand(tokens, self.top_k, generator=generator, device="cuda")
        self.ids = [ids.to("cuda") for ids in rotation(self.experts, self.top_k, tokens)]
        self.distinct = sum(len(set(ids.flatten().tolist())) for ids in self.ids) / len(self.ids)
        self.out = torch.zeros(tokens, self.hidden, device="cuda")

    def wanted(self) -> Tensor:
        """float64 [T, H] of the first routing."""
        inputs = self.layer._replace(x=self.x, ids=self.ids[0], weights=self.weights)
        return reference(inputs)[1]

    def routes(self, ids: Tensor) -> list[tuple[int, Tensor, Tensor]]:
        """(expert, rows, their weights [n, 1]) of a routing; known to the host, as after a synchronisation."""
        found = []
        for expert in sorted(set(ids.flatten().tolist())):
            row, choice = (ids == expert).nonzero(as_tuple=True)
            found.append((expert, row, self.weights[row, choice].unsqueeze(1)))
        return found

    def by_expert(self, matrices: Sequence[tuple[Callable[[Tensor], Tensor], ...]]) -> list[Call]:
        """Turns of the module-by-module form; matrices[e] = gate, up, down of expert e."""

        def turn(routes: list[tuple[int, Tensor, Tensor]]) -> Tensor:
            self.out.zero_()
            for expert, row, weight in routes:
                gate, up, down = matrices[expert]
                x = self.x if len(self.x) == 1 else self.x.index_select(0, row)
                result = down(silu(gate(x)) * up(x)) * weight
                if len(self.x) == 1:
                    self.out += result
                else:
                    self.out.index_add_(0, row, result)
            return self.out

        return [partial(turn, self.routes(ids)) for ids in self.ids]


def half_form(model: str, layer: Inputs) -> Callable[[Experts], Form]:
    width = SHAPES[model][1]
    gate_up = dequantize(layer.gate_up, torch.bfloat16)
    down = dequantize(layer.down, torch.bfloat16)

    def product(w: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda x: linear(x, w)

    matrices = [(product(gate_up[e, :width]), product(gate_up[e, width:]), product(down[e])) for e in range(len(down))]
    return lambda experts: Form("fp16", "unfused", experts.by_expert(matrices))


def _part(matrix: Int4Matrix, expert: int, rows: slice = slice(None)) -> Int4Matrix:
    return Int4Matrix(matrix.codes[expert, rows], matrix.scales[expert, rows])


def marlin_form(model: str, layer: Inputs) -> Callable[[Experts], Form]:
    width = SHAPES[model][1]

    def matrix(part: Int4Matrix) -> DenseMarlin:
        return DenseMarlin(*marlin_layout(part))

    matrices = [
        (
            matrix(_part(layer.gate_up, e, slice(width))),
            matrix(_part(layer.gate_up, e, slice(width, None))),
            matrix(_part(layer.down, e)),
        )
        for e in range(len(layer.down.codes))
    ]
    return lambda experts: Form("marlin", "unfused", experts.by_expert(matrices))


def fused_marlin_form(model: str, layer: Inputs) -> Callable[[Experts], Form]:
    def stacked(matrix: Int4Matrix) -> MoeMarlin:
        parts = [marlin_layout(_part(matrix, e)) for e in range(len(matrix.codes))]
        return MoeMarlin(torch.stack([part[0] for part in parts]), torch.stack([part[1] for part in parts]))

    gate_up, down = stacked(layer.gate_up), stacked(layer.down)

    def form(experts: Experts) -> Form:
        pairs = len(experts.x) * experts.top_k
        both = torch.empty(pairs, 2 * experts.width, dtype=torch.bfloat16, device="cuda")
        act = torch.empty(pairs, experts.width, dtype=torch.bfloat16, device="cuda")
        results = torch.empty(pairs, experts.hidden, dtype=torch.bfloat16, device="cuda")

        def turn(aligned: Aligned) -> Tensor:
            gate_up(experts.x, aligned, experts.weights, experts.top_k, False, both)
            silu_mul(both, act)
            down(act, aligned, experts.weights, 1, True, results)
            torch.sum(results.view(len(experts.x), experts.top_k, -1), dim=1, dtype=torch.float32, out=experts.out)
            return experts.out

        turns: list[Call] = [partial(turn, align(ids, experts.experts)) for ids in experts.ids]
        return Form("marlin", "fused", turns)

    return form


def own_form(model: str, layer: Inputs) -> Callable[[Experts], Form]:
    """Our kernels, expert by expert: two launches each, a gather and a sum."""
    hidden, width, _, top_k = SHAPES[model]
    matrices = repack_to_blocks(layer.gate_up, halves=True), repack_to_blocks(layer.down)
    config = block_path_config(hidden, width, top_k)

    def form(experts: Experts) -> Form:
        tokens = len(experts.x)
        act = torch.empty(tokens, width, dtype=torch.float16, device="cuda")
        out = torch.empty(tokens, hidden, device="cuda")

        def turn(routes: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
            experts.out.zero_()
            for ids, row, weight in routes:
                x = experts.x if tokens == 1 else experts.x.index_select(0, row)
                gate_up_blocks(x, ids, matrices[0], act, config.gate_up)
                down_blocks(act, ids, weight, matrices[1], out, config.down)
                if tokens == 1:
                    experts.out += out
                else:
                    experts.out.index_add_(0, row, out[: len(row)])
            return experts.out

        def filled(ids: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
            return [
                (torch.full((len(row), 1), expert, device="cuda"), row, weight.contiguous())
                for expert, row, weight in experts.routes(ids)
            ]

        return Form("specter", "unfused", [partial(turn, filled(ids)) for ids in experts.ids])

    return form


FORMS: dict[tuple[str, str], Callable[[str, Inputs], Callable[[Experts], Form]]] = {
    ("fp16", "unfused"): half_form,
    ("marlin", "unfused"): marlin_form,
    ("marlin", "fused"): fused_marlin_form,
    ("specter", "unfused"): own_form,
}


def moe_rows(
    model: str, ceiling: float, forms: Sequence[tuple[str, str]] = tuple(FORMS), counts: Sequence[int] = MOE_TOKENS
) -> Iterator[dict[str, Any]]:
    """Forms of one layer's experts at every number of tokens."""
    hidden, width, count, top_k = SHAPES[model]
    layer = make_inputs(Case(hidden, width, count, top_k, 1, torch.bfloat16), "cuda", seed=1, padded=False)
    for backend, variant in forms:
        make = FORMS[backend, variant]
        bare: dict[str, Any] = {"shape": f"moe {model}", "backend": backend, "variant": variant}
        try:
            form_of = make(model, layer)
        except Exception as problem:
            reason = str(problem) if isinstance(problem, MarlinMissing) else f"{type(problem).__name__}: {problem}"
            yield from (bare | {"tokens": tokens, "reason": reason.splitlines()[0][:200]} for tokens in counts)
            continue
        for tokens in counts:
            row = bare | {"tokens": tokens}
            try:
                experts = Experts(model, tokens, layer)
                turns = form_of(experts).turns
                if tokens == min(counts):
                    turns[0]()
                    wanted = experts.wanted()
                    error = float((experts.out.double() - wanted).norm() / wanted.norm())
                    if not error <= 2e-2:
                        raise ArithmeticError(f"relative error {error:.1e} against float64, 2e-2 allowed")
                row["launches"] = launches(turns[0])
                row["us"], row["eager_us"] = graph_us(turns, 5), eager_us(turns[:8])
                one = matrix_bytes(2 * width, hidden) + matrix_bytes(hidden, width)
                row["bytes"] = experts.distinct * (6 * hidden * width if backend == "fp16" else one)
                yield finished(row, ceiling)
            except Exception as problem:
                yield row | {"reason": f"{type(problem).__name__}: {problem}".splitlines()[0][:200]}
        del form_of
        torch.cuda.empty_cache()
