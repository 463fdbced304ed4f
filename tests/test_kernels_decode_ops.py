"""The decoder's layers on the CUDA operations and as the fused pass (interpreted) against the torch operations."""

from __future__ import annotations

import kernel_runs
import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize("family", ["deepseek_v2", "qwen2_moe", "phimoe"])
def test_cuda_operations_and_fused_pass_route_and_score_as_torch_does(family: str) -> None:
    found = kernel_runs.run("decode", family)[family]
    assert len(found) == 24
    assert [check for check in found if not check[1] <= check[2]] == []
