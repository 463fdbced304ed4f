"""The draft's expert store and its torch expert path."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from specter_core.draft.draft_store import DraftExperts, draft_bytes, quantize_rtn
from specter_core.draft.experts import DraftExpertPath
from specter_core.draft.int4 import Int4Matrix, dequantize, unpack
from specter_core.errors import UserError
from specter_core.types import ExpertKey

HIDDEN, WIDTH, EXPERTS, CHOICES = 256, 128, 6, 3
CONFIG = SimpleNamespace(hidden=HIDDEN, expert_width=WIDTH, num_experts=EXPERTS, moe_layers=(1, 2))


def _weights(key: ExpertKey) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * key.layer + key.expert)
    return (
        torch.randn(WIDTH, HIDDEN, generator=generator) * 0.05,
        torch.randn(WIDTH, HIDDEN, generator=generator) * 0.05,
        torch.randn(HIDDEN, WIDTH, generator=generator) * 0.05,
    )


@pytest.fixture(scope="module")
def draft() -> DraftExperts:
    return quantize_rtn(_weights, CONFIG)


def _inputs(rows: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, HIDDEN, generator=generator)
    drawn = [torch.randperm(EXPERTS, generator=generator)[:CHOICES] for _ in range(rows)]
    ids = torch.stack(drawn).sort(dim=1).values
    return x, ids, torch.rand(rows, CHOICES, generator=generator)


def _dequantised(matrix: Int4Matrix, layer: int, expert: int) -> Tensor:
    return dequantize(Int4Matrix(matrix.codes[layer, expert], matrix.scales[layer, expert]))


def _reference(draft: DraftExperts, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """float64, pair by pair."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row in range(x.shape[0]):
        for expert, weight in zip(ids[row].tolist(), weights[row].tolist(), strict=True):
            if expert < 0:
                continue
            gate_up = _dequantised(draft.gate_up, layer, expert).double()
            down = _dequantised(draft.down, layer, expert).double()
            gate, up = (gate_up @ x[row].double()).chunk(2)
            out[row] += weight * (down @ (torch.nn.functional.silu(gate) * up))
    return out


@pytest.mark.parametrize("expand", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_path_matches_float64(draft: DraftExperts, fused: bool, expand: bool) -> None:
    path = DraftExpertPath(draft, fused=fused, expand=expand)
    x, ids, weights = _inputs(7)
    result = path.forward(1, x, ids, weights)
    reference = _reference(draft, 1, x, ids, weights)
    assert result.dtype == torch.float32
    assert (result.double() - reference).abs().max() <= 1e-5 * reference.abs().max()


def test_fused_and_unfused_agree(draft: DraftExperts) -> None:
    x, ids, weights = _inputs(16, seed=1)
    results = [DraftExpertPath(draft, fused=fused).forward(0, x, ids, weights) for fused in (True, False)]
    assert (results[0] - results[1]).abs().max() <= 1e-5


def test_a_row_of_the_fused_path_does_not_depend_on_the_others(draft: DraftExperts) -> None:
    path = DraftExpertPath(draft)
    x, ids, weights = _inputs(9, seed=2)
    together = path.forward(0, x, ids, weights)
    for row in range(9):
        alone = path.forward(0, x[row : row + 1], ids[row : row + 1], weights[row : row + 1])
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("fused", [True, False])
def test_id_minus_one_contributes_nothing(draft: DraftExperts, fused: bool) -> None:
    path = DraftExpertPath(draft, fused=fused)
    x, ids, weights = _inputs(4, seed=3)
    ids[1, 2], ids[2] = -1, -1
    x[2] = float("nan")
    result = path.forward(0, x, ids, weights)
    reference = _reference(draft, 0, x.nan_to_num(), ids, weights)
    assert not result[2].any()
    assert (result.double() - reference).abs().max() <= 1e-5


def test_bytes_count_codes_and_scales_only(draft: DraftExperts) -> None:
    weights = 2 * EXPERTS * 3 * HIDDEN * WIDTH
    assert draft.bytes == draft_bytes(CONFIG) == weights * 4125 // 8000
    DraftExpertPath(draft, expand=True)
    assert draft.bytes == draft_bytes(CONFIG)


def test_store_holds_gate_above_up(draft: DraftExperts) -> None:
    gate, up, down = _weights(ExpertKey(1, 4))
    stored = _dequantised(draft.gate_up, 1, 4)
    for found, true in ((stored[:WIDTH], gate), (stored[WIDTH:], up), (_dequantised(draft.down, 1, 4), down)):
        assert (found - true).square().mean() < 0.02 * true.square().mean()
    assert draft.kind == draft.card["method"] == "rtn"
    assert (draft.layers, draft.experts, draft.hidden, draft.width) == (2, EXPERTS, HIDDEN, WIDTH)


def test_noise_moves_codes_repeatably_and_leaves_scales(draft: DraftExperts) -> None:
    noisy, again, other = draft.with_noise(1.5, 1), draft.with_noise(1.5, 1), draft.with_noise(1.5, 2)
    assert torch.equal(noisy.gate_up.codes, again.gate_up.codes)
    assert not torch.equal(noisy.gate_up.codes, other.gate_up.codes)
    assert torch.equal(noisy.down.scales, draft.down.scales)
    changed = unpack(noisy.down.codes) != unpack(draft.down.codes)
    assert 0.5 < float(changed.float().mean()) < 0.9
    assert torch.equal(draft.with_noise(0.0, 1).down.codes, draft.down.codes)
    assert noisy.card["noise"] == {"sigma": 1.5, "seed": 1} and noisy.bytes == draft.bytes


@pytest.mark.parametrize("field", ["hidden", "expert_width"])
def test_partial_groups_are_refused(field: str) -> None:
    config = SimpleNamespace(**{**vars(CONFIG), field: 192})
    with pytest.raises(UserError, match="192"):
        quantize_rtn(_weights, config)
