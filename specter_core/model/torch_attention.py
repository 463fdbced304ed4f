"""Row-invariant causal attention over a cache, in plain torch and float32.

The KV is cut at absolute multiples of 64 positions and every product has a fixed shape: [Q·G, D] x [D, 64]
and [Q·G, 64] x [64, Dv], Q = 1 query for a single KV head (MLA) and 16 otherwise. The maximum over a row's
own scores is exact in any order, masked scores contribute exact zeros, and the blocks' partial sums are
added in ascending order: so neither the other rows nor the number of blocks looked at can change a row's
bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specter_core.model.linear import BLOCK_ROWS
from specter_core.model.rows import Rows
from specter_core.state.kv_cache import KV_BLOCK

_LOWEST = torch.finfo(torch.float32).min
_TILE_STEPS = 64


class Tile(NamedTuple):
    """Some steps of one sequence, with the KV blocks up to their highest position.

    masked: bool [blocks, items or 1, M or 1, 64], True where a key is behind the query's position.
    length: KV entries that exist for this tile (highest position + 1).
    """

    sequence: int
    start: int
    stop: int
    blocks: int
    length: int
    masked: Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, rows: Rows, scale: float) -> Tensor:
    """q [R, Hkv, G, D], k [B', S_max+1, Hkv, D], v [B', S_max+1, Hkv, Dv] -> [R, Hkv, G, Dv] in q's dtype."""
    _, kv_heads, group, _ = q.shape
    single = kv_heads == 1 and group >= 4
    tiles = rows.once(("tiles", single, group), lambda: _tiles(rows, single, group))
    query = q.to(torch.float32).unflatten(0, (rows.batch, rows.steps))  # [B, T, Hkv, G, D]
    out = query.new_zeros(*query.shape[:-1], v.shape[-1])
    for tile in tiles:
        part = query[tile.sequence, tile.start : tile.stop]  # [t, Hkv, G, D]
        if single:
            items = part.flatten(0, 1)  # [t, G, D]
        else:
            part = torch.nn.functional.pad(part, (0, 0, 0, 0, 0, 0, 0, BLOCK_ROWS - part.shape[0]))
            items = part.transpose(0, 1).flatten(1, 2)  # [Hkv, 16·G, D]
        kv_row = rows.kv_start + tile.sequence
        result = _attend(items, k[kv_row], v[kv_row], tile, scale)
        if single:
            out[tile.sequence, tile.start : tile.stop, 0] = result
        else:
            steps = tile.stop - tile.start
            out[tile.sequence, tile.start : tile.stop] = result.unflatten(1, (-1, group)).transpose(0, 1)[:steps]
    return out.flatten(0, 1).to(q.dtype)


def _attend(items: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> Tensor:
    """items [n, M, D], k [S_max+1, Hkv, D], v [S_max+1, Hkv, Dv] -> [n, M, Dv]; n is Hkv, or anything for
    Hkv = 1.
    """
    count = items.shape[0]
    scores = torch.stack(
        [torch.bmm(items, _block(k, block).permute(1, 2, 0).expand(count, -1, -1)) for block in range(tile.blocks)]
    )  # [blocks, n, M, 64]
    scores.mul_(scale).masked_fill_(tile.masked, -torch.inf)
    highest = scores.amax(dim=(0, 3), keepdim=True).clamp_(min=_LOWEST)  # [1, n, M, 1]
    weights = torch.exp(scores.sub_(highest))
    sums = weights.sum(dim=3, keepdim=True)  # [blocks, n, M, 1]
    total = mass = None
    for block in range(tile.blocks):
        values = _block(v, block)
        behind = tile.length - block * KV_BLOCK
        if behind < KV_BLOCK:  # scratch behind the tile has weight 0, but 0·nan would count
            values = torch.cat([values[:behind], torch.zeros_like(values[behind:])])
        part = torch.bmm(weights[block], values.transpose(0, 1).expand(count, -1, -1))
        total = part if total is None else total.add_(part)
        mass = sums[block] if mass is None else mass + sums[block]
    assert total is not None and mass is not None
    return total / mass.clamp_min(1.0)  # the highest weight is 1: a row with no entry gives 0/1


def _block(buffer: Tensor, block: int) -> Tensor:
    return buffer[block * KV_BLOCK : (block + 1) * KV_BLOCK].to(torch.float32)


def _tiles(rows: Rows, single: bool, group: int) -> list[Tile]:
    size = _TILE_STEPS if single else BLOCK_ROWS
    tiles = []
    for sequence in range(rows.batch):
        for start in range(0, rows.steps, size):
            positions = rows.host_positions[sequence][start : start + size]
            length = max(positions) + 1
            if length == 0:
                continue
            blocks = -(-length // KV_BLOCK)
            keys = torch.arange(blocks * KV_BLOCK).view(blocks, 1, 1, KV_BLOCK)
            stop = start + len(positions)
            if single:
                limit = torch.tensor(positions).view(1, -1, 1, 1)
            else:
                padded = positions + [-1] * (BLOCK_ROWS - len(positions))
                limit = torch.tensor(padded).repeat_interleave(group).view(1, 1, -1, 1)
            tiles.append(Tile(sequence, start, stop, blocks, length, keys > limit))
    return tiles
