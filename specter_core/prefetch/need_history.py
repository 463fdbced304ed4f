"""How often each expert has been needed lately: what planner and Residency Manager expect of the next window."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import cast

import numpy as np
from numpy.typing import NDArray

DECAY_PER_TOKEN = 0.99
"""Of recorded routing, 0.8 to 0.9 per window of 9 to 17 tokens moved the fewest bytes."""


class NeedHistory:
    """rate float64 [L, E]: the share of recent tokens that the target's router sent to each expert, decaying by token.

    Starts at k / E everywhere. Depends on routing alone, never on a clock.
    """

    def __init__(self, layers: int, experts: int, top_k: int, decay_per_token: float = DECAY_PER_TOKEN) -> None:
        assert 0 < top_k <= experts and 0 < decay_per_token < 1, (top_k, experts, decay_per_token)
        self.rate: NDArray[np.float64] = np.empty((layers, experts))
        self._cells = [memoryview(row) for row in self.rate]  # numpy's calls cost more than a layer's few numbers
        self._top_k, self._decay = top_k, decay_per_token
        self.forget()

    def forget(self) -> None:
        """Back to the start: no token has been seen."""
        self.rate.fill(self._top_k / self.rate.shape[1])

    def observe(self, layer: int, counts: Mapping[int, int]) -> None:
        """The target's router of `layer` has spoken. counts: rows routed to each needed expert."""
        total = sum(counts.values())
        if not total:
            return
        tokens = total / self._top_k
        kept = self._decay**tokens
        added = (1 - kept) / tokens
        rates = [rate * kept for rate in self.rates(layer)]
        for expert, count in counts.items():
            rates[expert] += count * added
        self._cells[layer][:] = array("d", rates)

    def rates(self, layer: int) -> list[float]:
        """The layer's row of `rate`, [E]."""
        return cast(list[float], self._cells[layer].tolist())

    def chance(self, tokens: int) -> NDArray[np.float64]:
        """[L, E]: probability that at least one of the next `tokens` tokens needs the expert."""
        chance: NDArray[np.float64] = 1.0 - (1.0 - np.minimum(self.rate, 1.0)) ** max(tokens, 0)
        return chance
