"""The draft length of the next window: measured costs and a running acceptance estimate into the simulator."""

from __future__ import annotations

from collections.abc import Sequence

from baselines.specmoeoff.cost_model import GRID, CostModel
from specter_core.types import WindowStats

CALIBRATION = (2, 8, 16)
ROUNDS = 3
MEMORY = 0.9
PRIOR_ACCEPTANCE, PRIOR_TESTED = 0.8, 2.0


class CostModelDepth:
    """`DepthPolicy`. The first windows go through the calibration depths, several rounds of them (the first is not
    kept: kernels are compiled and buffers touched in it); after that each window has the depth that the simulator
    finds best for the acceptance so far, older windows counting less and less.

    accesses_per_row: L · k, which turns the accesses of a window into its rows.
    """

    def __init__(self, model: CostModel, accesses_per_row: int, entry_bytes: int, grid: Sequence[int] = GRID) -> None:
        self.model = model
        self.chosen: list[int] = []
        self._grid = tuple(grid)
        self._accesses_per_row = accesses_per_row
        self._entry_bytes = entry_bytes
        self._first = [min(k, max(grid)) for k in CALIBRATION]
        self._calibration = self._first * ROUNDS
        self._seen = 0
        self._accepted, self._tested = PRIOR_ACCEPTANCE * PRIOR_TESTED, PRIOR_TESTED
        self._sequences = 1

    @property
    def calibrated(self) -> bool:
        return self._seen >= len(self._calibration)

    @property
    def acceptance(self) -> float:
        """Running estimate of accepted over tested draft tokens."""
        return self._accepted / self._tested

    def depth(self) -> int:
        if not self.calibrated:
            return self._calibration[self._seen]
        self.chosen.append(self.model.best_depth(self.acceptance, self._sequences, self._grid))
        return self.chosen[-1]

    def observe(self, stats: WindowStats) -> None:
        """Adds the window's costs to the models. Windows of plain decoding (the last token) say nothing about them."""
        if stats.depth <= 0:
            return
        self._seen += 1
        rows = stats.accesses // self._accesses_per_row
        self._sequences = max(1, rows - stats.drafted)
        self._accepted = MEMORY * self._accepted + stats.accepted
        self._tested = MEMORY * self._tested + stats.tested
        if self._seen <= len(self._first):
            return
        self.model.draft_ms.add(stats.depth, stats.draft_ms)
        self.model.target_ms.add(rows, max(0.0, stats.verify_ms - sum(stats.stall_ms.values())))
        self.model.loads.add(rows, stats.h2d_bytes / self._entry_bytes)
