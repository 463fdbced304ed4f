"""The tensor-core INT4 kernels: right values in Triton's interpreter, and every one compiles for sm_90."""

from __future__ import annotations

from typing import Any

import kernel_runs_blocks
import numpy as np
import ptx_warp
import pytest
import torch

pytest.importorskip("triton")

from scripts.gpu.bench_kernel import candidates
from scripts.gpu.int4_checks import SHAPES
from scripts.gpu.int4_layer import STAGES, rotation
from specter_core.draft.int4 import Int4Matrix, matrix_bytes, pack
from specter_core.draft.kernels import tensor_cores
from specter_core.draft.kernels.block_configs import block_path_config
from specter_core.draft.kernels.blocks import repack_to_blocks


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    return kernel_runs_blocks.run("interpret")


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    return kernel_runs_blocks.run("compile")


def test_kernels_match_float64_write_every_output_and_repeat_their_bits(interpreted: dict[str, Any]) -> None:
    assert len(interpreted) == 9
    for name, checks in interpreted.items():
        assert [check for check in checks if not check[1] <= check[2]] == [], name


def test_the_error_is_that_of_rounding_the_intermediate_to_16_bits(interpreted: dict[str, Any]) -> None:
    for name, checks in interpreted.items():
        errors = {check: value for check, value, _ in checks}
        if name != "path":
            assert max(errors["act"], errors["out"]) < 3e-4, (name, errors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_assembly_emulated_gives_the_exact_sums_of_a_block(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    codes = torch.randint(-8, 8, (16, 128), generator=generator, dtype=torch.int8)
    x = torch.randn(128, generator=generator).to(dtype)
    matrix = repack_to_blocks(Int4Matrix(pack(codes), torch.ones(16, 1, dtype=torch.float16)))
    words = matrix.words.flatten().numpy().view(np.uint32)
    pairs = x.view(torch.int32).numpy().view(np.uint32)
    lane = np.arange(32)
    activations = [pairs[lane % 4 * 16 + i] for i in range(16)]
    offset, one, other = (np.full(32, bits, np.uint32) for bits in tensor_cores.constant_bits(dtype))
    operands = [*(words[lane * 4 + i] for i in range(4)), *(words[128 + lane * 4 + i] for i in range(4))]
    product, excess = tensor_cores.ASSEMBLY[dtype]
    sums = ptx_warp.run(product, {f"${2 + i}": value for i, value in enumerate([*operands, *activations, offset])})
    over = ptx_warp.run(excess, {f"${1 + i}": value for i, value in enumerate([*activations, one, other])})["$0"]
    wanted = codes.double().numpy() @ x.double().numpy()
    np.testing.assert_allclose(sums["$0"] - over, wanted[lane // 4], atol=1e-9)
    np.testing.assert_allclose(sums["$1"] - over, wanted[8 + lane // 4], atol=1e-9)


@pytest.mark.parametrize("model", ["deepseek_v2_lite", "qwen15_moe", "phi35_moe"])
def test_both_kernels_compile_for_sm90_with_16_byte_loads_and_tensor_cores(
    compiled: dict[str, Any], model: str
) -> None:
    found = compiled[model]
    assert {kernel for kernel, *_ in found} == {"_gate_up_block_kernel", "_down_block_kernel"} and len(found) == 6
    for kernel, pdl, shared, loads, products, waits in found:
        assert shared <= 227 * 1024
        assert loads > 0 and products == 6 * loads, (kernel, loads, products)  # a block: 2 loads, 8 MMAs, 4 for sum x
        assert waits == pdl, kernel


def test_the_bench_meets_no_expert_twice_within_more_than_the_l2() -> None:
    for model, (hidden, width, experts, top_k) in SHAPES.items():
        launches = experts // top_k
        assert launches * top_k * 3 * matrix_bytes(hidden, width) > 200e6, model
        ids = rotation(experts, top_k, tokens=1)
        for first in range(len(ids) - launches):
            window = [int(e) for launch in ids[first : first + launches] for e in launch[0]]
            assert len(set(window)) == len(window)


def test_the_sweep_tries_many_tiles_of_every_model_and_the_configured_one() -> None:
    for model, (hidden, width, _, top_k) in SHAPES.items():
        config = block_path_config(hidden, width, top_k)
        for stage, configured in zip(STAGES, (config.gate_up, config.down), strict=True):
            found = candidates(stage, model)
            assert configured in found and len(set(found)) == len(found) > 3, (model, stage)
