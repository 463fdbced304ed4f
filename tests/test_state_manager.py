"""The State Manager's promises: monotone boundaries, target-made KV only before them, per-row commit and stop."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specter_core.errors import UserError
from specter_core.state.sampling import Verdict
from specter_core.state.state_manager import StateManager
from specter_core.types import FinishReason, Request

EOS = 7


@dataclass
class Boundaries:
    """The part of the KV cache that the State Manager moves."""

    batch: int
    capacity: int = 64
    boundaries: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.boundaries = [0] * self.batch

    def advance(self, row: int, count: int) -> None:
        self.boundaries[row] += count


def manager(*wanted: int, ignore_eos: bool = False, prompt: tuple[int, ...] = (1, 2, 3)) -> StateManager:
    requests = [Request(f"r{i}", prompt, n, ignore_eos=ignore_eos) for i, n in enumerate(wanted)]
    state = StateManager(requests, Boundaries(len(wanted)), [EOS])  # type: ignore[arg-type]
    for b in range(len(wanted)):
        state.note_target_write(b, 0, len(prompt))
        state.commit_prefill(b, 9, now_ns=0)
    return state


def run_window(
    state: StateManager, depth: int, accept: list[int], tokens: list[list[int]], following: int
) -> list[int]:
    depths = state.window_depths(depth)
    start = state.boundaries
    for b, d in enumerate(depths):
        for t in range(max(d, 0)):
            state.note_draft_write(b, start[b] + t)
        if d >= 0:
            state.note_target_write(b, start[b], d + 1)
    accepted = [min(a, max(d, 0)) for a, d in zip(accept, depths, strict=True)]
    verdict = Verdict(
        [min(a + 1, max(d, 0)) for a, d in zip(accepted, depths, strict=True)], accepted, [following] * len(depths)
    )
    return state.commit(tokens, verdict, depths, now_ns=1)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_boundary_is_monotone_behind_the_pending_token_and_rows_stop_at_their_length(data: st.DataObject) -> None:
    wanted = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    state = manager(*wanted, ignore_eos=True)
    for _ in range(40):
        if state.finished:
            break
        before = state.boundaries
        depth = data.draw(st.integers(0, 5))
        accept = [data.draw(st.integers(0, depth)) for _ in wanted]
        committed = run_window(state, depth, accept, [[4] * depth for _ in wanted], 5)
        for b, row in enumerate(state.rows):
            assert state.boundaries[b] == before[b] + committed[b] == len(row.tokens) - 1
            assert state.boundaries[b] <= row.target_end
    assert state.finished
    assert [len(r.tokens) for r in state.results()] == wanted


def test_window_depth_never_exceeds_what_is_still_wanted() -> None:
    state = manager(6, 2, 1)
    assert state.window_depths(8) == [4, 0, -1]


def test_accepted_tokens_and_the_corrected_one_are_committed_and_nothing_else() -> None:
    state = manager(10)
    assert run_window(state, 4, [2], [[11, 12, 13, 14]], 15) == [3]
    assert state.rows[0].tokens == [1, 2, 3, 9, 11, 12, 15]
    assert state.pending == [15]


def test_end_of_sequence_inside_the_accepted_prefix_ends_the_row_there() -> None:
    state = manager(10)
    assert run_window(state, 4, [4], [[11, EOS, 13, 14]], 15) == [2]
    assert state.results()[0].tokens == [9, 11, EOS]
    assert state.results()[0].finish is FinishReason.EOS
    assert state.window_depths(4) == [-1]


def test_ignored_end_of_sequence_is_an_ordinary_token() -> None:
    state = manager(10, ignore_eos=True)
    assert run_window(state, 4, [4], [[11, EOS, 13, 14]], 15) == [5]


def test_draft_entry_before_the_boundary_is_refused() -> None:
    state = manager(10)
    with pytest.raises(AssertionError, match="before the boundary"):
        state.note_draft_write(0, state.boundaries[0] - 1)


def test_boundary_past_target_made_entries_is_refused() -> None:
    state = manager(10)
    state.note_draft_write(0, state.boundaries[0])
    with pytest.raises(AssertionError, match="would pass target-made"):
        state.commit([[4]], Verdict([1], [1], [5]), [1], now_ns=1)


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (Request("r", (), 1), "0 tokens; give at least 1"),
        (Request("r", (1,), 0), "max_new_tokens is 0"),
        (Request("r", (1,) * 60, 10), "60 .* 10 new tokens = 70 .* 64"),
    ],
)
def test_impossible_requests_name_both_numbers(request_: Request, text: str) -> None:
    with pytest.raises(UserError, match=text):
        StateManager([request_], Boundaries(1), [])  # type: ignore[arg-type]
