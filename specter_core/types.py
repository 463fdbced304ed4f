"""The few values that travel between the parts of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class ExpertKey(NamedTuple):
    """One routed expert. `layer` counts MoE layers, 0 … L-1 (not decoder layers); `expert` is 0 … E-1."""

    layer: int
    expert: int


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate.

    prompt: token ids, not empty. max_new_tokens ≥ 1. temperature 0 is greedy; top_p in (0, 1]; top_k 0 is off.
    seed keys the request's random numbers together with request_id's position-independent hash. With ignore_eos
    generation always runs to max_new_tokens.
    """

    request_id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    ignore_eos: bool = False


class FinishReason(Enum):
    LENGTH = "length"
    EOS = "eos"


@dataclass(slots=True)
class RequestResult:
    """Tokens of one request and the host time (perf_counter_ns) at which each was committed."""

    request_id: str
    tokens: list[int]
    token_times_ns: list[int]
    start_ns: int
    finish: FinishReason
    drafted: int = 0
    tested: int = 0
    accepted: int = 0

    @property
    def ttft_ms(self) -> float:
        return (self.token_times_ns[0] - self.start_ns) / 1e6

    @property
    def tpot_ms(self) -> float:
        """(t_last − t_first)/(n − 1); nan for a single token."""
        n = len(self.token_times_ns)
        return (self.token_times_ns[-1] - self.token_times_ns[0]) / 1e6 / (n - 1) if n > 1 else float("nan")

    @property
    def acceptance(self) -> float:
        """Accepted over tested draft tokens; nan when nothing was tested."""
        return self.accepted / self.tested if self.tested else float("nan")


@dataclass(slots=True)
class WindowStats:
    """Counters of one window (or of one plain decoding step, K = 0). Lists are per MoE layer [L].

    accesses counts (token, expert) pairs of the target's routing; hit/late/miss count distinct experts at the moment
    the layer's router has spoken. coverage_ceiling[l] = min(1, (M_l + staging) / distinct[l]).

    Of prefetch_planned loads prefetch_planned_used served a committed token (precision); prefetch_issued went onto
    the link as prefetches, prefetch_used of these served a committed token. Of the `absent` needed experts that were
    nowhere at b_1, absent_planned had been planned (recall). h2d_bytes crossed the link in this window, d2h_bytes went
    back; h2d_bytes_used of loads were computed from for the first time. link_span_ms runs from b_1 (K = 0: from the
    start) to the end of verification. router_wait_ms: the host's wait for the target's routers, that is for the device.
    """

    depth: int = 0
    drafted: int = 0
    tested: int = 0
    accepted: int = 0
    committed: int = 0
    distinct: list[int] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    misses: list[int] = field(default_factory=list)
    coverage_ceiling: list[float] = field(default_factory=list)
    accesses: int = 0
    access_hits: int = 0
    chunks: int = 0
    prefetch_planned: int = 0
    prefetch_planned_used: int = 0
    prefetch_issued: int = 0
    prefetch_used: int = 0
    absent: int = 0
    absent_planned: int = 0
    h2d_bytes: int = 0
    h2d_bytes_used: int = 0
    d2h_bytes: int = 0
    link_busy_ms: float = 0.0
    link_span_ms: float = 0.0
    stall_ms: dict[str, float] = field(default_factory=dict)
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    router_wait_ms: float = 0.0


class GenerationRun(NamedTuple):
    """What `SpecterEngine.generate` returns: one result per request, in order, and every window of the batch."""

    results: list[RequestResult]
    windows: list[WindowStats]
