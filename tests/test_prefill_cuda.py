"""Prefill on a device: right values, the same bits whatever is resident and wherever a prompt is cut."""

from __future__ import annotations

import prefill_runs
import pytest

pytest.importorskip("triton")

FAMILIES = ("deepseek_v2", "qwen2_moe", "phimoe")
SHARED_LIMIT_BYTES = 227 * 1024


def failed(mode: str, *names: str) -> list[object]:
    found = prefill_runs.run(mode, *names)
    assert found.keys() == set(names) and all(found.values())
    return [check for checks in found.values() for check in checks if not check[1] <= check[2]]


def test_kernels_match_float64_and_bits_do_not_depend_on_company() -> None:
    assert failed("kernels", "all") == []


def test_layers_give_the_cpu_decoders_values_with_the_same_bits_in_any_chunks() -> None:
    assert failed("model", *FAMILIES) == []


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v2", "phimoe"])
def test_short_and_long_prompts_have_the_same_bits_whatever_is_resident(family: str) -> None:
    assert failed("engine", family) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_every_launch_compiles_for_sm90_within_shared_memory(family: str) -> None:
    found = prefill_runs.run("compile", family)[family]
    attention = "_mla_prefill_kernel" if family == "deepseek_v2" else "_gqa_prefill_kernel"
    assert {"_add_rows_kernel", "_report_kernel", "_group_rows_kernel", attention} <= {kernel for kernel, _, _ in found}
    assert max(shared for _, shared, _ in found) <= SHARED_LIMIT_BYTES
    of_warp_groups = [kernel for kernel, _, product in found if product]
    assert {"_gate_up_kernel", "_down_kernel", attention} <= set(of_warp_groups)
    assert of_warp_groups.count("_linear_kernel") == len([k for k, _, _ in found if k == "_linear_kernel"]) - 1  # head
