"""CPU executor: whatever slots, order and link, the bits are those of a plain loop over experts."""

from __future__ import annotations

import random
import tempfile

import pytest
import torch
from control_plane import ManualLink, expert_ffn, filled_store
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specter_core.errors import WrongExpertError
from specter_core.memory.eviction import count_then_recency, lru
from specter_core.memory.expert_cache import ExpertCache
from specter_core.memory.expert_loader import ExpertLoader
from specter_core.memory.host_store import HostExpertStore
from specter_core.memory.link import Priority
from specter_core.memory.link_cpu import CpuLink
from specter_core.memory.payload import PayloadLayout
from specter_core.memory.slot_buffer import SlotBuffer
from specter_core.types import ExpertKey
from specter_core.verify.combine import combine_rows
from specter_core.verify.executor_cpu import CpuLayerExecutor
from specter_core.verify.ops import Gemm
from specter_core.verify.residency import ResidencyManager

LAYOUT = PayloadLayout(8, 4, torch.bfloat16)
LAYERS, EXPERTS, TOP_K = 2, 6, 2


@pytest.fixture(scope="module")
def store():
    made = filled_store(LAYERS, EXPERTS, LAYOUT, tempfile.gettempdir())
    yield made
    made.unlink()


def plain_loop(store: HostExpertStore, layer: int, normed: Tensor, ids: Tensor) -> Tensor:
    """[R, k, H] float32 by definition: one expert call per (row, choice)."""
    out = torch.zeros(*ids.shape, LAYOUT.hidden)
    for row in range(ids.shape[0]):
        for choice in range(ids.shape[1]):
            expert = int(ids[row, choice])
            if expert >= 0:
                views = LAYOUT.views(store.entry(ExpertKey(layer, expert)))
                out[row, choice] = expert_ffn(normed[row : row + 1], *views)[0]
    return out


def routing(rng: random.Random, rows: int) -> Tensor:
    """ids [R, k] ascending per row; some rows are padding."""
    ids = [sorted(rng.sample(range(EXPERTS), TOP_K)) if rng.random() < 0.9 else [-1] * TOP_K for _ in range(rows)]
    return torch.tensor(ids, dtype=torch.int64)


def needed_of(ids: Tensor) -> dict[int, int]:
    flat = sorted(e for e in ids.reshape(-1).tolist() if e >= 0)
    return {e: flat.count(e) for e in flat}


@settings(max_examples=40, deadline=None)
@given(
    slots=st.integers(1, EXPERTS),
    staging=st.integers(0, 2),
    hit_first=st.booleans(),
    tokenwise=st.booleans(),
    policy=st.sampled_from([lru, count_then_recency]),
    seed=st.integers(0, 10**6),
)
def test_results_equal_the_plain_loop_bit_for_bit(store, slots, staging, hit_first, tokenwise, policy, seed):
    rng, delays = random.Random(seed), random.Random(seed + 1)
    cache = ExpertCache([slots] * LAYERS, staging)
    buffer = SlotBuffer(cache.slots, LAYOUT.entry_bytes)
    link = CpuLink(store, buffer, 1e9, piece_bytes=100, delay=lambda _: delays.choice([0.0, 1e-5, 3e-4]))
    loader = ExpertLoader(cache, link)
    residency = ResidencyManager(cache, hit_first=hit_first, policy=policy)
    computed: list[ExpertKey] = []
    executor = CpuLayerExecutor(
        LAYOUT, buffer, loader, expert_ffn, lambda op: computed.append(op.key) if isinstance(op, Gemm) else None
    )
    generator = torch.Generator().manual_seed(seed)
    try:
        for _ in range(3):
            for layer in range(LAYERS):
                for slot in cache.layer_slots(layer):  # some guesses, right or wrong
                    key = ExpertKey(layer, rng.randrange(EXPERTS))
                    if rng.random() < 0.4 and cache.can_load(key, slot):
                        loader.load(key, slot, Priority.PREFETCH)
                ids = routing(rng, rows=4)
                normed = torch.randn(4, LAYOUT.hidden, generator=generator).to(torch.bfloat16)
                out = torch.full((4, TOP_K, LAYOUT.hidden), float("nan"))
                loader.reap()
                computed.clear()
                for rows in [[r] for r in range(4)] if tokenwise else [list(range(4))]:
                    counts = needed_of(ids[rows])
                    late = [k.expert for k in loader.open_keys(layer) if k.expert in counts]
                    plan = residency.plan_layer(layer, list(counts), counts, late)
                    timing = executor.run(plan, normed, ids, out, rows if tokenwise else None)
                    assert set(timing.stall_ns) == {"late", "miss", "slot"}
                cache.check_integrity()
                if not tokenwise:
                    assert sorted(k.expert for k in computed) == sorted(needed_of(ids)), "each expert once"
                expected = plain_loop(store, layer, normed, ids)
                routed = ids >= 0
                assert torch.equal(out[routed], expected[routed])
                assert out[~routed].isnan().all(), "padding writes nothing"
    finally:
        link.close()


def small_world(store: HostExpertStore) -> tuple[ExpertLoader, SlotBuffer, CpuLayerExecutor]:
    cache = ExpertCache([2] * LAYERS)
    buffer = SlotBuffer(cache.slots, LAYOUT.entry_bytes)
    loader = ExpertLoader(cache, ManualLink(LAYOUT.entry_bytes, store, buffer))
    return loader, buffer, CpuLayerExecutor(LAYOUT, buffer, loader, expert_ffn)


def test_a_slot_that_holds_another_expert_is_never_computed_from(store):
    loader, buffer, executor = small_world(store)
    loader.load(ExpertKey(0, 1), 0, Priority.DEMAND)
    loader.drain()
    buffer.view(0).copy_(store.entry(ExpertKey(0, 2)))
    plan = ResidencyManager(loader.cache).plan_layer(0, [1])
    ids = torch.tensor([[-1, 1]])
    with pytest.raises(WrongExpertError, match=r"layer 0 expert 1.*layer 0 expert 2"):
        executor.run(plan, torch.randn(1, LAYOUT.hidden), ids, torch.zeros(1, TOP_K, LAYOUT.hidden))


def test_a_plan_that_forgets_a_routed_expert_is_refused(store):
    loader, _, executor = small_world(store)
    plan = ResidencyManager(loader.cache).plan_layer(0, [1])
    ids = torch.tensor([[1, 3]])
    with pytest.raises(AssertionError, match="3"):
        executor.run(plan, torch.randn(1, LAYOUT.hidden), ids, torch.zeros(1, TOP_K, LAYOUT.hidden))


def test_used_bytes_count_each_load_once_and_only_when_computed_from(store):
    loader, _, executor = small_world(store)
    loader.load(ExpertKey(1, 0), 2, Priority.PREFETCH)  # never used
    ids, normed = torch.tensor([[1, 3], [1, 3]]), torch.randn(2, LAYOUT.hidden)
    for _ in range(2):
        plan = ResidencyManager(loader.cache).plan_layer(0, [1, 3])
        executor.run(plan, normed, ids, torch.zeros(2, TOP_K, LAYOUT.hidden))
    loader.drain()
    assert loader.counters.used_bytes == 2 * LAYOUT.entry_bytes
    assert loader.counters.loads == 3


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 6), top_k=st.integers(1, 4), seed=st.integers(0, 1000))
def test_rows_are_summed_in_one_order_whatever_surrounds_them(rows, top_k, seed):
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor([sorted(rng.choice([-1, e]) for e in rng.sample(range(9), top_k)) for _ in range(rows)])
    out = torch.randn(rows, top_k, 5, generator=generator)
    out[ids < 0] = float("nan")
    weights = torch.rand(rows, top_k, generator=generator)
    total = combine_rows(out, weights, ids)
    for row in range(rows):
        expected = torch.zeros(5)
        for choice in range(top_k):
            if ids[row, choice] >= 0:
                expected = expected + out[row, choice] * weights[row, choice]
        assert torch.equal(total[row], expected)
        alone = combine_rows(out[row : row + 1], weights[row : row + 1], ids[row : row + 1])
        assert torch.equal(alone[0], total[row])
