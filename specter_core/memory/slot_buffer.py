"""The bytes of the expert cache: one row per slot."""

from __future__ import annotations

import torch
from torch import Tensor


class SlotBuffer:
    """uint8 [slots, entry_bytes] on `device`; a slot's row is one contiguous range."""

    def __init__(self, slots: int, entry_bytes: int, device: torch.device | str = "cpu") -> None:
        assert slots > 0 and entry_bytes > 0, (slots, entry_bytes)
        self.data = torch.zeros(slots, entry_bytes, dtype=torch.uint8, device=device)  # [slots, entry_bytes]

    @property
    def slots(self) -> int:
        return self.data.shape[0]

    @property
    def entry_bytes(self) -> int:
        return self.data.shape[1]

    @property
    def bytes(self) -> int:
        return self.data.numel()

    def view(self, slot: int) -> Tensor:
        """uint8 [entry_bytes], sharing memory with the buffer."""
        return self.data[slot]
