"""What the draft's routed-expert paths on a CUDA device have in common: two launches per layer into kept buffers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor

from specter_core.draft.draft_store import DraftExperts
from specter_core.draft.int4 import Int4Matrix
from specter_core.errors import UserError
from specter_core.model.kernels.shared_down import SharedDown

MAX_TOKENS = 64
Config = TypeVar("Config")
Matrix = TypeVar("Matrix")


class TwoLaunchPath(ABC, Generic[Config, Matrix]):
    """As `DraftExpertPath`, for 1 to max_tokens rows; safe to capture in a CUDA graph. Config: tiles of the two
    launches; Matrix: how one layer's codes lie in memory.

    draft best lies on the CPU: its layers are moved and repacked one by one, so that `device` holds the
    experts once, `draft.bytes` of them. Intermediate and result live in buffers of this object: a result is
    valid until the next `forward`. UserError for max_tokens beyond 64.
    """

    ACT_DTYPE: ClassVar[torch.dtype]

    def __init__(
        self,
        draft: DraftExperts,
        top_k: int,
        device: torch.device | str = "cuda",
        *,
        max_tokens: int = MAX_TOKENS,
        config: Config | None = None,
        pdl: bool = False,
    ) -> None:
        layers = ((draft.gate_up, draft.down, layer) for layer in range(draft.layers))
        moved = ((_on(device, gate_up, layer), _on(device, down, layer)) for gate_up, down, layer in layers)
        self._build(moved, draft.hidden, draft.width, top_k, device, max_tokens, config, pdl)

    @classmethod
    def from_layers(
        cls,
        layers: Iterable[tuple[Int4Matrix, Int4Matrix]],
        hidden: int,
        width: int,
        top_k: int,
        device: torch.device | str = "cuda",
        *,
        max_tokens: int = MAX_TOKENS,
        config: Config | None = None,
        pdl: bool = False,
    ) -> Self:
        """The path of layers that are made one by one on the device: gate_up [E, 2I, H], down [E, H, I] of each."""
        path = cls.__new__(cls)
        path._build(layers, hidden, width, top_k, device, max_tokens, config, pdl)
        return path

    def _build(
        self,
        layers: Iterable[tuple[Int4Matrix, Int4Matrix]],
        hidden: int,
        width: int,
        top_k: int,
        device: torch.device | str,
        max_tokens: int,
        config: Config | None,
        pdl: bool,
    ) -> None:
        if not 1 <= max_tokens <= MAX_TOKENS:
            raise UserError(f"{max_tokens} draft rows at once, the kernels take 1 to {MAX_TOKENS}: lower the batch")
        self.max_tokens = max_tokens
        self.pdl = pdl
        self.config = config or self.tuned(hidden, width, top_k)
        self.gate_up: list[Matrix] = []
        self.down: list[Matrix] = []
        for layer in layers:
            gate_up, down = self.repack(*layer)
            self.gate_up.append(gate_up)
            self.down.append(down)
        self._act = torch.empty(max_tokens * top_k, width, dtype=self.ACT_DTYPE, device=device)  # [T*k, I]
        self._out = torch.empty(max_tokens, hidden, device=device)  # float32 [T, H]

    @property
    def workspace_bytes(self) -> int:
        """Device bytes of intermediate and result."""
        return self._act.nbytes + self._out.nbytes

    def forward(self, layer: int, normed: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """normed [R, H] float16 or bfloat16, ids int64 [R, k], weights float32 [R, k] -> float32 [R, H]."""
        rows = normed.shape[0]
        assert rows <= self.max_tokens and ids.numel() <= self._act.shape[0], (ids.shape, self.max_tokens)
        self.launch(layer, normed, ids, weights)
        return self._out[:rows]

    def add(
        self, layer: int, normed: Tensor, ids: Tensor, weights: Tensor, x: Tensor, shared: SharedDown | None = None
    ) -> None:
        """x [R, H] += what `forward` returns, and the shared experts', whose residual is x."""
        rows = normed.shape[0]
        assert rows <= self.max_tokens and ids.numel() <= self._act.shape[0], (ids.shape, self.max_tokens)
        assert x.is_contiguous()
        self.launch(layer, normed, ids, weights, x, shared)

    @staticmethod
    @abstractmethod
    def tuned(hidden: int, width: int, top_k: int) -> Config:
        """The tiles measured best for these shapes."""

    @staticmethod
    @abstractmethod
    def repack(gate_up: Int4Matrix, down: Int4Matrix) -> tuple[Matrix, Matrix]:
        """One layer's matrices in the kernels' layout."""

    @abstractmethod
    def launch(
        self, layer: int, normed: Tensor, ids: Tensor, weights: Tensor, x: Tensor | None = None,
        shared: SharedDown | None = None,
    ) -> None:  # fmt: skip
        """Both launches, into `_act` and `_out`, or x becomes the sum (`add`)."""


def _on(device: torch.device | str, matrix: Int4Matrix, layer: int) -> Int4Matrix:
    return Int4Matrix(matrix.codes[layer].to(device), matrix.scales[layer].to(device))
