"""KV storage of the whole batch: one buffer per layer, a boundary per row."""

from __future__ import annotations

import torch
from torch import Tensor

from specter_core.model.config import ModelConfig
from specter_core.model.rows import Rows

KV_BLOCK = 64
"""Attention splits the KV at multiples of this many positions, always."""


class KVCache:
    """Per decoder layer: keys and values [B, S_max + 1, Hkv, d], or for MLA one latent [B, S_max + 1, rank
    + rope].

    S_max (`capacity`) is the asked-for capacity rounded up to whole KV blocks. Index S_max is a dump entry
    for invalid rows: written, never attended. boundaries[b]: number of leading entries of row b that are
    target-made; entries behind it are scratch, overwritten before they are read.
    """

    def __init__(
        self, config: ModelConfig, batch: int, capacity: int, device: str | torch.device, dtype: torch.dtype
    ) -> None:
        assert batch >= 1 and capacity >= 1
        self.batch = batch
        self.capacity = -(-capacity // KV_BLOCK) * KV_BLOCK
        self.dtype = dtype
        self.boundaries = [0] * batch
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.latents: list[Tensor] = []

        def buffer(*width: int) -> Tensor:
            return torch.zeros(batch, self.capacity + 1, *width, device=device, dtype=dtype)

        for _ in range(config.layers):
            if config.mla is not None:
                self.latents.append(buffer(config.mla.latent_dim))
            else:
                self.keys.append(buffer(config.kv_heads, config.head_dim))
                self.values.append(buffer(config.kv_heads, config.head_dim))

    @staticmethod
    def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
        """Bytes of one position over all decoder layers."""
        width = config.mla.latent_dim if config.mla is not None else 2 * config.kv_heads * config.head_dim
        return config.layers * width * dtype.itemsize

    @property
    def bytes(self) -> int:
        """Bytes of all buffers, dump entries included."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values, *self.latents))

    def advance(self, row: int, n: int) -> None:
        """Move a row's boundary over n entries that the target has just made."""
        assert n >= 0 and self.boundaries[row] + n <= self.capacity, (self.boundaries[row], n, self.capacity)
        self.boundaries[row] += n

    def reset(self, row: int) -> None:
        """Forget a row: a new sequence begins in it."""
        self.boundaries[row] = 0

    def write(self, buffer: Tensor, rows: Rows, entries: Tensor) -> None:
        """Store entries [R, …] of a pass at their rows' positions; invalid rows go to the dump entry."""
        assert rows.last < self.capacity and rows.kv_start + rows.batch <= self.batch
        flat = buffer.flatten(0, 1)  # [B·(S_max+1), …]
        flat.index_copy_(0, rows.once(("kv", self.capacity), lambda: self._slots(rows)), entries.to(buffer.dtype))

    def _slots(self, rows: Rows) -> Tensor:
        sequence = torch.arange(rows.batch, device=rows.positions.device).unsqueeze(1) + rows.kv_start
        entry = torch.where(rows.valid, rows.positions, self.capacity)
        return (sequence * (self.capacity + 1) + entry).flatten()  # [R]
