"""DecoderOps in plain torch, row-invariant on the CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specter_core.model.linear import pad_rows, row_invariant_bmm, row_invariant_linear, silu
from specter_core.model.rope import Rotation, apply_rope
from specter_core.model.rows import Rows
from specter_core.model.torch_attention import attention


class TorchOps:
    """See DecoderOps. exp, add, multiply and divide round alike wherever an element lies; sigmoid and silu
    of torch do not (vector body, scalar tail), so both are made from exp.
    """

    def pad(self, x: Tensor) -> Tensor:
        return pad_rows(x)

    def linear(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return row_invariant_linear(x, w, b)

    def head_linear(self, x: Tensor, w: Tensor) -> Tensor:
        return row_invariant_bmm(x, w)

    def rms_norm(self, x: Tensor, w: Tensor, eps: float) -> Tensor:
        value = x.float()
        mean_square = (value * value).sum(-1, keepdim=True).mul_(1.0 / x.shape[-1])
        value = value * mean_square.add_(eps).rsqrt_()
        return w * value.to(x.dtype)

    def layer_norm(self, x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), w, b, eps)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return silu(gate) * up

    def sigmoid(self, x: Tensor) -> Tensor:
        return (1.0 / (1.0 + torch.exp(-x.float()))).to(x.dtype)

    def softmax(self, scores: Tensor) -> Tensor:
        return torch.softmax(scores, dim=-1, dtype=torch.float32)

    def rope(self, x: Tensor, rotation: Rotation) -> Tensor:
        return apply_rope(x, rotation)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows, scale: float) -> Tensor:
        return attention(q, k, v, rows, scale)
