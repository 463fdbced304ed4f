"""Payload layout: what is written is read back, and a wrong or damaged expert is never taken for the right
one.
"""

from __future__ import annotations

import pytest
import torch
from control_plane import shapes
from hypothesis import given, settings
from hypothesis import strategies as st

from specter_core.errors import WrongExpertError
from specter_core.memory.payload import TRAILER_BYTES, PayloadLayout
from specter_core.types import ExpertKey


def written(layout: PayloadLayout, key: ExpertKey) -> tuple[torch.Tensor, list[torch.Tensor]]:
    entry = torch.full((layout.entry_bytes,), 255, dtype=torch.uint8)
    matrices = [torch.randn(*s).to(layout.dtype) for s in shapes(layout)]
    layout.write(entry, key, *matrices)
    return entry, matrices


@settings(deadline=None, max_examples=40)
@given(
    hidden=st.integers(1, 40),
    width=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    layer=st.integers(0, 1000),
    expert=st.integers(0, 1000),
)
def test_matrices_come_back_bit_for_bit_as_views_of_the_entry(hidden, width, dtype, layer, expert):
    layout = PayloadLayout(hidden, width, dtype)
    entry, matrices = written(layout, ExpertKey(layer, expert))
    assert layout.entry_bytes % 256 == 0
    assert layout.payload_bytes + TRAILER_BYTES <= layout.entry_bytes < layout.payload_bytes + TRAILER_BYTES + 256
    start, size = entry.data_ptr(), entry.numel()
    for view, matrix in zip(layout.views(entry), matrices, strict=True):
        assert torch.equal(view, matrix)
        assert start <= view.data_ptr() < start + size
    layout.check(entry, ExpertKey(layer, expert))
    layout.verify_crc(entry)


@pytest.mark.parametrize("asked", [ExpertKey(3, 4), ExpertKey(2, 5), ExpertKey(5, 3)])
def test_another_experts_trailer_is_an_error_that_names_both(asked):
    layout = PayloadLayout(16, 8, torch.bfloat16)
    entry, _ = written(layout, ExpertKey(3, 5))
    with pytest.raises(WrongExpertError, match=rf"layer {asked.layer} expert {asked.expert}.*layer 3 expert 5"):
        layout.check(entry, asked)


def test_an_entry_whose_last_bytes_did_not_arrive_is_an_error():
    layout = PayloadLayout(16, 8, torch.bfloat16)
    entry, _ = written(layout, ExpertKey(0, 0))
    short = torch.zeros_like(entry)
    short[:-TRAILER_BYTES] = entry[:-TRAILER_BYTES]
    with pytest.raises(WrongExpertError, match="no complete expert"):
        layout.check(short, ExpertKey(0, 0))


def test_an_expert_of_another_shape_is_an_error():
    layout, wider = PayloadLayout(16, 8, torch.bfloat16), PayloadLayout(16, 9, torch.bfloat16)
    assert layout.entry_bytes != wider.entry_bytes or layout.payload_bytes != wider.payload_bytes
    entry, _ = written(layout, ExpertKey(0, 0))
    resized = torch.zeros(wider.entry_bytes, dtype=torch.uint8)
    resized[-TRAILER_BYTES:] = entry[-TRAILER_BYTES:]
    with pytest.raises(WrongExpertError):
        wider.check(resized, ExpertKey(0, 0))


@settings(deadline=None, max_examples=30)
@given(position=st.integers(0, 3 * 16 * 8 * 2 - 1), flip=st.integers(1, 255))
def test_one_flipped_byte_of_the_payload_fails_the_checksum(position, flip):
    layout = PayloadLayout(16, 8, torch.bfloat16)
    entry, _ = written(layout, ExpertKey(0, 0))
    entry[position] ^= flip
    layout.check(entry, ExpertKey(0, 0))
    with pytest.raises(WrongExpertError, match="crc32"):
        layout.verify_crc(entry)
