"""Pacing of all transfers of a link to one bandwidth."""

from __future__ import annotations

SLACK_NS = 5_000_000


class TokenBucket:
    """A link of `rate_bytes_per_s` that serves one piece after the other, with no burst.

    The deadline of a piece counts from when the link could have started it (it was ready and the piece
    before had ended), not from when a thread woke up, so late wake-ups do not lower the rate. What a slow
    copy lost is made up for at most `slack_ns`.
    """

    def __init__(self, rate_bytes_per_s: float, slack_ns: int = SLACK_NS) -> None:
        assert rate_bytes_per_s > 0, rate_bytes_per_s
        self.rate_bytes_per_s = rate_bytes_per_s
        self._slack_ns = slack_ns
        self._free_ns = 0

    def reserve(self, piece_bytes: int, ready_ns: int, now_ns: int) -> int:
        """Time (ns) at which a piece of `piece_bytes`, ready since `ready_ns`, has crossed the link."""
        start_ns = max(self._free_ns, ready_ns, now_ns - self._slack_ns)
        self._free_ns = start_ns + round(piece_bytes * 1e9 / self.rate_bytes_per_s)
        return self._free_ns
