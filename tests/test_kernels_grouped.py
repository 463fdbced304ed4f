"""Grouped expert kernels in Triton's interpreter: right values; no grouping, company or arrival order changes a bit."""

from __future__ import annotations

from typing import Any

import kernel_runs
import pytest

pytest.importorskip("triton")

GROUPS = ("grouped", "grouped_many_rows", "grouped_fp32")


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return kernel_runs.run("interpret", *GROUPS)


@pytest.mark.parametrize("group", GROUPS)
def test_pairs_match_float64_in_any_grouping_with_the_same_bits(results: dict[str, Any], group: str) -> None:
    assert results[group]
    assert [check for check in results[group] if not check[1] <= check[2]] == []
