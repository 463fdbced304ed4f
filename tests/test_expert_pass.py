"""Routed experts of a layer: what the host counts before it plans."""

from __future__ import annotations

from unittest.mock import patch

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specter_core.verify import expert_pass


@settings(max_examples=100, deadline=None)
@given(rows=st.integers(0, 20), top_k=st.integers(1, 6), seed=st.integers(0, 1000))
def test_rows_per_expert_are_the_same_counted_one_by_one_and_all_at_once(rows, top_k, seed):
    ids = torch.randint(-1, 9, (rows, top_k), generator=torch.Generator().manual_seed(seed))
    singly = expert_pass._rows_per_expert(ids)
    with patch.object(expert_pass, "_FEW", -1):
        at_once = expert_pass._rows_per_expert(ids)
    flat = [e for e in ids.flatten().tolist() if e >= 0]
    assert list(singly.items()) == list(at_once.items()) == [(e, flat.count(e)) for e in sorted(set(flat))]
