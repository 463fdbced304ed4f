"""Rotary position tables: default, yarn (arXiv:2309.00071) and longrope (arXiv:2402.13753)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from specter_core.model.config import RopeConfig, RopeKind
from specter_core.model.rows import Rows

_CHUNK_POSITIONS = 1024


class Rotation(NamedTuple):
    """cos and signed sin, float32 [R, 1, dim]: rotated = x·cos + swapped(x)·sin, the sign of the swap
    being in sin.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool


class RopeTable:
    """cos/sin by position, grown in chunks of 1,024 positions so that an entry never depends on the
    table's length.
    """

    def __init__(self, config: RopeConfig, device: str | torch.device = "cpu") -> None:
        self._config = config
        self._device = torch.device(device)
        if config.kind is RopeKind.LONGROPE:
            self._sides = [
                (_inverse(config, config.short_factor), config.short_scale),
                (_inverse(config, config.long_factor), config.long_scale),
            ]
        elif config.kind is RopeKind.YARN:
            self._sides = [(yarn_frequencies(config), config.scale)]
        else:
            self._sides = [(_inverse(config, ()), config.scale)]
        empty = torch.empty(0, config.dim, device=self._device)
        self._tables = [(empty, empty) for _ in self._sides]

    def lookup(self, rows: Rows) -> Rotation:
        """The rotation of every row of a pass; computed once per Rows."""
        return rows.once("rope", lambda: self._lookup(rows))

    def _lookup(self, rows: Rows) -> Rotation:
        self._grow(rows.last + 1)
        positions = rows.positions.flatten()
        cos, sin = (table[positions] for table in self._tables[0])  # [R, dim]
        if len(self._tables) == 2:
            is_long = (rows.context.flatten() > self._config.original_positions).unsqueeze(1)
            cos = torch.where(is_long, self._tables[1][0][positions], cos)
            sin = torch.where(is_long, self._tables[1][1][positions], sin)
        return Rotation(cos.unsqueeze(1), sin.unsqueeze(1), self._config.interleaved)

    def _grow(self, positions: int) -> None:
        have = self._tables[0][0].shape[0]
        while have < max(positions, 1):
            for side, (inverse, scale) in enumerate(self._sides):
                cos, sin = self._chunk(have, inverse, scale)
                self._tables[side] = (
                    torch.cat([self._tables[side][0], cos]),
                    torch.cat([self._tables[side][1], sin]),
                )
            have += _CHUNK_POSITIONS

    def _chunk(self, start: int, inverse: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        positions = torch.arange(start, start + _CHUNK_POSITIONS, dtype=torch.float32).unsqueeze(1)
        angles = positions * inverse  # [1024, dim/2], on the CPU: the same bits for every device
        cos, sin = angles.cos() * scale, angles.sin() * scale
        if self._config.interleaved:
            cos = cos.repeat_interleave(2, dim=1)
            sin = torch.stack([-sin, sin], dim=2).flatten(1)
        else:
            cos = torch.cat([cos, cos], dim=1)
            sin = torch.cat([-sin, sin], dim=1)
        return cos.to(self._device), sin.to(self._device)


def apply_rope(x: Tensor, rotation: Rotation) -> Tensor:
    """x [R, n, dim] -> the same, rotated in float32 and returned in x's dtype."""
    value = x.float()
    if rotation.interleaved:
        swapped = value.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        swapped = value.roll(value.shape[-1] // 2, dims=-1)
    return (value * rotation.cos + swapped * rotation.sin).to(x.dtype)


def _inverse(config: RopeConfig, factors: tuple[float, ...]) -> Tensor:
    exponent = torch.arange(0, config.dim, 2, dtype=torch.float32) / config.dim
    power = config.theta**exponent
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * power if factors else power)


def yarn_frequencies(config: RopeConfig) -> Tensor:
    """Inverse frequencies [dim/2]: the slow channels are interpolated by `factor`, the fast ones kept."""

    def channel(rotations: float) -> float:
        turns = config.original_positions / (rotations * 2 * math.pi)
        return config.dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = channel(config.beta_fast), channel(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(config.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    plain = _inverse(config, ())
    return plain / config.factor * ramp + plain * (1 - ramp)


def yarn_mscale(factor: float, mscale: float) -> float:
    """yarn's attention temperature: 0.1·mscale·ln(factor) + 1, and 1 for factor ≤ 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
