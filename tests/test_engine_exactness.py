"""Greedy output equals the plain target's, token for token, at any K, M, B, with every switch either way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specter_core.assembly import build_engine
from specter_core.errors import UserError
from specter_core.opening import LoadedModel, open_model
from specter_core.options import EngineOptions
from specter_core.types import GenerationRun, Request
from tests.tiny_models import tiny_checkpoint

FAMILIES = ("deepseek_v2", "qwen2_moe", "phimoe")
NEW_TOKENS = 24
BASE = EngineOptions(depth=0, context_tokens=96, max_batch=3, prefill_chunk_tokens=10)
REQUESTS = [Request(f"r{i}", tuple(range(5 + i, 18 + 3 * i)), NEW_TOKENS, ignore_eos=True) for i in range(3)]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    torch.set_num_threads(1)
    folder = tiny_checkpoint(request.param, tmp_path_factory.mktemp("tiny"), seed=3, layers=3, experts=8)
    with open_model(folder, rtn_if_missing=True, noise=0.3) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def expected(model: LoadedModel) -> dict[str, list[int]]:
    """Tokens of the plain target: K = 0, B = 1, all experts resident."""
    with build_engine(model, BASE) as engine:
        return {r.request_id: engine.generate([r]).results[0].tokens for r in REQUESTS}


def run(model: LoadedModel, options: EngineOptions, slots: int, batch: int, rate: float | None = 4e9) -> GenerationRun:
    results, windows = [], []
    with build_engine(model, options, slots_per_layer=slots, rate_bytes_per_s=rate) as engine:
        for start in range(0, len(REQUESTS), batch):
            part = engine.generate(REQUESTS[start : start + batch])
            results += part.results
            windows += part.windows
        engine.experts.cache.check_integrity()
    return GenerationRun(results, windows)


def assert_exact(found: GenerationRun, expected: dict[str, list[int]]) -> None:
    assert {r.request_id: r.tokens for r in found.results} == expected


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(depth=st.integers(0, 9), slots=st.integers(1, 8), batch=st.integers(1, 3), paper=st.booleans())
def test_greedy_tokens_equal_the_targets_at_any_depth_slots_and_batch(
    model: LoadedModel, expected: dict[str, list[int]], depth: int, slots: int, batch: int, paper: bool
) -> None:
    options = replace(BASE, depth=depth)
    assert_exact(run(model, options.paper() if paper else options, slots, batch), expected)


@pytest.mark.parametrize(
    "switch",
    [
        {"prefetch": False},
        {"fused_kernel": False},
        {"hit_first": False},
        {"verify": "tokenwise"},
        {"verify": "microbatches"},
        {"shared_weights": False},
        {"shared_kv": False},
        {"prefetch_under_verify": False},
        {"uniform_slots": True, "staging_slots": 0},
        {"eviction": "lru"},
        {"eviction": "count_then_recency"},
        {"planning": "top_m"},
        {"stage_ahead": False},
        {"staging_slots": 0},
        {"initial_chunk_tokens": 1},
    ],
    ids=lambda s: ",".join(f"{k}={v}" for k, v in s.items()),
)
def test_no_switch_changes_a_token(
    model: LoadedModel, expected: dict[str, list[int]], switch: dict[str, object]
) -> None:
    assert_exact(run(model, replace(BASE, depth=5, **switch), slots=2, batch=2), expected)  # type: ignore[arg-type]


def test_noisy_draft_is_rejected_and_corrected(model: LoadedModel, expected: dict[str, list[int]]) -> None:
    worse = replace_draft(model, sigma=3.0)
    found = run(worse, replace(BASE, depth=6), slots=3, batch=3)
    assert_exact(found, expected)
    assert sum(r.accepted for r in found.results) < sum(r.tested for r in found.results)


def replace_draft(model: LoadedModel, sigma: float) -> LoadedModel:
    assert model.draft is not None
    return LoadedModel(model.decoder, model.store, model.draft.with_noise(sigma, seed=1))


def test_every_access_is_a_hit_when_all_experts_are_resident(model: LoadedModel) -> None:
    with build_engine(model, replace(BASE, depth=4)) as engine:
        engine.generate(REQUESTS[:1])
        second = engine.generate(REQUESTS[:1])
    known = sum(sum(w.misses) + sum(w.late) for w in second.windows)
    assert known == 0 and all(w.accesses == w.access_hits > 0 for w in second.windows)


def test_window_counts_are_consistent(model: LoadedModel) -> None:
    found = run(model, replace(BASE, depth=4), slots=2, batch=2)
    for w in found.windows:
        assert [h + x + m for h, x, m in zip(w.hits, w.late, w.misses, strict=True)] == w.distinct
        assert w.accepted <= w.tested <= w.drafted
        assert w.prefetch_used <= w.prefetch_issued and w.absent_planned <= w.absent
        assert w.h2d_bytes_used <= w.h2d_bytes + 8 * model.store.layout.entry_bytes
        assert w.accepted + 1 <= w.committed + w.drafted
    assert sum(w.h2d_bytes for w in found.windows) > 0
    assert sum(w.committed for w in found.windows) == sum(len(r.tokens) - 1 for r in found.results)


def test_prefetches_are_issued_and_used(model: LoadedModel) -> None:
    found = run(model, replace(BASE, depth=6), slots=2, batch=1)
    assert 0 < sum(w.prefetch_used for w in found.windows) <= sum(w.prefetch_issued for w in found.windows)


def test_slow_link_gives_several_adaptive_chunks(model: LoadedModel, expected: dict[str, list[int]]) -> None:
    """A fast link makes chunks short: planning happens at several boundaries of a window."""
    found = run(model, replace(BASE, depth=9), slots=4, batch=1, rate=1e11)
    assert_exact(found, expected)
    assert max(w.chunks for w in found.windows) >= 2


@pytest.mark.parametrize("paper", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3, 9])
def test_steps_enqueued_beyond_a_boundary_change_no_token(
    model: LoadedModel, expected: dict[str, list[int]], depth: int, paper: bool
) -> None:
    """As on a device, where the host plans for counters that are older than what has been enqueued."""
    options = replace(BASE, depth=depth)
    with build_engine(model, options.paper() if paper else options, slots_per_layer=3, rate_bytes_per_s=1e11) as engine:
        engine._ahead = 2
        found = [engine.generate([r]) for r in REQUESTS]
        engine.experts.cache.check_integrity()
    assert {r.request_id: r.tokens for run in found for r in run.results} == expected
    if depth == 9 and not paper:
        assert max(w.chunks for run in found for w in run.windows) >= 2


def test_finished_rows_route_nothing_and_move_nothing(model: LoadedModel) -> None:
    short = replace(REQUESTS[0], max_new_tokens=1)
    with build_engine(model, replace(BASE, depth=4), slots_per_layer=2) as engine:
        alone = engine.generate([REQUESTS[1]])
        engine.reset_cache()
        beside = engine.generate([short, REQUESTS[1]])
    assert [w.accesses for w in beside.windows] == [w.accesses for w in alone.windows]
    assert beside.results[1].tokens == alone.results[0].tokens


def test_after_a_reset_nothing_is_left_of_what_was_routed(model: LoadedModel) -> None:
    with build_engine(model, replace(BASE, depth=4), slots_per_layer=3) as engine:
        assert engine.experts.history is not None
        fresh = engine.experts.history.rate.copy()
        engine.generate([REQUESTS[0]])
        assert (engine.experts.history.rate != fresh).any()
        engine.reset_cache()
        assert (engine.experts.history.rate == fresh).all()
        assert not engine.experts.cache.present()


def test_sampled_tokens_do_not_depend_on_the_batch(model: LoadedModel) -> None:
    hot = [replace(r, temperature=0.8, top_p=0.9, seed=5) for r in REQUESTS]
    with build_engine(model, replace(BASE, depth=3), slots_per_layer=3) as engine:
        alone = [engine.generate([r]).results[0].tokens for r in hot]
        together = [r.tokens for r in engine.generate(hot).results]
    assert together == alone


def test_end_of_sequence_stops_a_row_and_not_its_neighbour(model: LoadedModel, expected: dict[str, list[int]]) -> None:
    with build_engine(model, replace(BASE, depth=5), slots_per_layer=3) as engine:
        stop = expected["r0"][3]
        engine.decoder.config = replace(engine.decoder.config, eos_ids=(stop,))
        first, second = engine.generate([replace(REQUESTS[0], ignore_eos=False), REQUESTS[1]]).results
        engine.decoder.config = replace(engine.decoder.config, eos_ids=())
    assert first.tokens == expected["r0"][: expected["r0"].index(stop) + 1]
    assert second.tokens == expected["r1"]


def test_batch_larger_than_the_engine_is_refused_with_both_numbers(model: LoadedModel) -> None:
    with build_engine(model, BASE, slots_per_layer=1) as engine, pytest.raises(UserError, match=r"batch of 4.*1 … 3"):
        engine.generate([*REQUESTS, REQUESTS[0]])


def test_depth_without_a_draft_is_refused(model: LoadedModel) -> None:
    bare = LoadedModel(model.decoder, model.store, None)
    with pytest.raises(UserError, match="depth 4 needs a draft"):
        build_engine(bare, replace(BASE, depth=4), slots_per_layer=1)


def test_draft_and_target_attend_the_same_storage(model: LoadedModel) -> None:
    with build_engine(model, replace(BASE, depth=2), slots_per_layer=2) as engine:
        engine.generate(REQUESTS[:1])
        assert engine.draft is not None and engine.draft.kv is engine.kv
        assert engine.draft.decoder is engine.target.decoder
    with build_engine(model, replace(BASE, depth=2, shared_kv=False), slots_per_layer=2) as engine:
        engine.generate(REQUESTS[:1])
        assert engine.draft is not None and engine.draft.kv is not engine.kv
