"""Expert lookahead buffer: how often the draft's router chose each expert in this window (paper, Pattern
Analyzer).
"""

from __future__ import annotations

import torch
from torch import Tensor


class ELB:
    """int32 counters [L, E] on the device: cnt[j, e] = number of (draft token, batch row) pairs that chose
    e in layer j.

    `add` and `clear` neither synchronise nor allocate by data, so a draft step that contains them can be
    graph-captured.
    """

    def __init__(self, layers: int, experts: int, device: torch.device | str = "cpu") -> None:
        assert layers > 0 and experts > 0, (layers, experts)
        self.layers = layers
        self.experts = experts
        self._buffer = torch.zeros(layers, experts + 1, dtype=torch.int32, device=device)  # [L, E + 1], last: id −1

    def add(self, layer: int, ids: Tensor) -> None:
        """Count ids [R, k] int64 of `layer`; id −1 (padded or finished row) is ignored."""
        flat = ids.reshape(-1)
        index = torch.where(flat < 0, self.experts, flat)
        self._buffer[layer].scatter_add_(0, index, torch.ones_like(index, dtype=torch.int32))

    def clear(self) -> None:
        self._buffer.zero_()

    @property
    def counters(self) -> Tensor:
        """int32 [L, E], a view on the device."""
        return self._buffer[:, : self.experts]
