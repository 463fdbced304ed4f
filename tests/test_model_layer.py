"""What a MoE layer hands to the experts and takes back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specter_core.model.checkpoint import Checkpoint
from specter_core.model.decoder import Decoder
from specter_core.model.rows import Rows
from specter_core.types import ExpertKey
from specter_core.verify.combine import combine_rows
from specter_core.verify.expert_ffn import expert_ffn
from tests.plain_model import PlainRoutedExperts, read_experts
from tests.tiny_models import FAMILIES, tiny_checkpoint

ROWS = Rows.decode([4, 0, 9], 5, [5, 0, 2])


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(request.param, tmp_path_factory.mktemp(request.param), layers=2)


@torch.no_grad()
def test_routing_is_ascending_and_invalid_rows_route_nothing(folder: Path) -> None:
    decoder = Decoder.load(folder, compute_dtype=torch.float32)
    layer = decoder.layers[-1]
    x = torch.randn(15, decoder.config.hidden, generator=torch.Generator().manual_seed(0))
    routing = layer.route(x, ROWS)
    valid = ROWS.valid.flatten()
    assert (routing.ids[~valid] == -1).all()
    assert (routing.ids[valid].diff(dim=1) > 0).all() and (routing.ids[valid] >= 0).all()
    assert routing.ids.shape == routing.weights.shape == (15, decoder.config.top_k)
    assert routing.ids.dtype == torch.int64 and routing.weights.dtype == torch.float32
    assert len(routing.ids[valid].unique()) > decoder.config.top_k, "a tiny router must be diverse"


@torch.no_grad()
def test_gate_scores_another_layers_hidden_state_as_route_would(folder: Path) -> None:
    decoder = Decoder.load(folder, compute_dtype=torch.float32)
    layer = decoder.layers[-1]
    x = torch.randn(5, decoder.config.hidden, generator=torch.Generator().manual_seed(1))
    scores = layer.gate(x)
    assert scores.shape == (5, decoder.config.num_experts) and scores.dtype == torch.float32
    best = scores.argmax(1)
    ids = layer.route(x, Rows.decode([0], 5)).ids
    assert all(int(best[row]) in ids[row].tolist() for row in range(5))


@torch.no_grad()
def test_plain_experts_equal_single_rows_combined_in_fixed_order_bit_by_bit(folder: Path) -> None:
    decoder = Decoder.load(folder, compute_dtype=torch.float32)
    with Checkpoint(folder) as checkpoint:
        weights = read_experts(checkpoint, decoder.config)
    layer = decoder.layers[-1]
    assert layer.moe_index is not None
    x = torch.randn(15, decoder.config.hidden, generator=torch.Generator().manual_seed(2))
    routing = layer.route(x, ROWS)
    out = torch.full((*routing.ids.shape, decoder.config.hidden), torch.nan)
    for row, ids in enumerate(routing.ids.tolist()):
        for choice, expert in enumerate(ids):
            if expert >= 0:
                key = ExpertKey(layer.moe_index, expert)
                out[row, choice] = expert_ffn(routing.normed[row : row + 1], *weights[key])[0]
    plain = PlainRoutedExperts(weights.__getitem__)(layer.moe_index, routing)
    assert torch.equal(plain, combine_rows(out, routing.weights, routing.ids))
    assert not plain[~ROWS.valid.flatten()].any()
