"""Time what the fused INT4 kernel is compared with (figures 10 and 11): python -m scripts.gpu.bench_comparison
[--models a,b] [--no-dense]

FP16 stands for 16-bit weights (bfloat16) in cuBLAS; INT4 runs on Marlin (scripts/gpu/marlin.py) and on our own kernels.
Dense and single-expert shapes: one call at 1 to 4,096 tokens. The routed experts of one layer: expert by expert (gate,
up and down each by itself, as a model's modules do it) and fused, at 1 to 16 tokens. Every time is device time within
a CUDA graph with fixed routing, weights rotated beyond the L2; eager_us is the time of the same calls launched one by
one. Values are checked against float64 first, at the fewest tokens. Prints the HBM ceiling, then rows; writes
comparison.csv to $OUT (or outputs/); what cannot be measured is a row that says why; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear, silu

from harness.environment import git_commit
from scripts.gpu.bench_decode_kernels import L2_BYTES, ceiling_tb_per_s, event_us
from scripts.gpu.bench_kernel import ROOT, write_csv
from scripts.gpu.int4_checks import SHAPES, Case, Inputs, make_inputs, reference
from scripts.gpu.int4_layer import rotation
from scripts.gpu.marlin import Aligned, DenseMarlin, MarlinMissing, MoeMarlin, align, marlin_layout
from specter_core.draft.int4 import Int4Matrix, dequantize, matrix_bytes
from specter_core.draft.kernels.block_configs import block_path_config
from specter_core.draft.kernels.block_down import down_blocks
from specter_core.draft.kernels.block_gate_up import gate_up_blocks
from specter_core.draft.kernels.blocks import repack_to_blocks
from specter_core.draft.kernels.two_launches import MAX_TOKENS

DENSE = ((73728, 18432), (18432, 18432), (8192, 8192), (4096, 4096))  # inputs x outputs
EXPERT = ((2048, 1408), (4096, 6400))
CALL_TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
MOE_TOKENS = (1, 2, 4, 8, 16)
FIELDS = (
    "shape", "tokens", "backend", "variant", "launches", "us", "eager_us", "tb_per_s", "share_of_ceiling", "device",
    "weights", "dtype", "git_commit", "reason",
)  # fmt: skip
Call = Callable[[], object]


class Form(NamedTuple):
    """One way to compute a layer's experts: turns[i] is the work of the i-th routing."""

    backend: str
    variant: str
    turns: list[Call]


def graph_us(turns: Sequence[Call], repeats: int = 9) -> float:
    """Device microseconds of one turn, all turns in one graph."""
    turns[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in turns:
            turn()
    return event_us(graph.replay, repeats) / len(turns)


def eager_us(turns: Sequence[Call]) -> float:
    """Microseconds of one turn when every kernel is launched by itself."""
    for turn in turns:
        turn()
    torch.cuda.synchronize()
    begin = time.perf_counter_ns()
    for turn in turns:
        turn()
    torch.cuda.synchronize()
    return (time.perf_counter_ns() - begin) / 1e3 / len(turns)


def launches(turn: Call) -> int | None:
    """Kernels and memory operations of one turn, as captured."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    try:
        with torch.cuda.graph(graph):
            turn()
        return _nodes(graph.raw_cuda_graph())
    except (AttributeError, TypeError, OSError, RuntimeError):
        return None


def _nodes(graph: int) -> int:
    import ctypes

    count = ctypes.c_size_t()
    status = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(count))
    if status:
        raise RuntimeError(f"cuGraphGetNodes: {status}")
    return count.value


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


class Matrix(NamedTuple):
    """One backend's copies of a matrix, more than the L2 holds: turns(x): x times each; missing: why there are none."""

    backend: str
    bytes: int
    turns: Callable[[Tensor], list[Call]]
    missing: str = ""


def matrices(kind: str, inputs: int, outputs: int) -> Iterator[Matrix]:
    """The backends of a shape, one after the other in memory; our own multiplies expert shapes only."""
    generator = torch.Generator("cuda").manual_seed(inputs + outputs)
    shape = (outputs, inputs)
    size = 2 * inputs * outputs
    halves = [
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16).mul_(inputs**-0.5)
        for _ in range(_copies(size))
    ]
    yield Matrix("fp16", size, lambda x: [partial(linear, x, w) for w in halves])
    halves.clear()
    torch.cuda.empty_cache()
    size = matrix_bytes(outputs, inputs)
    try:
        quarters = [_random_marlin(inputs, outputs, generator) for _ in range(_copies(size))]
        yield Matrix("marlin", size, lambda x: [partial(w, x) for w in quarters])
    except MarlinMissing as missing:
        yield Matrix("marlin", size, lambda x: [], str(missing))
    torch.cuda.empty_cache()
    if kind == "expert":
        yield Matrix("specter", size, _own_turns(inputs, outputs, _copies(size)))


def _copies(one: int) -> int:
    return max(1, min(64, -(-L2_BYTES // one)))


def _own_turns(inputs: int, outputs: int, copies: int) -> Callable[[Tensor], list[Call]]:
    """Our kernel as a plain product: `down_blocks` of one choice with weight 1, at the tokens that it takes."""
    layer = make_inputs(Case(outputs, inputs, copies, 1, 1, torch.bfloat16), "cuda", seed=1, padded=False)
    down = repack_to_blocks(layer.down)
    config = block_path_config(outputs, inputs, 1).down

    def turns(x: Tensor) -> list[Call]:
        if len(x) > MAX_TOKENS:
            return []
        one = torch.ones(len(x), 1, device="cuda")
        out = torch.empty(len(x), outputs, device="cuda")
        ids = [torch.full((len(x), 1), copy, device="cuda") for copy in range(copies)]
        act = x.to(torch.float16)
        return [partial(down_blocks, act, i, one, down, out, config) for i in ids]

    return turns


def _random_marlin(inputs: int, outputs: int, generator: torch.Generator) -> DenseMarlin:
    codes = torch.randint(
        -(2**31), 2**31, (inputs // 16, outputs * 2), generator=generator, device="cuda", dtype=torch.int32
    )
    scales = torch.rand(inputs // 128, outputs, generator=generator, device="cuda").mul_(0.01).to(torch.bfloat16)
    return DenseMarlin(codes, scales)


def call_rows(
    kind: str, inputs: int, outputs: int, ceiling: float, counts: Sequence[int] = CALL_TOKENS
) -> Iterator[dict[str, Any]]:
    """One matrix by each backend at every number of tokens."""
    for matrix in matrices(kind, inputs, outputs):
        for tokens in counts:
            row: dict[str, Any] = {"shape": f"{kind} {inputs}x{outputs}", "tokens": tokens, "backend": matrix.backend}
            row |= {"variant": "", "launches": 1, "reason": matrix.missing}
            try:
                turns = matrix.turns(torch.randn(tokens, inputs, device="cuda", dtype=torch.bfloat16))
                if turns:
                    turns *= max(1, min(48, int(1e11 / (tokens * matrix.bytes))) // len(turns))
                    row["us"] = graph_us(turns, 5)
                    row["bytes"] = matrix.bytes + 2 * tokens * (inputs + outputs)
                    row = finished(row, ceiling)
            except Exception as problem:
                row["reason"] = f"{type(problem).__name__}: {problem}".splitlines()[0][:200]
            if "us" in row or row["reason"]:
                yield row
            torch.cuda.empty_cache()


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


def finished(row: dict[str, Any], ceiling: float) -> dict[str, Any]:
    rate = row.pop("bytes") / row["us"] / 1e6
    row |= {"tb_per_s": round(rate, 3), "share_of_ceiling": round(rate / ceiling, 3)}
    for name in ("us", "eager_us"):
        if name in row:
            row[name] = round(row[name], 2)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--no-dense", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here; run this on a machine that has one", file=sys.stderr)
        return 2
    begin = time.perf_counter()
    ceilings = ceiling_tb_per_s()
    ceiling = max(ceilings.values())
    torch.cuda.empty_cache()
    print(f"HBM ceiling: copy {ceilings['copy']:.2f}, read {ceilings['read']:.2f} TB/s")
    out = Path(os.environ.get("OUT") or ROOT / "outputs")
    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []

    def record(found: Iterator[dict[str, Any]]) -> None:
        for row in found:
            row |= {"device": "cuda", "weights": "synthetic", "dtype": "bfloat16", "git_commit": git_commit()}
            rows.append(row)
            text = row.get("reason") or f"{row['us']:9.2f} µs, eager {row.get('eager_us', '-')}"
            print(f"{row['shape']:22s} {row['tokens']:5d} {row['backend']:8s} {row['variant']:8s} {text}", flush=True)
            write_csv(out / "comparison.csv", rows, FIELDS)

    for model in options.models.split(","):
        record(moe_rows(model, ceiling))
    if not options.no_dense:
        for inputs, outputs in EXPERT:
            record(call_rows("expert", inputs, outputs, ceiling))
        for inputs, outputs in DENSE:
            record(call_rows("dense", inputs, outputs, ceiling))
    measured = sum(1 for row in rows if row.get("us") is not None)
    seconds = round(time.perf_counter() - begin, 1)
    print(json.dumps({"device": torch.cuda.get_device_name(), "rows": len(rows), "measured": measured, "s": seconds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
