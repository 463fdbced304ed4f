"""Runs checks of the tensor-core INT4 kernels in a process of its own: Triton decides once whether it interprets.

python tests/kernel_runs_blocks.py interpret | compile: one JSON object on the last line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import kernel_process

ROOT = Path(__file__).resolve().parents[1]


def run(mode: str) -> dict[str, Any]:
    """What `interpreted` or `compiled` found."""
    return kernel_process.run(__file__, mode)


def interpreted() -> dict[str, Any]:
    """{case: [check, value, limit]s} on fresh random inputs."""
    import torch

    from scripts.gpu.int4_checks import Case, check_case
    from specter_core.draft.kernels.block_configs import BlockConfig

    half, brain = torch.float16, torch.bfloat16
    one, all_at_once = BlockConfig(1, 16), BlockConfig(1, 16)
    cases = {
        "one token": (Case(256, 128, 5, 3, 1, half), (one, all_at_once)),
        "one token, inputs split over warps": (Case(640, 384, 3, 2, 1, half), (BlockConfig(4, 8), BlockConfig(2, 8))),
        "one token, little ahead": (Case(384, 640, 3, 1, 1, brain), (BlockConfig(2, 8, 1), BlockConfig(8, 4, 1))),
        "one token, ragged": (Case(384, 128, 3, 1, 1, brain), (BlockConfig(2, 16), BlockConfig(1, 32))),
        "three tokens": (Case(384, 256, 6, 2, 3, brain), (one, BlockConfig(2, 8, 2))),
        "all experts each": (Case(128, 128, 2, 2, 2, half), (one, all_at_once)),
        "18 tokens": (Case(128, 256, 5, 4, 18, brain), (BlockConfig(1, 32), BlockConfig(2, 8))),
        "64 tokens": (Case(128, 128, 2, 2, 64, half), (one, all_at_once)),
    }
    found = {name: check_case(case, *configs, device="cpu") for name, (case, configs) in cases.items()}
    found["path"] = path_checks()
    return found


def path_checks() -> list[list[Any]]:
    """The CUDA path's forward against the torch path, and a row's bits by itself and in company."""
    import torch

    from scripts.gpu.int4_checks import Case, make_inputs
    from specter_core.draft.draft_store import DraftExperts
    from specter_core.draft.experts import DraftExpertPath
    from specter_core.draft.int4 import Int4Matrix
    from specter_core.draft.kernels.block_configs import BlockConfig, BlockPathConfig
    from specter_core.draft.kernels.block_path import BlockExpertPath

    case = Case(128, 128, 4, 2, 5, torch.float16)
    layers = [make_inputs(case, "cpu", seed) for seed in range(2)]

    def stacked(parts: list[Int4Matrix]) -> Int4Matrix:
        return Int4Matrix(torch.stack([p.codes for p in parts]), torch.stack([p.scales for p in parts]))

    gate_up, down = stacked([layer.gate_up for layer in layers]), stacked([layer.down for layer in layers])
    draft = DraftExperts(gate_up, down, "rtn", {})
    config = BlockPathConfig(BlockConfig(1, 16), BlockConfig(2, 8))
    fused = BlockExpertPath(draft, 2, "cpu", max_tokens=8, config=config)
    plain = DraftExpertPath(draft)
    checks: list[list[Any]] = [["bytes", abs(sum(m.bytes for m in (*fused.gate_up, *fused.down)) - draft.bytes), 0]]
    for index, (_, _, x, ids, weights) in enumerate(layers):
        results = []
        for rows in (1, 5):
            part = slice(5 - rows, 5)
            result = fused.forward(index, x[part], ids[part], weights[part])
            wanted = plain.forward(index, x[part], ids[part], weights[part])
            checks.append([f"layer {index}, {rows} rows", float((result - wanted).norm() / wanted.norm()), 1e-3])
            results.append(result[-1].clone())
        checks.append([f"layer {index}, alone and in company", float((results[0] != results[1]).sum()), 0])
    return checks


def compiled() -> dict[str, Any]:
    """{model: [kernel, pdl, shared bytes, 16-byte weight loads, MMAs, waits]s} for sm_90."""
    import torch

    from scripts.gpu.int4_checks import SHAPES
    from scripts.gpu.offline_sm90 import compile_only
    from specter_core.draft.kernels.block_configs import block_path_config
    from specter_core.draft.kernels.block_down import down_blocks
    from specter_core.draft.kernels.block_gate_up import gate_up_blocks
    from specter_core.draft.kernels.blocks import BlockMatrix

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def matrix(experts: int, outputs: int, inputs: int) -> BlockMatrix:
        blocks = experts, outputs // 16, inputs // 128
        return BlockMatrix(empty(*blocks, 256, dtype=torch.int32), empty(*blocks, 8, 2, dtype=torch.float16))

    found: dict[str, Any] = {}
    for name, (hidden, width, experts, top_k) in SHAPES.items():
        config = block_path_config(hidden, width, top_k)
        rows = found.setdefault(name, [])
        for dtype, pdl in ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)):
            x, ids = empty(1, hidden, dtype=dtype), empty(1, top_k, dtype=torch.int64)
            act, out = empty(top_k, width, dtype=torch.float16), empty(1, hidden)
            gate_up, down = matrix(experts, 2 * width, hidden), matrix(experts, hidden, width)
            with compile_only() as built:
                gate_up_blocks(x, ids, gate_up, act, config.gate_up, pdl)
                down_blocks(act, ids, empty(1, top_k), down, out, config.down, pdl)
            for kernel, binary in built:
                ptx = binary.asm["ptx"]
                loads, products = ptx.count("L2::128B.v4.b32"), ptx.count("mma.sync.aligned.m16n8k16")
                rows.append([kernel, pdl, binary.metadata.shared, loads, products, "griddepcontrol.wait" in ptx])
    return found


if __name__ == "__main__":
    print(json.dumps(interpreted() if sys.argv[1] == "interpret" else compiled()))
