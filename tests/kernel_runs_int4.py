"""Runs INT4 kernel checks in a process of its own, since Triton decides once whether it interprets or compiles.

python tests/kernel_runs_int4.py interpret | compile: one JSON object on the last line.
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
    from specter_core.draft.kernels.configs import GemvConfig, GroupedConfig

    half, brain = torch.float16, torch.bfloat16
    one, looped, wide = GemvConfig(32, 1), GemvConfig(64, 2, unroll=False), GemvConfig(32, 4)
    ragged = GemvConfig(256, 1)
    cases = {
        "one token": (Case(256, 128, 5, 3, 1, half), (one, one)),
        "one token, looped": (Case(1280, 384, 3, 2, 1, half), (looped, looped)),
        "one token, wide": (Case(384, 640, 3, 1, 1, brain), (wide, wide)),
        "one token, ragged": (Case(384, 128, 3, 1, 1, brain), (ragged, ragged)),
        "three tokens": (Case(384, 256, 6, 2, 3, brain), (one, looped)),
        "all experts each": (Case(128, 128, 2, 2, 2, half), (one, one)),
        "grouped, one token": (Case(256, 128, 4, 3, 1, half), (GroupedConfig(64), GroupedConfig(64))),
        "grouped, 18 tokens": (Case(128, 256, 5, 4, 18, brain), (GroupedConfig(64), GroupedConfig(32))),
        "grouped, 64 tokens": (Case(128, 128, 2, 2, 64, half), (GroupedConfig(64), GroupedConfig(64))),
    }
    found = {name: check_case(case, *configs, device="cpu") for name, (case, configs) in cases.items()}
    found["path"] = path_checks()
    return found


def path_checks() -> list[list[Any]]:
    """The CUDA path's forward, per (token, choice) and grouped, against the torch path."""
    import torch

    from scripts.gpu.int4_checks import Case, make_inputs
    from specter_core.draft.draft_store import DraftExperts
    from specter_core.draft.experts import DraftExpertPath
    from specter_core.draft.int4 import Int4Matrix
    from specter_core.draft.kernels.configs import GemvConfig, GroupedConfig, PathConfig
    from specter_core.draft.kernels.path import FusedExpertPath

    case = Case(128, 128, 4, 2, 5, torch.float16)
    layers = [make_inputs(case, "cpu", seed) for seed in range(2)]

    def stacked(parts: list[Int4Matrix]) -> Int4Matrix:
        return Int4Matrix(torch.stack([p.codes for p in parts]), torch.stack([p.scales for p in parts]))

    gate_up, down = stacked([layer.gate_up for layer in layers]), stacked([layer.down for layer in layers])
    draft = DraftExperts(gate_up, down, "rtn", {})
    one, many = GemvConfig(32, 1), GroupedConfig(64)
    fused = FusedExpertPath(draft, 2, "cpu", max_tokens=8, config=PathConfig(one, one, many, many))
    plain = DraftExpertPath(draft)
    checks: list[list[Any]] = [["bytes", abs(sum(m.bytes for m in (*fused.gate_up, *fused.down)) - draft.bytes), 0]]
    for index, (_, _, x, ids, weights) in enumerate(layers):
        for rows in (1, 5):
            part = slice(5 - rows, 5)
            result = fused.forward(index, x[part], ids[part], weights[part])
            wanted = plain.forward(index, x[part], ids[part], weights[part])
            checks.append([f"layer {index}, {rows} rows", float((result - wanted).norm() / wanted.norm()), 1e-4])
    return checks


def compiled() -> dict[str, Any]:
    """{model: [kernel, config, registers' spill bytes, shared bytes, 16-byte loads]s} for sm_90."""
    import torch

    from scripts.gpu.int4_checks import SHAPES
    from scripts.gpu.offline_sm90 import compile_only
    from specter_core.draft.kernels.configs import path_config
    from specter_core.draft.kernels.down import down_weighted_sum
    from specter_core.draft.kernels.gate_up import gate_up_swiglu
    from specter_core.draft.kernels.layout import GemvMatrix

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def matrix(experts: int, outputs: int, inputs: int) -> GemvMatrix:
        words = empty(experts, outputs, inputs // 8, dtype=torch.int32)
        return GemvMatrix(words, empty(experts, outputs, inputs // 128, dtype=torch.float16))

    found: dict[str, Any] = {}
    for name, (hidden, width, experts, top_k) in SHAPES.items():
        config = path_config(hidden, width, top_k)
        rows = found.setdefault(name, [])
        for tokens, first, second, pdl in (
            (1, config.gate_up, config.down, False),
            (1, config.gate_up, config.down, True),
            (64, config.grouped_gate_up, config.grouped_down, False),
        ):
            x, ids = empty(tokens, hidden, dtype=torch.bfloat16), empty(tokens, top_k, dtype=torch.int64)
            act, out = empty(tokens * top_k, width), empty(tokens, hidden)
            with compile_only() as built:
                gate_up_swiglu(x, ids, matrix(experts, 2 * width, hidden), act, first, pdl)
                down_weighted_sum(act, ids, empty(tokens, top_k), matrix(experts, hidden, width), out, second, pdl)
            for kernel, binary in built:
                ptx = binary.asm["ptx"]
                loads = ptx.count("ld.global.v4.b32") + ptx.count("cp.async.cg.shared.global")
                rows.append([kernel, pdl, binary.metadata.shared, loads, "griddepcontrol.wait" in ptx])
    return found


if __name__ == "__main__":
    print(json.dumps(interpreted() if sys.argv[1] == "interpret" else compiled()))
