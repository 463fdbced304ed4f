"""Linear layers whose result for a row does not depend on the other rows.

A BLAS chooses its kernel by the number of rows, so the same row gets other bits in another company. Here
every product runs as [16, in] x [in, out], whatever the number of rows; within such a product all rows go
through the same kernel and reduction order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_ROWS = 16


def pad_rows(x: Tensor) -> Tensor:
    """x [R, …] -> [R rounded up to whole blocks, …], zeros below; x itself when R is whole blocks."""
    missing = -x.shape[0] % BLOCK_ROWS
    return F.pad(x, [0, 0] * (x.dim() - 1) + [0, missing]) if missing else x


def row_invariant_linear(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """x [R, in], w [out, in], b [out] -> [R, out] in x's dtype; a row's bits depend on that row alone.

    w must have x's dtype. out = 1 would be a different (dot-product) kernel: pad such weights.
    """
    rows = x.shape[0]
    x = pad_rows(x)
    if x.shape[0] == BLOCK_ROWS:
        y = F.linear(x, w, b)
    else:
        y = torch.cat([F.linear(block, w, b) for block in x.split(BLOCK_ROWS)])
    return y if y.shape[0] == rows else y[:rows]


def row_invariant_bmm(x: Tensor, w: Tensor) -> Tensor:
    """x [R, n, in], w [n, in, out] -> [R, n, out]: one product per index n (head), row-invariant like the
    linear.
    """
    rows = x.shape[0]
    x = pad_rows(x).transpose(0, 1)  # [n, R', in]
    if x.shape[1] == BLOCK_ROWS:
        y = torch.bmm(x, w)
    else:
        y = torch.cat([torch.bmm(block, w) for block in x.split(BLOCK_ROWS, dim=1)], dim=1)
    return y.transpose(0, 1)[:rows]


def silu(x: Tensor) -> Tensor:
    """x·sigmoid(x) in float32 from exp, add and divide: torch's own silu rounds differently at the end of
    a tensor.
    """
    value = x.float()
    return (value / (1.0 + torch.exp(-value))).to(x.dtype)
