"""The seam for policies that look ahead from one target layer to the next, such as speculative loading."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from torch import Tensor

from specter_core.model.layer import DecoderLayer


class LayerHook(Protocol):
    """Called around each MoE layer of the target pass; may load into staging slots and adopt them."""

    def before_plan(self, moe_index: int, needed: Collection[int]) -> None:
        """The layer's router has spoken, its residency is not planned yet. needed: distinct experts."""
        ...

    def after_layer(self, moe_index: int, hidden: Tensor, upcoming: Sequence[DecoderLayer]) -> None:
        """The layer is complete: its output hidden [R, H] and the decoder layers still to come."""
        ...
