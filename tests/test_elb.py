"""ELB and Pattern Analyzer: counters are the sum of routing choices; a snapshot is a moment."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specter_core.prefetch.elb import ELB
from specter_core.prefetch.pattern_analyzer import PatternAnalyzer


@settings(deadline=None)
@given(
    layers=st.integers(1, 4),
    experts=st.integers(1, 9),
    steps=st.integers(0, 6),
    rows=st.integers(1, 4),
    top_k=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_counters_are_the_sum_over_steps_and_rows_and_ignore_padding(layers, experts, steps, rows, top_k, seed):
    generator = torch.Generator().manual_seed(seed)
    elb = ELB(layers, experts)
    expected = [[0] * experts for _ in range(layers)]
    for _ in range(steps):
        for layer in range(layers):
            ids = torch.randint(-1, experts, (rows, top_k), generator=generator)
            elb.add(layer, ids)
            for expert in ids.reshape(-1).tolist():
                if expert >= 0:
                    expected[layer][expert] += 1
    assert elb.counters.dtype == torch.int32
    assert elb.counters.tolist() == expected
    elb.clear()
    assert not elb.counters.any()


def test_a_snapshot_does_not_see_what_is_recorded_later():
    analyzer = PatternAnalyzer(ELB(2, 4))
    analyzer.record(1, torch.tensor([[0, 3]]))
    snapshot = analyzer.snapshot()
    analyzer.record(1, torch.tensor([[0, 2]]))
    assert snapshot.wait().tolist() == [[0, 0, 0, 0], [1, 0, 0, 1]]
    assert analyzer.snapshot().wait().tolist() == [[0, 0, 0, 0], [2, 0, 1, 1]]
    analyzer.clear()
    assert not analyzer.snapshot().wait().any()
