"""One layer's experts in the fused INT4 kernels: its launches on CUDA, timed in turns that outrun the L2, and compiled
ahead where there is no GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from scripts.gpu.bench_decode_kernels import event_us
from scripts.gpu.int4_checks import SHAPES, Case, make_inputs
from specter_core.draft.int4 import matrix_bytes
from specter_core.draft.kernels.block_configs import BlockConfig
from specter_core.draft.kernels.block_down import down_blocks
from specter_core.draft.kernels.block_gate_up import gate_up_blocks
from specter_core.draft.kernels.blocks import BlockMatrix, repack_to_blocks

LAUNCHES = 48
STAGES = ("gate_up", "down")


def rotation(experts: int, top_k: int, tokens: int) -> list[Tensor]:
    """Ids int64 [T, k] of each launch. T = 1 walks through all experts in turn; more tokens draw their own."""
    generator = torch.Generator().manual_seed(2)
    if tokens > 1:
        draws = [torch.rand(tokens, experts, generator=generator).argsort(dim=1)[:, :top_k] for _ in range(8)]
    else:
        order = torch.randperm(experts, generator=generator)
        draws = [order[(top_k * i + torch.arange(top_k)) % experts][None] for i in range(LAUNCHES)]
    return [draw.sort(dim=1).values for draw in draws]


class Layer:
    """One layer's experts of a model, and launches that never meet the same expert twice within the L2."""

    def __init__(self, model: str, device: str, tokens: int = 1) -> None:
        hidden, width, experts, top_k = SHAPES[model]
        self.case = Case(hidden, width, experts, top_k, tokens, torch.bfloat16)
        inputs = make_inputs(self.case, device, seed=1, padded=False)
        self.matrices = repack_to_blocks(inputs.gate_up, halves=True), repack_to_blocks(inputs.down)
        self.x, self.weights = inputs.x, inputs.weights
        self.ids = [ids.to(device) for ids in rotation(experts, top_k, tokens)]
        self.act = torch.zeros(tokens * top_k, width, dtype=torch.float16, device=device)
        self.out = torch.zeros(tokens, hidden, device=device)
        self.distinct = sum(len(set(ids.flatten().tolist())) for ids in self.ids) / len(self.ids)

    def bytes(self, stage: str) -> float:
        """Weight bytes of one launch: each distinct expert once."""
        hidden, width = self.case.hidden, self.case.width
        one = matrix_bytes(2 * width, hidden) if stage == "gate_up" else matrix_bytes(hidden, width)
        return one * self.distinct

    def launch(self, stage: str, ids: Tensor, config: BlockConfig, pdl: bool = False) -> None:
        if stage == "gate_up":
            gate_up_blocks(self.x, ids, self.matrices[0], self.act, config, pdl)
        else:
            down_blocks(self.act, ids, self.weights, self.matrices[1], self.out, config, pdl)

    def time_us(self, stages: Sequence[tuple[str, BlockConfig]], pdl: bool = False) -> float:
        """Microseconds of one turn through the stages' launches, many turns in one graph."""

        def turns() -> None:
            for ids in self.ids:
                for stage, config in stages:
                    self.launch(stage, ids, config, pdl)

        turns()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            turns()
        return event_us(graph.replay, 15) / len(self.ids)


class Job(NamedTuple):
    """A kernel to compile ahead of its launch."""

    case: Case
    stage: str
    config: BlockConfig
    pdl: bool = False


def compile_jobs(jobs: Sequence[Job]) -> None:
    """Fill Triton's cache on the disk; needs no GPU."""
    from scripts.gpu.offline_sm90 import compile_only

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def matrix(experts: int, outputs: int, inputs: int) -> BlockMatrix:
        blocks = experts, outputs // 16, inputs // 128
        return BlockMatrix(empty(*blocks, 256, dtype=torch.int32), empty(*blocks, 8, 2, dtype=torch.float16))

    with compile_only():
        for (hidden, width, experts, top_k, tokens, dtype), stage, config, pdl in jobs:
            layer = object.__new__(Layer)
            layer.matrices = matrix(experts, 2 * width, hidden), matrix(experts, hidden, width)
            layer.x, layer.weights = empty(tokens, hidden, dtype=dtype), empty(tokens, top_k)
            layer.act, layer.out = empty(tokens * top_k, width, dtype=torch.float16), empty(tokens, hidden)
            try:
                layer.launch(stage, empty(tokens, top_k, dtype=torch.int64), config, pdl)
            except Exception as problem:
                print(f"compile {stage} {config}: {problem}", file=sys.stderr)


def compile_all(pool: ProcessPoolExecutor, workers: int, jobs: Sequence[Job]) -> None:
    jobs = list(dict.fromkeys(jobs))
    for done in [pool.submit(compile_jobs, jobs[first::workers]) for first in range(workers)]:
        if done.exception() is not None:
            print(f"compile worker: {done.exception()}", file=sys.stderr)


def model_case(model: str, tokens: int = 1) -> Case:
    return Case(*SHAPES[model], tokens, torch.bfloat16)
