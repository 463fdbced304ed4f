"""The draft's routed-expert path on tensor cores: two launches per layer, nothing allocated between them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from specter_core.draft.draft_store import DraftExperts
from specter_core.draft.int4 import Int4Matrix
from specter_core.draft.kernels.block_configs import BlockPathConfig, block_path_config
from specter_core.draft.kernels.block_down import down_blocks
from specter_core.draft.kernels.block_gate_up import gate_up_blocks
from specter_core.draft.kernels.blocks import BlockMatrix, repack_to_blocks
from specter_core.draft.kernels.path import MAX_TOKENS
from specter_core.errors import UserError


class BlockExpertPath:
    """As `FusedExpertPath`, whose layout nested experts read, in blocks for the tensor cores: for drafts whose codes
    nobody else reads. A result is valid until the next `forward`.
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
        def moved(matrix: Int4Matrix, layer: int) -> Int4Matrix:
            return Int4Matrix(matrix.codes[layer].to(device), matrix.scales[layer].to(device))

        layers = ((moved(draft.gate_up, layer), moved(draft.down, layer)) for layer in range(draft.layers))
        self._build(layers, draft.hidden, draft.width, top_k, device, max_tokens, config, pdl)

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
    ) -> BlockExpertPath:
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

    @property
    def workspace_bytes(self) -> int:
        return self._act.nbytes + self._out.nbytes

    def forward(self, layer: int, normed: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """normed [R, H] float16 or bfloat16, ids int64 [R, k], weights float32 [R, k] -> float32 [R, H]."""
        rows = normed.shape[0]
        assert rows <= self.max_tokens and ids.numel() <= self._act.shape[0], (ids.shape, self.max_tokens)
        gate_up_blocks(normed, ids, self.gate_up[layer], self._act, self.config.gate_up, self.pdl)
        down_blocks(self._act, ids, weights, self.down[layer], self._out, self.config.down, self.pdl)
        return self._out[:rows]
