"""The rows of one pass: which sequence, which position, valid or padding."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")


class Rows:
    """B sequences x T steps; flat row r = b·T + t.

    positions, context int64 [B, T] and valid bool [B, T]. context is the sequence length that picks the
    longrope factors: position + 1 when decoding, the prompt's length in prefill. Row b's KV is row
    kv_start + b of the cache. Invalid rows have position 0, route nothing and write to the cache's dump
    row. The layers of one pass share what they derive from the rows through `once`.
    """

    def __init__(self, positions: Tensor, valid: Tensor, context: Tensor, kv_start: int = 0) -> None:
        assert positions.shape == valid.shape == context.shape and positions.dim() == 2
        self.batch, self.steps = positions.shape
        self.valid = valid
        self.positions = torch.where(valid, positions, 0)
        self.context = torch.where(valid, context, 0)
        self.kv_start = kv_start
        self.host_positions: list[list[int]] = torch.where(valid, positions, -1).tolist()  # -1: invalid
        self._once: dict[Hashable, object] = {}

    @staticmethod
    def decode(
        boundaries: Sequence[int], steps: int, counts: Sequence[int] | None = None, *, device: str = "cpu"
    ) -> Rows:
        """Row (b, t) stands at boundaries[b] + t and is valid for t < counts[b] (all steps when None)."""
        start = torch.tensor(list(boundaries), device=device).unsqueeze(1)  # [B, 1]
        step = torch.arange(steps, device=device).unsqueeze(0)  # [1, T]
        positions = start + step
        limit = torch.tensor([steps] * len(boundaries) if counts is None else list(counts), device=device)
        return Rows(positions, step < limit.unsqueeze(1), positions + 1)

    @staticmethod
    def prefill(row: int, start: int, count: int, prompt_len: int, *, device: str = "cpu") -> Rows:
        """Positions start … start+count-1 of the prompt of the sequence in KV row `row`."""
        assert start >= 0 and count >= 1 and start + count <= prompt_len
        positions = torch.arange(start, start + count, device=device).unsqueeze(0)
        valid = torch.ones_like(positions, dtype=torch.bool)
        return Rows(positions, valid, torch.full_like(positions, prompt_len), kv_start=row)

    @property
    def count(self) -> int:
        """R = B·T."""
        return self.batch * self.steps

    @property
    def last(self) -> int:
        """Highest valid position, -1 when there is none."""
        return max(max(row) for row in self.host_positions)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value under key, made at first use and kept as long as the rows."""
        if key not in self._once:
            self._once[key] = make()
        return cast(T, self._once[key])
