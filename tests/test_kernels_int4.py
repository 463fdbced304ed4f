"""The fused INT4 kernels: right values in Triton's interpreter, and every one compiles for sm_90."""

from __future__ import annotations

from typing import Any

import kernel_runs_int4
import pytest

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    return kernel_runs_int4.run("interpret")


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    return kernel_runs_int4.run("compile")


def test_kernels_match_float64_write_every_output_and_repeat_their_bits(interpreted: dict[str, Any]) -> None:
    assert len(interpreted) == 10
    for name, checks in interpreted.items():
        assert [check for check in checks if not check[1] <= check[2]] == [], name


def test_gemv_error_is_that_of_float32(interpreted: dict[str, Any]) -> None:
    for name in ("one token", "one token, looped", "one token, wide", "one token, ragged"):
        errors = {check: value for check, value, _ in interpreted[name]}
        assert errors["act"] < 2e-5 and errors["out"] < 2e-5, name


@pytest.mark.parametrize("model", ["deepseek_v2_lite", "qwen15_moe", "phi35_moe"])
def test_every_kernel_compiles_for_sm90_with_16_byte_loads(compiled: dict[str, Any], model: str) -> None:
    found = compiled[model]
    kernels = {"_gate_up_gemv", "_down_gemv", "_gate_up_grouped", "_down_grouped"}
    assert {kernel for kernel, *_ in found} == kernels
    for kernel, pdl, shared, wide_loads, waits in found:
        assert shared <= 227 * 1024
        assert wide_loads > 0 or kernel == "_down_grouped", kernel
        assert waits == pdl, kernel
