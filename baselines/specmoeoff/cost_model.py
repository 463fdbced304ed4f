"""SpecMoEOff's simulator: linear cost models, fitted to measured windows, say what a window of K tokens would take."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

GRID = (2, 4, 6, 8, 12, 16, 20, 24, 32)
SAMPLES_PER_POINT = 15


class LinearCost:
    """y = fixed + slope · x over measured (x, y), both coefficients ≥ 0.

    Each x is represented by the median of its latest measurements, weighted by their number: a window in which a
    kernel was compiled does not bend the line, and points that are no longer visited keep their say.
    """

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}

    def add(self, x: int, y: float) -> None:
        self._samples.setdefault(x, deque(maxlen=SAMPLES_PER_POINT)).append(y)

    @property
    def points(self) -> int:
        """Number of different x that were measured; one is not enough for a slope."""
        return len(self._samples)

    def at(self, x: float) -> float:
        fixed, slope = self.coefficients()
        return fixed + slope * x

    def coefficients(self) -> tuple[float, float]:
        """(fixed, slope) by weighted least squares; (0, 0) before anything was measured."""
        points = [(x, median(ys), len(ys)) for x, ys in self._samples.items()]
        weight = sum(w for _, _, w in points)
        if not weight:
            return 0.0, 0.0
        mean_x = sum(w * x for x, _, w in points) / weight
        mean_y = sum(w * y for _, y, w in points) / weight
        spread = sum(w * (x - mean_x) ** 2 for x, _, w in points)
        if spread == 0:
            return mean_y, 0.0
        slope = max(0.0, sum(w * (x - mean_x) * (y - mean_y) for x, y, w in points) / spread)
        if slope * mean_x <= mean_y:
            return mean_y - slope * mean_x, slope
        squares = sum(w * x * x for x, _, w in points)  # the line would start below zero: through the origin
        return 0.0, sum(w * x * y for x, y, w in points) / squares


@dataclass(frozen=True, slots=True)
class Overlap:
    """What the link moves while the draft computes.

    share: part of drafting during which loads are under way. experts: at most so many (there is no place for more).
    streaming: the rest travels beside the target's computation; otherwise the target waits for it.
    """

    share: float
    experts: int
    streaming: bool = False


@dataclass(slots=True)
class CostModel:
    """entry_ms: one expert over the idle link. draft_ms by K, target_ms (waiting excluded) and loads (experts that
    cross the link) by rows of a target pass.
    """

    entry_ms: float
    overlap: Overlap
    draft_ms: LinearCost = field(default_factory=LinearCost)
    target_ms: LinearCost = field(default_factory=LinearCost)
    loads: LinearCost = field(default_factory=LinearCost)

    def window_ms(self, depth: int, sequences: int) -> float:
        """Simulated time of one window of K = depth for `sequences` rows of the batch."""
        rows = sequences * (depth + 1)
        draft_ms = self.draft_ms.at(depth)
        hidden_ms = min(self.overlap.share * draft_ms, self.overlap.experts * self.entry_ms)
        exposed_ms = max(0.0, self.loads.at(rows) * self.entry_ms - hidden_ms)
        target_ms = self.target_ms.at(rows)
        return draft_ms + (max(target_ms, exposed_ms) if self.overlap.streaming else target_ms + exposed_ms)

    def best_depth(self, acceptance: float, sequences: int, grid: Sequence[int] = GRID) -> int:
        """The K of least simulated time per committed token; the smaller one of equals."""
        return min(grid, key=lambda k: (self.window_ms(k, sequences) / expected_tokens(acceptance, k), k))


def expected_tokens(acceptance: float, depth: int) -> float:
    """Tokens that a window commits per sequence: 1 + a + a² + … + a^K."""
    if acceptance >= 1.0:
        return depth + 1.0
    return (1.0 - acceptance ** (depth + 1)) / (1.0 - acceptance)
