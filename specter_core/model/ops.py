"""The primitive operations of a decoder pass, exchangeable as one object (torch on the CPU, Triton on
CUDA).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from specter_core.model.rope import Rotation
from specter_core.model.rows import Rows


class DecoderOps(Protocol):
    """Row-invariant operations: a row's bits depend on that row, its own KV and the weights alone.

    `pad` may add rows below for the implementation's block size; every other operation takes any number of
    rows.
    """

    def pad(self, x: Tensor) -> Tensor:
        """x [R, H] -> [R' ≥ R, H], the added rows zero."""
        ...

    def linear(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        """x [R, in], w [out, in], b [out] -> [R, out]."""
        ...

    def head_linear(self, x: Tensor, w: Tensor) -> Tensor:
        """x [R, n, in], w [n, in, out] -> [R, n, out]."""
        ...

    def rms_norm(self, x: Tensor, w: Tensor, eps: float) -> Tensor:
        """x [R, H], w [H] -> [R, H]; statistics in float32."""
        ...

    def layer_norm(self, x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
        """x [R, H], w and b [H] -> [R, H]; statistics in float32."""
        ...

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate)·up, both [R, I]."""
        ...

    def sigmoid(self, x: Tensor) -> Tensor: ...

    def softmax(self, scores: Tensor) -> Tensor:
        """Over the last dim, float32."""
        ...

    def rope(self, x: Tensor, rotation: Rotation) -> Tensor:
        """x [R, n, d] rotated by its row's position."""
        ...

    def attention(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows, scale: float) -> Tensor:
        """q [R, Hkv, G, D] over k [B', S_max+1, Hkv, D], v [B', S_max+1, Hkv, Dv] -> [R, Hkv, G, Dv] in
        q's dtype.

        G query heads share a KV head. Row r sees entries 0 … its own position of KV row kv_start + r // T;
        the KV is split at fixed multiples of KV_BLOCK; softmax in float32. Invalid rows give zeros.
        """
        ...
