"""Speculative sampling preserves the target's distribution; random numbers depend on their key alone."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from specter_core.errors import UserError
from specter_core.state.rng import Purpose, request_key, uniform
from specter_core.state.sampling import SamplingParams, SpeculativeSampler, draw, filtered_probs
from specter_core.types import Request

VOCAB = 12


def params(n: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, seed: int = 0) -> SamplingParams:
    return SamplingParams.of(
        [Request(f"r{i}", (1,), 4, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed) for i in range(n)]
    )


def test_philox_reproduces_the_published_known_answer() -> None:
    # Random123 kat_vectors: philox4x32-10, counter 0, key 0 -> 6627e8d5 e169c58d bc57ac4c 9b00dbd8
    from specter_core.state.rng import _philox

    zero = torch.zeros(1, dtype=torch.int64)
    assert int(_philox(zero, zero, zero, zero, zero, zero)) == 0x6627E8D5


def test_uniform_numbers_are_uniform_and_independent_between_purposes() -> None:
    key = torch.tensor(request_key(3, "a"))
    positions = torch.arange(20_000)
    draft, target = (uniform(key, positions, p) for p in (Purpose.DRAFT, Purpose.TARGET))
    assert stats.kstest(draft.numpy(), "uniform").pvalue > 1e-3
    assert abs(float(torch.corrcoef(torch.stack([draft, target]))[0, 1])) < 0.03
    assert float(draft.min()) > 0 and float(draft.max()) < 1


def test_uniform_number_does_not_depend_on_its_batch() -> None:
    keys = torch.tensor([request_key(0, name) for name in "abc"])
    together = uniform(keys, torch.tensor([5, 6, 7]), Purpose.ACCEPT)
    alone = [uniform(keys[i], torch.tensor([5 + i]), Purpose.ACCEPT) for i in range(3)]
    assert torch.equal(together, torch.cat(alone))


def test_filter_keeps_the_smallest_set_that_reaches_top_p() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    one, p, k = torch.ones(1), torch.tensor([0.7]), torch.zeros(1, dtype=torch.int64)
    assert torch.allclose(filtered_probs(logits, one, p, k), torch.tensor([[0.625, 0.375, 0, 0]]))
    k = torch.tensor([3])
    expected = torch.tensor([[0.5, 0.3, 0.15, 0.0]]) / 0.95
    assert torch.allclose(filtered_probs(logits, one, one, k), expected)


def test_greedy_filter_is_one_hot_at_the_lowest_id_of_a_tie() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]])
    zero = torch.zeros(1)
    row = filtered_probs(logits, zero, torch.ones(1), torch.zeros(1, dtype=torch.int64))
    assert row.tolist() == [[0, 1, 0, 0]]


def test_draw_never_returns_a_token_without_mass() -> None:
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).expand(1000, -1)
    tokens = draw(probs, torch.linspace(1e-6, 1 - 1e-6, 1000))
    assert set(tokens.tolist()) == {1, 3}


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.7, 0.8, 0), (1.3, 1.0, 5)])
def test_verified_token_follows_the_target_distribution(temperature: float, top_p: float, top_k: int) -> None:
    """Chi-square over the first committed token of many one-token windows with a draft far from the target."""
    generator = torch.Generator().manual_seed(1)
    target = torch.randn(1, 2, VOCAB, generator=generator) * 1.5
    draft = target[:, 0] + torch.randn(1, VOCAB, generator=generator)
    n = 2500
    settings = params(1, temperature, top_p, top_k)
    q = filtered_probs(draft, settings.temperature, settings.top_p, settings.top_k)
    counts = torch.zeros(VOCAB)
    accepted = 0
    for position in range(n):
        one = SpeculativeSampler(settings)
        token = draw(q, uniform(settings.keys, torch.tensor([position]), Purpose.DRAFT))
        verdict = one.judge(target, token[None], q[None], [1], [position])
        first = int(token) if verdict.accepted[0] else verdict.next_token[0]
        accepted += verdict.accepted[0]
        counts[first] += 1
    p = filtered_probs(target[:, 0], settings.temperature, settings.top_p, settings.top_k)[0]
    support = p > 0
    assert counts[~support].sum() == 0
    assert 0 < accepted < n
    result = stats.chisquare(counts[support].numpy(), (p[support].double() / p[support].double().sum() * n).numpy())
    assert result.pvalue > 1e-3
    overlap = float(torch.minimum(p, q[0]).sum())  # expected acceptance (Leviathan et al., 2023, corollary 3.6)
    assert accepted / n == pytest.approx(overlap, abs=0.03)


def test_residual_of_equal_distributions_falls_back_to_the_target() -> None:
    """p = q never rejects on its own; a forced rejection must still return a token of the target."""
    settings = params(1)
    logits = torch.zeros(1, 2, VOCAB)
    q = torch.full((1, 1, VOCAB), 2.0 / VOCAB)  # scaled up so that the ratio p/q rejects about half of the time
    outcomes = [SpeculativeSampler(settings).judge(logits, torch.tensor([[3]]), q, [1], [i]) for i in range(200)]
    rejected = [v.next_token[0] for v in outcomes if v.accepted[0] == 0]
    assert rejected and all(0 <= t < VOCAB for t in rejected)


def test_greedy_rows_accept_up_to_the_first_difference() -> None:
    logits = torch.zeros(2, 4, VOCAB)
    for b, tokens in enumerate([[4, 5, 6, 7], [1, 2, 3, 8]]):
        for i, token in enumerate(tokens):
            logits[b, i, token] = 1
    verdict = SpeculativeSampler(params(2, 0.0)).judge(
        logits, torch.tensor([[4, 5, 9], [1, 2, 3]]), None, [3, 3], [0, 0]
    )
    assert verdict == ([3, 3], [2, 3], [6, 8])


def test_finished_rows_are_skipped() -> None:
    verdict = SpeculativeSampler(params(1, 0.0)).judge(
        torch.full((1, 1, VOCAB), float("nan")), torch.zeros(1, 0), None, [-1], [0]
    )
    assert verdict == ([0], [0], [-1])


@pytest.mark.parametrize(("field", "value"), [("temperature", -1.0), ("top_p", 0.0), ("top_p", 1.5), ("top_k", -2)])
def test_bad_sampling_values_name_the_value_and_the_remedy(field: str, value: float) -> None:
    request = Request("r", (1,), 1, **{field: value})
    with pytest.raises(UserError, match=rf"{field} {value}.*use"):
        SamplingParams.of([request])


def test_nan_logits_are_a_user_error_not_a_token() -> None:
    with pytest.raises(UserError, match=f"{VOCAB} NaN of {VOCAB}"):
        SpeculativeSampler(params(1, 0.0)).judge(
            torch.full((1, 1, VOCAB), float("nan")), torch.zeros(1, 0, dtype=torch.int64), None, [0], [0]
        )
