"""The draft's routed-expert path on a CUDA device, in the row layout that nested experts read too."""

from __future__ import annotations

import torch
from torch import Tensor

from specter_core.draft.int4 import Int4Matrix
from specter_core.draft.kernels.configs import GemvConfig, GroupedConfig, PathConfig, path_config
from specter_core.draft.kernels.down import down_weighted_sum
from specter_core.draft.kernels.gate_up import gate_up_swiglu
from specter_core.draft.kernels.layout import GemvMatrix, repack_for_gemv
from specter_core.draft.kernels.two_launches import TwoLaunchPath
from specter_core.model.kernels.shared_down import SharedDown


class FusedExpertPath(TwoLaunchPath[PathConfig, GemvMatrix]):
    """See `TwoLaunchPath`. One (token, choice) at a time, or each expert once for all its tokens."""

    ACT_DTYPE = torch.float32

    @staticmethod
    def tuned(hidden: int, width: int, top_k: int) -> PathConfig:
        return path_config(hidden, width, top_k)

    @staticmethod
    def repack(gate_up: Int4Matrix, down: Int4Matrix) -> tuple[GemvMatrix, GemvMatrix]:
        return repack_for_gemv(gate_up), repack_for_gemv(down)

    def launch(
        self, layer: int, normed: Tensor, ids: Tensor, weights: Tensor, x: Tensor | None = None,
        shared: SharedDown | None = None,
    ) -> None:  # fmt: skip
        grouped = normed.shape[0] >= self.config.grouped_from_tokens
        first: GemvConfig | GroupedConfig = self.config.grouped_gate_up if grouped else self.config.gate_up
        second: GemvConfig | GroupedConfig = self.config.grouped_down if grouped else self.config.down
        out, addend = (self._out, None) if x is None else (x, x if shared is None else shared.out)
        gate_up_swiglu(normed, ids, self.gate_up[layer], self._act, first, self.pdl, shared)
        down_weighted_sum(self._act, ids, weights, self.down[layer], out, second, self.pdl, addend)
