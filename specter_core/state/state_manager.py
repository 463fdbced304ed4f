"""The State Manager: authoritative token sequences, KV boundaries and per-row commit (paper, Figure 8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specter_core.errors import UserError
from specter_core.state.kv_cache import KVCache
from specter_core.state.sampling import Verdict
from specter_core.types import FinishReason, Request, RequestResult


@dataclass(slots=True)
class SequenceState:
    """One row of the batch. `tokens` is committed text, prompt included; the last one is the pending token.

    target_end: exclusive end of the KV positions whose current entries were made by the target.
    """

    request: Request
    tokens: list[int]
    times_ns: list[int] = field(default_factory=list)
    start_ns: int = 0
    target_end: int = 0
    finish: FinishReason | None = None
    drafted: int = 0
    tested: int = 0
    accepted: int = 0

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def wanted(self) -> int:
        """Tokens still to be generated."""
        return 0 if self.finish else self.request.max_new_tokens - self.generated


class StateManager:
    """Owns the rows of one batch and moves their KV boundaries; nothing else writes `kv.boundaries`."""

    def __init__(self, requests: Sequence[Request], kv: KVCache, eos_ids: Sequence[int]) -> None:
        """kv: batch = len(requests), every boundary 0. Raises UserError for an empty or too long prompt."""
        for r in requests:
            check_request(r, kv.capacity)
        self.rows = [SequenceState(r, list(r.prompt)) for r in requests]
        self.kv = kv
        self.eos_ids = frozenset(eos_ids)

    @property
    def finished(self) -> bool:
        return all(row.finish for row in self.rows)

    @property
    def boundaries(self) -> list[int]:
        return list(self.kv.boundaries)

    @property
    def pending(self) -> list[int]:
        """Last committed token of each row: first uncached input of the next pass."""
        return [row.tokens[-1] for row in self.rows]

    def window_depths(self, depth: int) -> list[int]:
        """Draft tokens of each row in the next window: min(K, tokens still wanted − 1); −1 for a finished row."""
        return [min(depth, row.wanted - 1) if row.wanted else -1 for row in self.rows]

    def note_draft_write(self, row: int, position: int) -> None:
        """The draft is about to write scratch KV at `position`: never before the boundary."""
        boundary = self.kv.boundaries[row]
        assert position >= boundary, f"draft KV at {position} lies before the boundary {boundary} of row {row}"
        self.rows[row].target_end = min(self.rows[row].target_end, position)

    def note_target_write(self, row: int, start: int, count: int) -> None:
        """The target has written KV at start … start + count − 1, gaplessly after its last entry."""
        state = self.rows[row]
        assert start <= state.target_end, f"gap in target-made KV of row {row}: {state.target_end} to {start}"
        state.target_end = start + count

    def commit_prefill(self, row: int, token: int, now_ns: int) -> None:
        """The prompt's KV is in place; `token` is the first generated token and becomes pending."""
        self._advance(row, len(self.rows[row].request.prompt))
        self._append(row, [token], now_ns)

    def commit(self, draft: Sequence[Sequence[int]], verdict: Verdict, depths: Sequence[int], now_ns: int) -> list[int]:
        """Commits accepted + 1 tokens of each active row and moves its boundary; returns tokens committed per row.

        draft: draft tokens per row (at least verdict.accepted[b] of them). Rejection moves nothing beyond that.
        """
        committed = []
        for b, row in enumerate(self.rows):
            if depths[b] < 0:
                committed.append(0)
                continue
            tokens = [*draft[b][: verdict.accepted[b]], verdict.next_token[b]]
            row.drafted += depths[b]
            row.tested += verdict.tested[b]
            row.accepted += verdict.accepted[b]
            n = self._append(b, tokens, now_ns)
            self._advance(b, n)
            committed.append(n)
        return committed

    def results(self) -> list[RequestResult]:
        return [
            RequestResult(
                request_id=row.request.request_id,
                tokens=row.tokens[len(row.request.prompt) :],
                token_times_ns=row.times_ns,
                start_ns=row.start_ns,
                finish=row.finish or FinishReason.LENGTH,
                drafted=row.drafted,
                tested=row.tested,
                accepted=row.accepted,
            )
            for row in self.rows
        ]

    def _append(self, b: int, tokens: list[int], now_ns: int) -> int:
        row = self.rows[b]
        taken = 0
        for token in tokens[: row.wanted]:
            row.tokens.append(token)
            row.times_ns.append(now_ns)
            taken += 1
            if token in self.eos_ids and not row.request.ignore_eos:
                row.finish = FinishReason.EOS
                break
        if row.finish is None and row.generated >= row.request.max_new_tokens:
            row.finish = FinishReason.LENGTH
        return taken

    def _advance(self, b: int, count: int) -> None:
        end = self.kv.boundaries[b] + count
        assert end <= self.rows[b].target_end, (
            f"boundary {end} of row {b} would pass target-made KV {self.rows[b].target_end}"
        )
        self.kv.advance(b, count)


def check_request(request: Request, capacity: int) -> None:
    """Raises UserError for an empty prompt, max_new_tokens < 1, or a sequence longer than `capacity` KV positions."""
    if not request.prompt:
        raise UserError(f"request {request.request_id}: the prompt has 0 tokens; give at least 1")
    if request.max_new_tokens < 1:
        raise UserError(f"request {request.request_id}: max_new_tokens is {request.max_new_tokens}; give at least 1")
    need = len(request.prompt) + request.max_new_tokens
    if need > capacity:
        raise UserError(
            f"request {request.request_id}: prompt {len(request.prompt)} + {request.max_new_tokens} new tokens = {need}"
            f" exceed the context of {capacity}; shorten the prompt or generate fewer tokens"
        )
