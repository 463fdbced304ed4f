"""From an isolated engine's stamped steps to the records of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from harness.isolated import Generated
from harness.system import NAN, RequestRecord
from specter_core.types import Request


def records(generated: Generated, requests: Sequence[Request], common: RequestRecord) -> list[RequestRecord]:
    """One record per request, with the tokens and times of its own row; whatever is the same for all comes from
    `common`. RuntimeError where a row has fewer tokens than were asked for although its end of sequence is ignored."""
    rows = [_row(generated, number) for number in range(len(requests))]
    total = sum(len(tokens) for tokens, _ in rows)
    span_s = (max((t for _, times in rows for t in times), default=generated.start_ns) - generated.start_ns) / 1e9
    found = []
    for request, (tokens, times) in zip(requests, rows, strict=True):
        if not tokens or (request.ignore_eos and len(tokens) != request.max_new_tokens):
            raise RuntimeError(f"{len(tokens)} tokens came back, {request.max_new_tokens} were asked for")
        found.append(
            replace(
                common,
                request_id=request.request_id,
                tokens=tokens,
                ttft_ms=(times[0] - generated.start_ns) / 1e6,
                tpot_ms=(times[-1] - times[0]) / 1e6 / (len(times) - 1) if len(times) > 1 else NAN,
                throughput=total / span_s if span_s else NAN,
            )
        )
    return found


def _row(generated: Generated, number: int) -> tuple[tuple[int, ...], list[int]]:
    tokens: list[int] = []
    times: list[int] = []
    for step, time_ns in zip(generated.steps, generated.times_ns, strict=True):
        if (token := step[number]) is not None:
            tokens.append(token)
            times.append(time_ns)
    return tuple(tokens), times
