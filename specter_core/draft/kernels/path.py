"""The draft's routed-expert path on a CUDA device: two launches per layer, nothing allocated between them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from specter_core.draft.draft_store import DraftExperts
from specter_core.draft.int4 import Int4Matrix
from specter_core.draft.kernels.configs import GemvConfig, GroupedConfig, PathConfig, path_config
from specter_core.draft.kernels.down import down_weighted_sum
from specter_core.draft.kernels.gate_up import gate_up_swiglu
from specter_core.draft.kernels.layout import GemvMatrix, repack_for_gemv
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
        config: PathConfig | None = None,
        pdl: bool = False,
    ) -> FusedExpertPath:
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
        config: PathConfig | None,
        pdl: bool,
    ) -> None:
        self.max_tokens = max_tokens
        self.pdl = pdl
        self.config = config or path_config(hidden, width, top_k)
        self.gate_up: list[GemvMatrix] = []
        self.down: list[GemvMatrix] = []
        for gate_up, down in layers:
            self.gate_up.append(repack_for_gemv(gate_up))
            self.down.append(repack_for_gemv(down))
        self._act = torch.empty(max_tokens * top_k, width, device=device)  # float32 [T*k, I]
        self._out = torch.empty(max_tokens, hidden, device=device)  # float32 [T, H]

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
