"""The draft's routed-expert path on a CUDA device, on its tensor cores: two launches per layer into kept buffers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

import torch
from torch import Tensor

from specter_core.draft.draft_store import DraftExperts
from specter_core.draft.int4 import Int4Matrix
from specter_core.draft.kernels.block_configs import BlockPathConfig, block_path_config
from specter_core.draft.kernels.block_down import down_blocks
from specter_core.draft.kernels.block_gate_up import gate_up_blocks
from specter_core.draft.kernels.blocks import BlockMatrix, repack_to_blocks
from specter_core.errors import UserError
from specter_core.model.kernels.shared_down import SharedDown

MAX_TOKENS = 64


class BlockExpertPath:
    """As `DraftExpertPath`, for 1 to max_tokens rows; safe to capture in a CUDA graph.

    draft best lies on the CPU: its layers are moved and repacked one by one, so that `device` holds the
    experts once, `draft.bytes` of them. Intermediate and result live in buffers of this object: a result is
    valid until the next `forward`. UserError for max_tokens beyond 64.
    """

    def __init__(
        self,
        draft: DraftExperts,
        top_k: int,
        device: torch.device | str = "cuda",
        *,
        max_tokens: int = MAX_TOKENS,
        config: BlockPathConfig | None = None,
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
        config: BlockPathConfig | None = None,
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
        config: BlockPathConfig | None,
        pdl: bool,
    ) -> None:
        if not 1 <= max_tokens <= MAX_TOKENS:
            raise UserError(f"{max_tokens} draft rows at once, the kernels take 1 to {MAX_TOKENS}: lower the batch")
        self.max_tokens = max_tokens
        self.pdl = pdl
        self.config = config or block_path_config(hidden, width, top_k)
        self.gate_up: list[BlockMatrix] = []
        self.down: list[BlockMatrix] = []
        for gate_up, down in layers:
            self.gate_up.append(repack_to_blocks(gate_up, halves=True))
            self.down.append(repack_to_blocks(down))
        self._act = torch.empty(max_tokens * top_k, width, dtype=torch.float16, device=device)  # [T*k, I]
        self._out = torch.empty(max_tokens, hidden, device=device)  # float32 [T, H]

    def forward(self, layer: int, normed: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """normed [R, H] float16 or bfloat16, ids int64 [R, k], weights float32 [R, k] -> float32 [R, H]."""
        self._launch(layer, normed, ids, weights, self._out, None, None)
        return self._out[: normed.shape[0]]

    def add(
        self, layer: int, normed: Tensor, ids: Tensor, weights: Tensor, x: Tensor, shared: SharedDown | None = None
    ) -> None:
        """x [R, H] += what `forward` returns, and the shared experts', whose residual is x."""
        assert x.is_contiguous()
        self._launch(layer, normed, ids, weights, x, x if shared is None else shared.out, shared)

    def _launch(
        self, layer: int, normed: Tensor, ids: Tensor, weights: Tensor, out: Tensor, addend: Tensor | None,
        shared: SharedDown | None,
    ) -> None:  # fmt: skip
        assert normed.shape[0] <= self.max_tokens and ids.numel() <= self._act.shape[0], (ids.shape, self.max_tokens)
        gate_up_blocks(normed, ids, self.gate_up[layer], self._act, self.config.gate_up, self.pdl, shared)
        down_blocks(self._act, ids, weights, self.down[layer], out, self.config.down, self.pdl, addend)


def _on(device: torch.device | str, matrix: Int4Matrix, layer: int) -> Int4Matrix:
    return Int4Matrix(matrix.codes[layer].to(device), matrix.scales[layer].to(device))
