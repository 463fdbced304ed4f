"""Synthetic weights do not make it easy (small shapes of the same construction; at full size: scripts/gpu)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.synthetic import open_synthetic, spec_for
from harness.synthetic.measure import behaviour, distinct, reuse, token_lru
from harness.synthetic.vocabulary import walk
from specter_core.assembly import build_engine
from specter_core.options import EngineOptions
from specter_core.types import Request

SHAPE = {"hidden": 256, "width": 256, "layers": 5, "experts": 16, "vocab": 6000, "topic_dims": 16}
OWN = {"small_qwen2_moe": {"experts": 60, "layers": 8, "width": 128}}  # the routing of Qwen1.5-MoE: 4 of 60
SMALL = ("small_deepseek_v2", "small_qwen2_moe", "small_phimoe")


@pytest.fixture(scope="module")
def found():
    torch.set_num_threads(1)
    made = {}
    for name in SMALL:
        spec = spec_for(name, **SHAPE | OWN.get(name, {}))
        made[name] = behaviour(spec, "cpu", walk(spec, 2, 110), slots=(2, 4, 8), noises=(1.0, 2.5))
    return made


@pytest.mark.parametrize("name", SMALL)
def test_without_routed_experts_at_least_half_of_the_greedy_tokens_change(found, name):
    assert found[name].zeroed_change >= 0.5


@pytest.mark.parametrize("name", SMALL)
def test_a_noisier_draft_is_accepted_less(found, name):
    clean, some, much = found[name].acceptance, *found[name].noisy_acceptance.values()
    assert 0.85 < clean <= 1 and clean > some > much


def test_draft_and_target_routers_disagree_about_as_often_as_published_for_qwen(found):
    assert 0.87 <= found["small_qwen2_moe"].set_agreement <= 0.95  # published: 0.91


@pytest.mark.parametrize("name", SMALL)
def test_every_greedy_token_is_a_candidate_successor_and_no_class_wins_always(found, name):
    assert found[name].candidates > 0.98 and max(found[name].classes) < 0.5


@pytest.mark.parametrize("name", SMALL)
def test_consecutive_tokens_share_experts_more_often_than_by_chance_but_not_all(found, name):
    config = spec_for(name, **SHAPE | OWN.get(name, {})).model_config
    assert config.top_k / config.num_experts < found[name].reuse < 0.7


def test_noise_in_the_draft_costs_acceptance_in_the_engine_and_no_token():
    spec = spec_for("small_qwen2_moe", **SHAPE | {"layers": 3, "experts": 8, "width": 128})
    request = Request("r", (5, 77, 300), 64, ignore_eos=True)
    rates, texts = [], []
    with open_synthetic(spec, "cpu") as clean, open_synthetic(spec, "cpu", clean.store.handle, noise=2.5) as noisy:
        for model in (clean, noisy):
            with build_engine(model, EngineOptions(depth=6, context_tokens=96)) as engine:
                result = engine.generate([request]).results[0]
            rates.append(result.accepted / result.tested)
            texts.append(result.tokens)
    assert rates[1] < rates[0] and texts[0] == texts[1]
    assert len(set(texts[0])) == len(texts[0])  # no cycle


def test_statistics_of_a_trace_by_hand():
    ids = np.array([[0, 1], [0, 2], [3, 1], [0, 1]])[None, None]  # [L, B, T, k]
    assert reuse(ids) == pytest.approx(2 / 6)  # 0; none; 1
    assert distinct(ids, 2) == pytest.approx(3.0)  # {0, 1, 2}, {0, 1, 3}
    found = token_lru(np.repeat(ids, 1, axis=2), (2, 4))
    assert found[2] == pytest.approx(2 / 8) and found[4] == pytest.approx(4 / 8)
