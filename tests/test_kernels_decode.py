"""Decode kernels in Triton's interpreter: values against float64, and a row's bits in any company."""

from __future__ import annotations

from typing import Any

import kernel_runs
import pytest

pytest.importorskip("triton")

GROUPS = (
    "linear", "linear_split", "linear_fp32", "gemv", "gemv_fp32", "norm", "head_linear", "gqa", "gqa_longrope",
    "gqa_interleaved", "mla", "mla_one_launch", "router", "tokens", "draft_ends",
    "routing", "gqa_row", "gqa_row_longrope", "shared", "shared_one_row",
)  # fmt: skip


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return kernel_runs.run("interpret", *GROUPS)


@pytest.mark.parametrize("group", GROUPS)
def test_values_match_float64_and_bits_do_not_depend_on_company(results: dict[str, Any], group: str) -> None:
    assert results[group]
    assert [check for check in results[group] if not check[1] <= check[2]] == []
