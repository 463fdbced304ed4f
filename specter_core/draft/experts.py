"""The draft's routed-expert path in plain torch: the reference, and what runs on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from specter_core.draft.draft_store import DraftExperts
from specter_core.draft.int4 import Int4Matrix, dequantize

_EXPANSION_LIMIT_BYTES = 1 << 30


class DraftExpertPath:
    """Routed experts of a draft step, INT4 (paper, section on the fused multi-expert draft kernel).

    fused computes all (token, expert) pairs in one batched pass; not fused loops over the distinct experts,
    as the paper's unfused comparison does. Both agree to 1e-5. A row's result in the fused form does not
    depend on the other rows: every pair is reduced by itself, in FP32.

    On the CPU the experts are also kept expanded to float32 when that fits 1 GiB, so that small reference
    models step quickly. This is a host-side convenience of the CPU reference and no part of any device
    budget: what is counted is `draft.bytes`. Larger drafts dequantise the gathered experts of each step.
    expand overrides the choice.
    """

    def __init__(self, draft: DraftExperts, *, fused: bool = True, expand: bool | None = None) -> None:
        self.draft = draft
        self.fused = fused
        if expand is None:
            weights = 2 * (draft.gate_up.codes.numel() + draft.down.codes.numel())
            expand = draft.device.type == "cpu" and 4 * weights <= _EXPANSION_LIMIT_BYTES
        layers = range(draft.layers if expand else 0)
        self._gate_up = [dequantize(_layer(draft.gate_up, layer)) for layer in layers]  # L x [E, 2I, H]
        self._down = [dequantize(_layer(draft.down, layer)) for layer in layers]  # L x [E, H, I]

    def forward(self, layer: int, normed: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """normed [R, H] any float, ids int64 [R, k], weights [R, k] -> float32 [R, H].

        Sum over the k choices of weight * down(silu(gate(x)) * up(x)), in the order of the choices.
        A choice with id -1 contributes nothing.
        """
        form = self._fused if self.fused else self._unfused
        return form(layer, normed.to(torch.float32), ids, weights.to(torch.float32))

    def _fused(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        rows, choices = ids.shape
        pairs = ids.reshape(-1)  # [R*k]
        gate_up, down = self._gather(layer, pairs.clamp(min=0))  # [R*k, 2I, H], [R*k, H, I], both fresh
        inputs = x.repeat_interleave(choices, dim=0).unsqueeze(1)  # [R*k, 1, H]
        gate, up = gate_up.mul_(inputs).sum(-1).chunk(2, dim=1)  # [R*k, I] each
        results = down.mul_((silu(gate) * up).unsqueeze(1)).sum(-1)  # [R*k, H]
        results.mul_(weights.reshape(-1, 1)).masked_fill_((pairs < 0).unsqueeze(-1), 0.0)
        return results.view(rows, choices, -1).sum(dim=1)

    def _unfused(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros(*ids.shape, x.shape[1], device=x.device)  # [R, k, H]
        for expert in torch.unique(ids[ids >= 0]).tolist():
            gate_up, down = (part[0] for part in self._gather(layer, torch.tensor([expert], device=x.device)))
            row, choice = (ids == expert).nonzero(as_tuple=True)
            gate, up = (x[row] @ gate_up.t()).chunk(2, dim=1)
            out[row, choice] = (silu(gate) * up) @ down.t() * weights[row, choice].unsqueeze(-1)
        return out.sum(dim=1)

    def _gather(self, layer: int, experts: Tensor) -> tuple[Tensor, Tensor]:
        """float32 copies of the experts' matrices: [P, 2I, H] and [P, H, I]."""
        if self._gate_up:
            return self._gate_up[layer].index_select(0, experts), self._down[layer].index_select(0, experts)
        draft = self.draft
        gate_up, down = (_selected(matrix, layer, experts) for matrix in (draft.gate_up, draft.down))
        return dequantize(gate_up), dequantize(down)


def _layer(matrix: Int4Matrix, layer: int) -> Int4Matrix:
    return Int4Matrix(matrix.codes[layer], matrix.scales[layer])


def _selected(matrix: Int4Matrix, layer: int, experts: Tensor) -> Int4Matrix:
    codes, scales = _layer(matrix, layer)
    return Int4Matrix(codes.index_select(0, experts), scales.index_select(0, experts))
