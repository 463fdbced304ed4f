"""Nested kernels in Triton's interpreter: weights come back bit for bit, products have the plain kernels' bits."""

from __future__ import annotations

from typing import Any

import kernel_runs
import pytest

pytest.importorskip("triton")

GROUPS = ("rebuild", "nested", "nested_fp32")


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return kernel_runs.run("interpret", *GROUPS)


@pytest.mark.parametrize("group", GROUPS)
def test_rebuilt_weights_and_their_products_differ_in_no_bit(results: dict[str, Any], group: str) -> None:
    assert results[group]
    assert [check for check in results[group] if not check[1] <= check[2]] == []
