"""SpecMoEOff on the engine's parts: exact output, memory spent twice, prefetch at two fractions, cost-model depth,
whole layers streamed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_engine_exactness import replace_draft

from baselines.specmoeoff import draft_length
from baselines.specmoeoff.cost_model import GRID, CostModel, LinearCost, Overlap, expected_tokens
from baselines.specmoeoff.draft_length import CostModelDepth
from baselines.specmoeoff.frequency_prefetch import FrequencyPrefetch, stops
from baselines.specmoeoff.layer_streaming import RingCache
from baselines.specmoeoff.system import VARIANTS, SpecMoEOff, create
from harness.system import MemorySpec, ModelSpec
from harness.systems import engine_system
from specter_core.assembly import build_engine, fixed_parts, slot_plan
from specter_core.draft.draft_pass import DraftPass
from specter_core.errors import UserError
from specter_core.memory.budget import SlotPlan
from specter_core.opening import LoadedModel, open_model
from specter_core.options import EngineOptions
from specter_core.types import ExpertKey, Request, WindowStats
from tests.tiny_models import tiny_checkpoint

FAMILIES = ("deepseek_v2", "qwen2_moe")
LAYERS, EXPERTS, NEW_TOKENS, CONTEXT = 4, 8, 10, 48
REQUESTS = [Request(f"r{i}", tuple(range(5 + i, 18 + 3 * i)), NEW_TOKENS, ignore_eos=True) for i in range(3)]
NOISE = 1.0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LoadedModel]]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tiny")
    with ExitStack() as stack:
        found = {}
        for family in FAMILIES:
            checkpoint = tiny_checkpoint(family, folder, seed=5, layers=LAYERS, experts=EXPERTS)
            loaded = stack.enter_context(open_model(checkpoint, rtn_if_missing=True))
            found[family] = replace_draft(loaded, NOISE)
        yield found


@pytest.fixture(scope="module")
def model(models: dict[str, LoadedModel]) -> LoadedModel:
    return models[FAMILIES[0]]


@pytest.fixture(scope="module")
def expected(models: dict[str, LoadedModel]) -> dict[str, list[tuple[int, ...]]]:
    """Tokens of the plain target: K = 0, B = 1, all experts resident."""
    found = {}
    for family, loaded in models.items():
        with build_engine(loaded, EngineOptions(depth=0, context_tokens=CONTEXT)) as engine:
            found[family] = [tuple(engine.generate([r]).results[0].tokens) for r in REQUESTS]
    return found


def memory(model: LoadedModel, slots: float, batch: int = 1, rate: float | None = 4e9) -> MemorySpec:
    """Specter's bytes for `slots` slots per layer, plus those of a second copy of the shared tensors and the KV."""
    layers = len(model.decoder.config.moe_layers)
    alone = EngineOptions(depth=8, context_tokens=CONTEXT, max_batch=batch, shared_kv=False, shared_weights=False)
    budget = sum(fixed_parts(model, alone).values()) + int(slots * layers) * model.store.layout.entry_bytes
    return MemorySpec("test", budget, None, "scaled", rate, batch=batch, max_sequence=CONTEXT)


@contextmanager
def running(model: LoadedModel, options: dict[str, Any], spec: MemorySpec) -> Iterator[SpecMoEOff]:
    """The system on a model that is loaded already."""
    patch = pytest.MonkeyPatch()
    patch.setattr(engine_system, "open_model", lambda *_, **__: model)
    patch.setattr(LoadedModel, "close", lambda _: None)
    patch.setattr(draft_length, "CALIBRATION", (2, 5))
    patch.setattr(draft_length, "ROUNDS", 2)
    system = create(options)
    try:
        system.load(ModelSpec("tiny", "", "", None, "reference", "bfloat16", "hash"), spec)
        yield system
    finally:
        system.close()
        patch.undo()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_output_is_the_targets(
    models: dict[str, LoadedModel],
    expected: dict[str, list[tuple[int, ...]]],
    family: str,
    variant: str,
    batch: int,
) -> None:
    model = models[family]
    with running(model, {"variant": variant}, memory(model, 4, batch)) as system:
        assert system._engine is not None and system._engine.options.verify == (
            "microbatches" if batch > 1 else "expertwise"
        )
        found = [r for i in range(0, 3, batch) for r in system.generate(REQUESTS[i : i + batch])]
        assert [r.tokens for r in found] == expected[family]
        assert {r.variant for r in found} == {variant} and all(2 <= r.depth <= 32 for r in found)
        system._engine.experts.cache.check_integrity()


def test_a_draft_that_shares_nothing_leaves_fewer_slots_in_the_same_budget(model: LoadedModel) -> None:
    spec = memory(model, 3)
    assert spec.budget_bytes is not None
    options = EngineOptions(depth=32, context_tokens=CONTEXT)
    specter = slot_plan(model, options, None, spec.budget_bytes)
    engines = {}
    for variant in ("adapted", "shared_weights"):
        with running(model, {"variant": variant}, spec) as system:
            assert system._engine is not None
            engines[variant] = system._engine.slots
    own, lent = engines["adapted"], engines["shared_weights"]
    assert own.slots < specter.slots and own.mean_slots == 3 < lent.mean_slots
    assert own.parts["draft_shared"] == own.parts["shared"] == specter.parts["shared"]
    assert own.parts["kv"] == 2 * specter.parts["kv"] == 2 * lent.parts["kv"] and "draft_shared" not in lent.parts
    assert own.total <= spec.budget_bytes and len(set(own.slots_per_layer)) == 1 and own.staging == 0


def test_a_setting_in_slots_gives_the_bytes_that_specter_needs_for_them(model: LoadedModel) -> None:
    with running(
        model, {"variant": "shared_weights"}, replace(memory(model, 1), budget_bytes=None, slots_per_layer=3)
    ) as s:
        assert s._engine is not None and s._engine.slots.mean_slots == 3


def test_private_kv_gets_the_last_draft_token_after_full_acceptance(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    perfect = replace_draft(model, 0.0)
    caught: list[int] = []
    original = DraftPass._catch_up

    def spy(self: DraftPass) -> None:
        caught.append(sum(n > reach for n, reach in zip(self.boundaries, self.reach, strict=True)))
        original(self)

    monkeypatch.setattr(DraftPass, "_catch_up", spy)
    with running(perfect, {"grid": [2]}, memory(model, 4)) as system:
        caught.clear()
        assert system._engine is not None
        windows = system._engine.generate(REQUESTS[:1]).windows
    full = [w.accepted == w.depth for w in windows]
    assert sum(full[:-1]) > 0
    assert caught == [0, *(int(done) for done in full[: len(caught) - 1])]


def test_prefetch_is_planned_at_exactly_the_two_fractions(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    original = FrequencyPrefetch.plan

    def spy(self: FrequencyPrefetch, counters: torch.Tensor, *args: Any) -> Any:
        top_k = model.decoder.config.top_k
        seen.append((self.depth, int(counters[0].sum()) // top_k))
        plan = original(self, counters, *args)
        slots = len(args[0].layer_slots(0))
        assert all(sum(k.layer == layer for k in plan.order) <= slots for layer in range(counters.shape[0]))
        return plan

    monkeypatch.setattr(FrequencyPrefetch, "plan", spy)
    with running(replace_draft(model, 6.0), {"grid": [8]}, memory(model, 3)) as system:
        seen.clear()
        assert system._engine is not None
        windows = system._engine.generate(REQUESTS[:1]).windows
    assert (8, 2) in seen and (8, 5) in seen
    assert seen == [(w.depth, t) for w in windows for t in stops(w.depth)]
    assert [w.chunks for w in windows] == [len(stops(w.depth)) for w in windows]
    assert sum(w.prefetch_issued for w in windows) > 0


@given(depth=st.integers(0, 40), fractions=st.lists(st.floats(0.05, 0.95), min_size=1, max_size=3))
def test_stops_lie_inside_the_draft(depth: int, fractions: list[float]) -> None:
    found = stops(depth, fractions)
    assert found == sorted(set(found)) and len(found) <= len(fractions)
    assert all(1 <= t < depth and min(abs(t - f * depth) for f in fractions) <= 1 for t in found)
    assert len(stops(depth)) == (2 if depth >= 3 else depth // 2)


def cost_model(draft_ms: float = 1.0, entry_ms: float = 0.5) -> CostModel:
    model = CostModel(entry_ms, Overlap(0.8, 100))
    for x in (1, 33):
        model.draft_ms.add(x, draft_ms * x)
        model.target_ms.add(x, 20 + 0.1 * x)
        model.loads.add(x, 30 + x)
    return model


@given(st.floats(0, 0.99), st.floats(0, 0.99), st.integers(1, 4))
def test_higher_acceptance_never_shortens_the_draft(a: float, b: float, sequences: int) -> None:
    low, high = sorted((a, b))
    assert cost_model().best_depth(low, sequences) <= cost_model().best_depth(high, sequences)


def test_the_draft_grows_with_acceptance_and_shrinks_with_a_slower_draft() -> None:
    by_acceptance = [cost_model().best_depth(a, 1) for a in (0.3, 0.8, 0.95, 1.0)]
    by_step = [cost_model(draft_ms=ms).best_depth(0.9, 1) for ms in (0.2, 2.0, 20.0)]
    assert by_acceptance == sorted(by_acceptance) and by_acceptance[0] == GRID[0] and by_acceptance[-1] == GRID[-1]
    assert by_step == sorted(by_step, reverse=True) and by_step[0] > by_step[-1] == GRID[0]


@given(st.floats(0, 20), st.floats(0, 5), st.lists(st.integers(0, 200), min_size=2, max_size=8, unique=True))
def test_a_line_is_found_again_and_an_outlier_does_not_bend_it(fixed: float, slope: float, xs: list[int]) -> None:
    line = LinearCost()
    for x in xs:
        for _ in range(3):
            line.add(x, fixed + slope * x)
    line.add(xs[0], 1e6)
    assert line.at(100) == pytest.approx(fixed + slope * 100, rel=1e-6, abs=1e-6)


def test_expected_tokens_is_the_sum_of_the_chances_to_get_that_far() -> None:
    assert expected_tokens(0.5, 3) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert expected_tokens(1.0, 3) == 4 and expected_tokens(0.0, 3) == 1


def test_depth_follows_the_acceptance_that_is_observed() -> None:
    def settle(accepted: int) -> int:
        policy = CostModelDepth(cost_model(), accesses_per_row=6, entry_bytes=100)
        for _ in range(40):
            k = policy.depth()
            tested = min(k, accepted + 1)
            stats = WindowStats(depth=k, drafted=k, tested=tested, accepted=min(k, accepted), accesses=6 * (k + 1))
            stats.draft_ms, stats.verify_ms, stats.h2d_bytes = 1.0 * k, 20 + 0.1 * (k + 1), 100 * (31 + k)
            policy.observe(stats)
        assert policy.calibrated and policy.model.draft_ms.points >= 2
        return policy.depth()

    assert settle(0) == GRID[0] < settle(4) < settle(40)


def test_two_halves_of_the_batch_share_one_cache_and_are_computed_in_turn(model: LoadedModel) -> None:
    with running(model, {}, memory(model, 4, batch=3)) as system:
        assert system._engine is not None
        experts = system._engine.experts
        experts.begin_pass(3)
        assert experts._groups(15) == [list(range(10)), list(range(10, 15))]
        experts.begin_pass()
        assert experts._groups(4) == [[0, 1, 2, 3]], "prefill is one request at a time"


def test_streaming_moves_every_expert_of_every_layer_in_every_pass(model: LoadedModel) -> None:
    with running(model, {"variant": "streaming"}, memory(model, 8)) as system:
        engine = system._engine
        assert engine is not None
        engine.reset_cache()
        moved: list[ExpertKey] = []
        original = engine.experts.loader.load

        def spy(key: ExpertKey, *args: Any) -> Any:
            moved.append(key)
            return original(key, *args)

        engine.experts.loader.load = spy  # type: ignore[method-assign]
        windows = engine.generate(REQUESTS[:1]).windows
        engine.experts.loader.drain()
        config = model.decoder.config
        layers, passes = len(config.moe_layers), len(windows) + 1  # with prefill
        counts = Counter(moved)
        assert all(counts[ExpertKey(layer, e)] == passes for layer in range(1, layers) for e in range(EXPERTS))
        assert all(counts[ExpertKey(0, e)] == passes + 1 for e in range(EXPERTS)), "ready for the next pass"
        assert engine.slots.slots == 2 * EXPERTS and sum(sum(w.misses) for w in windows) == 0
        order = [key.layer for key in moved[: layers * EXPERTS]]
        assert order == sorted(order)


def test_streaming_starts_the_next_layer_before_this_one_is_computed(model: LoadedModel) -> None:
    with running(model, {"variant": "streaming"}, memory(model, 8, rate=1e8)) as system:
        engine = system._engine
        assert engine is not None
        engine.reset_cache()
        cache, seen, layers = engine.experts.cache, [], len(model.decoder.config.moe_layers)
        original = engine.prefetcher.before_layer

        def spy(layer: int, needed: Any) -> Any:
            late = original(layer, needed)
            following = (ExpertKey((layer + 1) % layers, e) for e in range(EXPERTS))
            seen.append((layer, all(cache.lookup(key) is not None for key in following)))
            return late

        engine.prefetcher.before_layer = spy  # type: ignore[method-assign]
        engine.generate(REQUESTS[:1])
        assert all(under_way for layer, under_way in seen if layer < layers - 1) and len(seen) >= 2 * layers


@pytest.mark.parametrize("slots", [8, 11, 16])
def test_ring_slots_of_a_layer_are_distinct_and_two_layers_meet_only_when_they_must(slots: int) -> None:
    plan = SlotPlan((slots // 4 + 1,) * (slots % 4) + (slots // 4,) * (4 - slots % 4), 0)
    ring = RingCache(plan, 8)
    for layer in range(3):
        own, following = set(ring.layer_slots(layer)), set(ring.layer_slots(layer + 1))
        assert len(own) == 8 and own <= set(range(slots))
        assert len(own & following) == max(0, 16 - slots)


def test_a_ring_of_less_than_two_layers_streams_exactly_too(
    model: LoadedModel, expected: dict[str, list[tuple[int, ...]]]
) -> None:
    layers = len(model.decoder.config.moe_layers)
    with running(model, {"variant": "streaming"}, memory(model, 11 / layers, batch=3)) as system:
        assert system._engine is not None and system._engine.slots.slots == 11
        assert [r.tokens for r in system.generate(REQUESTS)] == expected[FAMILIES[0]]


def test_streaming_below_one_layer_is_refused_with_both_numbers(model: LoadedModel) -> None:
    with (
        pytest.raises(UserError, match=r"leaves 5 slots, streaming needs 8.*raise the budget"),
        running(model, {"variant": "streaming"}, memory(model, 5.01 / len(model.decoder.config.moe_layers))),
    ):
        pass


@pytest.mark.parametrize(
    ("options", "text"),
    [({"variant": "x"}, "variant 'x'"), ({"colour": 1}, "option 'colour'"), ({"grid": [40]}, "no draft length")],
)
def test_bad_options_are_refused_in_one_line(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        create(options)
