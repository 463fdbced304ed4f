"""INT4 packing and the round-to-nearest quantizer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specter_core.draft import rtn
from specter_core.draft.int4 import GROUP, Int4Matrix, dequantize, matrix_bytes, pack, unpack
from specter_core.errors import UserError


def _weight(outputs: int, inputs: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) * 0.05


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 5), groups=st.integers(1, 3), seed=st.integers(0, 1000))
def test_unpack_inverts_pack(rows: int, groups: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-8, 8, (2, rows, groups * GROUP), generator=generator, dtype=torch.int8)
    packed = pack(codes)
    assert packed.dtype == torch.uint8 and packed.shape == (2, rows, groups * GROUP // 2)
    assert torch.equal(unpack(packed), codes)


def test_low_nibble_is_the_even_input() -> None:
    codes = torch.zeros(1, GROUP, dtype=torch.int8)
    codes[0, 0], codes[0, 1] = -8, 7
    assert int(pack(codes)[0, 0]) == 0xF0


def test_dequantised_weight_is_code_times_scale() -> None:
    codes = torch.randint(-8, 8, (6, 3 * GROUP), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    scales = torch.rand(6, 3, generator=torch.Generator().manual_seed(2)).to(torch.float16)
    expected = codes.double() * scales.double().repeat_interleave(GROUP, dim=1)
    matrix = Int4Matrix(pack(codes), scales)
    assert torch.equal(dequantize(matrix).double(), expected)
    stacked = Int4Matrix(matrix.codes.expand(2, 3, -1, -1), matrix.scales.expand(2, 3, -1, -1))
    assert torch.equal(dequantize(stacked)[1, 2].double(), expected)


def test_dequantised_matmul_matches_float64() -> None:
    matrix = rtn.quantize(_weight(96, 256))
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(3))
    reference = (
        x.double() @ (unpack(matrix.codes).double() * matrix.scales.double().repeat_interleave(GROUP, dim=1)).t()
    )
    result = x @ dequantize(matrix).t()
    assert (result.double() - reference).abs().max() <= 1e-6 * reference.abs().max()


def test_bytes_are_4_125_bits_per_weight() -> None:
    matrix = rtn.quantize(_weight(64, 256))
    assert matrix.bytes == matrix_bytes(64, 256) == 64 * 256 * 4125 // 8000
    assert 3 * matrix_bytes(1408, 2048) == 4_460_544  # one DeepSeek-V2-Lite expert


def test_no_scale_on_a_fine_grid_beats_the_chosen_one_by_much() -> None:
    weight = _weight(8, GROUP, seed=4)
    matrix = rtn.quantize(weight)
    error = (dequantize(matrix) - weight).square().sum(dim=1)
    absmax = weight.abs().amax(dim=1, keepdim=True)
    best = torch.full_like(error, float("inf"))
    for ratio in torch.linspace(0.3, 1.3, 400):
        scale = absmax * ratio / 8
        rounded = (weight / scale).round().clamp(-8, 7) * scale
        best = torch.minimum(best, (rounded - weight).square().sum(dim=1))
    assert bool((error <= best * 1.02).all())
    plain = (weight / (absmax / 7)).round().clamp(-8, 7) * (absmax / 7)
    assert float(error.sum()) < float((plain - weight).square().sum())


def test_weights_that_are_codes_times_a_scale_survive_exactly() -> None:
    codes = torch.randint(-8, 8, (4, GROUP), generator=torch.Generator().manual_seed(5), dtype=torch.int8)
    codes[:, 0] = -8
    weight = codes.float() * 0.125
    assert torch.equal(dequantize(rtn.quantize(weight)), weight)


def test_a_group_of_zeros_gives_zeros() -> None:
    weight = _weight(4, 2 * GROUP)
    weight[1, GROUP:] = 0
    weight[2] = 1e-12  # below the smallest float16 scale
    restored = dequantize(rtn.quantize(weight))
    assert bool(restored.isfinite().all())
    assert not restored[1, GROUP:].any() and not restored[2].any()
    assert restored[1, :GROUP].any()


def test_row_blocks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = _weight(37, 2 * GROUP).to(torch.bfloat16)
    whole = rtn.quantize(weight)
    monkeypatch.setattr(rtn, "_BLOCK_WEIGHTS", 5 * 2 * GROUP)
    blocks = rtn.quantize(weight)
    assert torch.equal(whole.codes, blocks.codes) and torch.equal(whole.scales, blocks.scales)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e9])
def test_weights_that_do_not_fit_are_refused(value: float) -> None:
    weight = _weight(4, GROUP)
    weight[2, 3] = value
    with pytest.raises(UserError, match="layer7 holds"):
        rtn.quantize(weight, "layer7")
