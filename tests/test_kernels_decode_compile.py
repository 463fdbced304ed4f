"""Every decode kernel compiles for sm_90 at the models' shapes, on a machine without a GPU."""

from __future__ import annotations

import kernel_runs
import pytest

pytest.importorskip("triton")

SHARED_LIMIT_BYTES = 227 * 1024
COMMON = {"_linear_kernel", "_sum_splits_kernel", "_route_kernel", "_group_rows_kernel", "_gate_up_kernel"}
COMMON |= {"_down_kernel", "_combine_rows_kernel", "_norm_kernel", "_embed_kernel", "_argmax_blocks_kernel"}
COMMON |= {"_argmax_finish_kernel", "_append_kernel", "_head_linear_kernel"}
EXPECTED = {
    "deepseek_v2_lite": COMMON
    | {"_mla_prepare_kernel", "_mla_split_kernel", "_mla_value_kernel"}
    | {"_gemv_kernel", "_combine_kernel"},
    "phi3.5_moe": COMMON | {"_rope_append_kernel", "_gqa_split_kernel", "_combine_kernel"},
}


@pytest.mark.parametrize("shape", EXPECTED)
def test_kernels_compile_for_sm90_within_shared_memory(shape: str) -> None:
    found = kernel_runs.run("compile", shape)[shape]
    assert {kernel for kernel, _, _ in found} == EXPECTED[shape]
    assert max(shared for _, shared, _ in found) <= SHARED_LIMIT_BYTES
    products = {"_linear_kernel", "_gate_up_kernel", "_down_kernel", "_gqa_split_kernel", "_mla_split_kernel"}
    assert all(matrix_unit for kernel, _, matrix_unit in found if kernel in products)
