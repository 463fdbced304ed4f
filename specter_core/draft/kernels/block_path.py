"""The draft's routed-expert path on a CUDA device, on its tensor cores."""

from __future__ import annotations

import torch
from torch import Tensor

from specter_core.draft.int4 import Int4Matrix
from specter_core.draft.kernels.block_configs import BlockPathConfig, block_path_config
from specter_core.draft.kernels.block_down import down_blocks
from specter_core.draft.kernels.block_gate_up import gate_up_blocks
from specter_core.draft.kernels.blocks import BlockMatrix, repack_to_blocks
from specter_core.draft.kernels.two_launches import TwoLaunchPath
from specter_core.model.kernels.shared_down import SharedDown


class BlockExpertPath(TwoLaunchPath[BlockPathConfig, BlockMatrix]):
    """See `TwoLaunchPath`. Codes in blocks for the tensor cores."""

    ACT_DTYPE = torch.float16

    @staticmethod
    def tuned(hidden: int, width: int, top_k: int) -> BlockPathConfig:
        return block_path_config(hidden, width, top_k)

    @staticmethod
    def repack(gate_up: Int4Matrix, down: Int4Matrix) -> tuple[BlockMatrix, BlockMatrix]:
        return repack_to_blocks(gate_up, halves=True), repack_to_blocks(down)

    def launch(
        self, layer: int, normed: Tensor, ids: Tensor, weights: Tensor, x: Tensor | None = None,
        shared: SharedDown | None = None,
    ) -> None:  # fmt: skip
        out, addend = (self._out, None) if x is None else (x, x if shared is None else shared.out)
        gate_up_blocks(normed, ids, self.gate_up[layer], self._act, self.config.gate_up, self.pdl, shared)
        down_blocks(self._act, ids, weights, self.down[layer], out, self.config.down, self.pdl, addend)
