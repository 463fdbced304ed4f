"""The draft's routed-expert path on a CUDA device: two launches per layer, nothing allocated between them."""

from __future__ import annotations

import torch
from torch import Tensor

from specter_core.draft.draft_store import DraftExperts
from specter_core.draft.int4 import Int4Matrix
from specter_core.draft.kernels.configs import GemvConfig, GroupedConfig, PathConfig, path_config
from specter_core.draft.kernels.down import down_weighted_sum
from specter_core.draft.kernels.gate_up import gate_up_swiglu
from specter_core.draft.kernels.layout import repack_for_gemv
from specter_core.errors import UserError

MAX_TOKENS = 64


class FusedExpertPath:
    """As `DraftExpertPath`, fused, for 1 to max_tokens rows; safe to capture in a CUDA graph.

    draft best lies on the CPU: its layers are moved and repacked one by one, so that `device` holds the
    experts once, `draft.bytes` of them. Intermediate and result live in buffers of this object: a result is
    valid until the next `forward`.
    """

    def __init__(
        self,
        draft: DraftExperts,
        top_k: int,
        device: torch.device | str = "cuda",
        *,
        max_tokens: int = MAX_TOKENS,
        config: PathConfig | None = None,
        pdl: bool = False,
    ) -> None:
        if not 1 <= max_tokens <= MAX_TOKENS:
            raise UserError(f"{max_tokens} draft rows at once, the kernels take 1 to {MAX_TOKENS}: lower the batch")
        self.max_tokens = max_tokens
        self.pdl = pdl
        self.config = config or path_config(draft.hidden, draft.width, top_k)
        layers = range(draft.layers)
        self.gate_up = [repack_for_gemv(_on(device, draft.gate_up, layer)) for layer in layers]
        self.down = [repack_for_gemv(_on(device, draft.down, layer)) for layer in layers]
        self._act = torch.empty(max_tokens * top_k, draft.width, device=device)  # float32 [T*k, I]
        self._out = torch.empty(max_tokens, draft.hidden, device=device)  # float32 [T, H]

    @property
    def workspace_bytes(self) -> int:
        return self._act.nbytes + self._out.nbytes

    def forward(self, layer: int, normed: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """normed [R, H] float16 or bfloat16, ids int64 [R, k], weights float32 [R, k] -> float32 [R, H]."""
        rows = normed.shape[0]
        assert rows <= self.max_tokens and ids.numel() <= self._act.shape[0], (ids.shape, self.max_tokens)
        grouped = rows >= self.config.grouped_from_tokens
        first: GemvConfig | GroupedConfig = self.config.grouped_gate_up if grouped else self.config.gate_up
        second: GemvConfig | GroupedConfig = self.config.grouped_down if grouped else self.config.down
        gate_up_swiglu(normed, ids, self.gate_up[layer], self._act, first, self.pdl)
        down_weighted_sum(self._act, ids, weights, self.down[layer], self._out, second, self.pdl)
        return self._out[:rows]


def _on(device: torch.device | str, matrix: Int4Matrix, layer: int) -> Int4Matrix:
    return Int4Matrix(matrix.codes[layer].to(device), matrix.scales[layer].to(device))
