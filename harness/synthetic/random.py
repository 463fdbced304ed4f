"""Seeded Gaussian numbers by name: a tensor's values do not depend on what was made before it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def normal(
    seed: int, name: str, shape: Sequence[int], device: torch.device | str, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Standard normal [*shape]; the same for the same seed, name, shape, dtype and kind of device."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.randn(*shape, generator=generator, device=device, dtype=dtype)
