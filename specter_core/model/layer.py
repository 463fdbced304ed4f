"""One decoder layer of the shared instance, in the steps between which experts are scheduled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from specter_core.model.attention import Attention
from specter_core.model.mlp import SwiGLU
from specter_core.model.norm import Norm
from specter_core.model.ops import DecoderOps
from specter_core.model.rope import RopeTable
from specter_core.model.router import Router
from specter_core.model.rows import Rows
from specter_core.state.kv_cache import KVCache


class Routing(NamedTuple):
    """normed [R, H]: the experts' input. ids int64 [R, k], ascending per row, -1 in invalid rows; weights
    float32.
    """

    normed: Tensor
    ids: Tensor
    weights: Tensor


class DecoderLayer:
    """Dense: attend, dense. MoE: attend, route, (routed experts, elsewhere), combine. moe_index counts 0 …
    L-1.
    """

    def __init__(
        self,
        *,
        moe_index: int | None,
        input_norm: Norm,
        attention: Attention,
        mlp_norm: Norm,
        mlp: SwiGLU | None,
        router: Router | None,
        rope: RopeTable,
        ops: DecoderOps,
    ) -> None:
        assert (moe_index is None) == (router is None) and (router is not None or mlp is not None)
        self.moe_index = moe_index
        self._input_norm = input_norm
        self._attention = attention
        self._mlp_norm = mlp_norm
        self._mlp = mlp
        self._router = router
        self._rope = rope
        self._ops = ops

    def attend(self, x: Tensor, kv: KVCache, rows: Rows) -> Tensor:
        """x [R, H] -> x + attention(norm(x)), after appending the rows' KV to the cache."""
        padded = self._ops.pad(x)
        return x + self._attention(self._input_norm(padded), kv, rows, self._rope.lookup(rows))

    def dense(self, x: Tensor) -> Tensor:
        """x [R, H] -> x + mlp(norm(x)); dense layers only."""
        assert self._mlp is not None and self._router is None
        return x + self._mlp(self._mlp_norm(self._ops.pad(x)))[: x.shape[0]]

    def route(self, x: Tensor, rows: Rows) -> Routing:
        """x [R, H] -> the experts' input and the experts; MoE layers only."""
        assert self._router is not None and x.shape[0] == rows.count
        normed = self._mlp_norm(self._ops.pad(x))
        ids, weights = self._router.select(self._router.scores(normed)[: rows.count])
        ids = torch.where(rows.valid.view(-1, 1), ids, -1)
        return Routing(normed[: rows.count], ids, weights)

    def combine(self, x: Tensor, normed: Tensor, routed: Tensor) -> Tensor:
        """x + (routed experts' sum [R, H] float32 + shared experts(normed)) -> [R, H]."""
        mixed = routed.to(x.dtype)
        if self._mlp is not None:
            mixed = mixed + self._mlp(self._ops.pad(normed))[: x.shape[0]]
        return x + mixed

    def gate(self, x: Tensor) -> Tensor:
        """This layer's router logits float32 [R, E] for any hidden state x [R, H] (e.g. the layer
        before's).
        """
        assert self._router is not None
        return self._router.scores(self._mlp_norm(self._ops.pad(x)))[: x.shape[0]]

    def tensors(self) -> Iterator[Tensor]:
        """Everything this layer keeps on the device, routed experts not being among it."""
        yield from self._input_norm.tensors()
        yield from self._attention.tensors()
        yield from self._mlp_norm.tensors()
        if self._mlp is not None:
            yield from self._mlp.tensors()
        if self._router is not None:
            yield self._router.weight
