"""Where attention leaves its partial results between the two launches."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specter_core.model.kernels.splits import split_count


class Partials(NamedTuple):
    """Unnormalised sums, running maxima (base 2) and weights per (row, split, head), float32.

    acc of at least R·splits·heads·d elements, top and total of R·splits·heads.
    """

    acc: Tensor
    top: Tensor
    total: Tensor

    @staticmethod
    def allocate(rows: int, heads: int, width: int, bucket: int, device: torch.device | str) -> Partials:
        """Room for `rows` rows of `heads` heads over a KV bucket of that many positions; width: d, or MLA's rank."""
        places = rows * split_count(bucket) * heads
        acc = torch.empty(places * width, dtype=torch.float32, device=device)
        return Partials(acc, torch.empty(places, device=device), torch.empty(places, device=device))

    def check(self, rows: int, heads: int, width: int, splits: int) -> None:
        places = rows * splits * heads
        assert self.acc.numel() >= places * width, (self.acc.numel(), rows, splits, heads, width)
        assert min(self.top.numel(), self.total.numel()) >= places
