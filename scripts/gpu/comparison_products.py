"""Rows of one matrix product by each backend: 16-bit weights in cuBLAS, INT4 in Marlin and, for expert shapes, in our
own kernel. Weights rotate over more copies than the L2 holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from scripts.gpu.bench_decode_kernels import L2_BYTES, graph_us
from scripts.gpu.comparison_times import Call, finished
from scripts.gpu.int4_checks import Case, make_inputs
from scripts.gpu.marlin import DenseMarlin, MarlinMissing
from specter_core.draft.int4 import matrix_bytes
from specter_core.draft.kernels.block_configs import block_path_config
from specter_core.draft.kernels.block_down import down_blocks
from specter_core.draft.kernels.block_path import MAX_TOKENS
from specter_core.draft.kernels.blocks import repack_to_blocks

CALL_TOKENS = (1, 4, 16, 64, 256, 1024, 4096)


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
