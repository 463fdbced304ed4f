"""No Triton kernel is left out: each one that is launched anywhere compiles for sm_90, on a machine without a GPU."""

from __future__ import annotations

import ast
from pathlib import Path

import kernel_runs
import kernel_runs_blocks
import prefill_runs
import pytest

pytest.importorskip("triton")

CORE = Path(__file__).resolve().parents[1] / "specter_core"
NESTED = ("nested",)
"""Folders and files whose name holds one of these have a compile test of their own."""


def launched() -> set[str]:
    """Names of @triton.jit functions that some function launches: `name[grid](…)`."""
    found: set[str] = set()
    for path in CORE.rglob("*.py"):
        if any(part in str(path.relative_to(CORE)) for part in NESTED):
            continue
        tree = ast.parse(path.read_text())
        jitted = {
            f.name
            for f in ast.walk(tree)
            if isinstance(f, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in f.decorator_list)
        }
        calls = (n.func for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Subscript))
        found |= {c.value.id for c in calls if isinstance(c.value, ast.Name)} & jitted
    return found


def test_every_launched_kernel_compiles_for_sm90() -> None:
    rest = {kernel for kernel, _, _ in kernel_runs.run("compile_rest", "all")["all"]}
    passes = kernel_runs.run("compile", "deepseek_v2_lite", "phi3.5_moe")
    decode = {kernel for found in passes.values() for kernel, _, _ in found}
    draft = {row[0] for rows in kernel_runs_blocks.run("compile").values() for row in rows}
    prefill = {row[0] for rows in prefill_runs.run("compile", "deepseek_v2", "qwen2_moe").values() for row in rows}
    wanted = launched()
    assert len(wanted) > 20
    assert wanted - (rest | decode | draft | prefill) == set()
