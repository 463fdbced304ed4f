"""Nested kernels in Triton's interpreter: weights come back bit for bit, products have the plain kernels' bits."""

from __future__ import annotations

import kernel_runs
import kernel_runs_nested
import pytest

pytest.importorskip("triton")

GROUPS = {
    "interpret": ("rebuild", "rebuild_long", "nested", "nested_fp32"),
    "emulate": ("rebuild", "nested", "nested_pairs"),
}
"""interpret: weight by weight; emulate: by the assembly, four and two words at once."""


@pytest.mark.parametrize("mode", GROUPS)
def test_rebuilt_weights_and_their_products_differ_in_no_bit(mode: str) -> None:
    run = kernel_runs.run if mode == "interpret" else kernel_runs_nested.run
    results = run(mode, *GROUPS[mode])
    for group in GROUPS[mode]:
        assert results[group]
        assert [check for check in results[group] if not check[1] <= check[2]] == []


@pytest.mark.parametrize("shape", ("deepseek_v2_lite", "phi3.5_moe"))
def test_nested_kernels_compile_for_sm90_and_keep_the_order_of_k(shape: str) -> None:
    """With operands from narrow loads Triton may let the matrix unit take k in another order: other bits than plain."""
    found = kernel_runs_nested.run("compile", shape)[shape]
    assert {kernel for kernel, *_ in found} == {"_gate_up_kernel", "_down_kernel", "_decode_kernel"}
    assert all(shared <= 100 * 1024 and in_order for _, shared, _, in_order in found)
    assert all(matrix_unit for kernel, _, matrix_unit, _ in found if kernel != "_decode_kernel")
