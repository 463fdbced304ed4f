"""Row-invariant causal attention over a cache, in plain torch and float32.

The KV is cut at absolute multiples of 64 positions and every product has a fixed shape: [Q·G, D] x [D, 64]
and [Q·G, 64] x [64, Dv], Q = 1 query for a single KV head (MLA) and 16 otherwise. The maximum over a row's
own scores is exact in any order, masked scores contribute exact zeros, and the blocks' partial sums are
added in ascending order: so neither the other rows nor the number of blocks looked at can change a row's
bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specter_core.model.linear import BLOCK_ROWS
from specter_core.model.rows import Rows
from specter_core.state.kv_cache import KV_BLOCK

_LOWEST = torch.finfo(torch.float32).min
_TILE_STEPS = 64


class Tile(NamedTuple):
    """Steps start … stop-1 of one sequence, with the KV blocks up to their highest position.

    length: KV entries that exist for this tile (highest position + 1). masked: bool [blocks - open, items
    or 1, M or 1, 64], True where a key is behind the query's position; the first `open` blocks lie before
    every query. empty: some row of the tile attends to nothing.
    """

    sequence: int
    start: int
    stop: int
    blocks: int
    length: int
    open: int
    masked: Tensor
    empty: bool


def attention(q: Tensor, k: Tensor, v: Tensor, rows: Rows, scale: float) -> Tensor:
    """q [R, Hkv, G, D], k [B', S_max+1, Hkv, D], v [B', S_max+1, Hkv, Dv] -> [R, Hkv, G, Dv] in q's dtype."""
    _, kv_heads, group, _ = q.shape
    single = kv_heads == 1 and group >= 4
    tiles = rows.once(("tiles", single, group), lambda: _tiles(rows, single, group))
    query = (q.to(torch.float32) * scale).unflatten(0, (rows.batch, rows.steps))  # [B, T, Hkv, G, D]
    if len(tiles) == 1 and rows.batch == 1 and tiles[0].stop - tiles[0].start == rows.steps:
        return _tile(query[0], k[rows.kv_start], v[rows.kv_start], tiles[0], single).to(q.dtype)
    out = query.new_zeros(*query.shape[:-1], v.shape[-1])
    for tile in tiles:
        part = query[tile.sequence, tile.start : tile.stop]
        kv_row = rows.kv_start + tile.sequence
        out[tile.sequence, tile.start : tile.stop] = _tile(part, k[kv_row], v[kv_row], tile, single)
    return out.flatten(0, 1).to(q.dtype)


def _tile(query: Tensor, k: Tensor, v: Tensor, tile: Tile, single: bool) -> Tensor:
    """query [t, Hkv, G, D], k [S_max+1, Hkv, D], v [S_max+1, Hkv, Dv] -> [t, Hkv, G, Dv]."""
    if single:
        return _attend(query.squeeze(1), k, v, tile).unsqueeze(1)  # items are steps: [t, G, D]
    steps, _, group, _ = query.shape
    padded = torch.constant_pad_nd(query, (0, 0, 0, 0, 0, 0, 0, BLOCK_ROWS - steps))
    items = padded.transpose(0, 1).flatten(1, 2)  # items are KV heads: [Hkv, 16·G, D]
    return _attend(items, k, v, tile).unflatten(1, (-1, group)).transpose(0, 1)[:steps]


def _attend(items: Tensor, k: Tensor, v: Tensor, tile: Tile) -> Tensor:
    """Scaled queries items [n, M, D] over k [S_max+1, Hkv, D], v [S_max+1, Hkv, Dv] -> [n, M, Dv]; n is
    Hkv, or any number for Hkv = 1.
    """
    scores = _scores(items, k, tile)  # [blocks, n, M, 64]
    scores[tile.open :].masked_fill_(tile.masked, -torch.inf)
    highest = scores.amax(dim=(0, 3), keepdim=True)  # [1, n, M, 1]
    if tile.empty:
        highest.clamp_(min=_LOWEST)
    weights = scores.sub_(highest).exp_()
    parts = _weighted_values(weights, v, tile)  # one [n, M, Dv] per block
    total, mass = parts[0], weights[0].sum(dim=2, keepdim=True)
    for block in range(1, tile.blocks):
        total = total + parts[block]
        mass = mass + weights[block].sum(dim=2, keepdim=True)
    return total / (mass.clamp_min(1.0) if tile.empty else mass)  # the highest weight is 1: nothing attended is 0/1


def _scores(items: Tensor, k: Tensor, tile: Tile) -> Tensor:
    if k.shape[1] == items.shape[0] == 1:  # one step of MLA: the blocks are the batch
        keys = k[: tile.blocks * KV_BLOCK, 0].to(torch.float32).unflatten(0, (tile.blocks, KV_BLOCK))
        return torch.bmm(items.expand(tile.blocks, -1, -1), keys.transpose(1, 2)).unsqueeze(1)
    keys = [_block(k, block).permute(1, 2, 0).expand(items.shape[0], -1, -1) for block in range(tile.blocks)]
    return torch.stack([torch.bmm(items, key) for key in keys])


def _weighted_values(weights: Tensor, v: Tensor, tile: Tile) -> Sequence[Tensor]:
    """weights [blocks, n, M, 64] -> per block its weighted values [n, M, Dv].

    Entries behind the tile's length are scratch: their weight is 0, but 0·nan would count, so they are cut
    off.
    """
    whole, count = tile.length // KV_BLOCK, weights.shape[1]
    parts: list[Tensor] = []
    if v.shape[1] == count == 1 and whole > 1:
        values = v[: whole * KV_BLOCK, 0].to(torch.float32).unflatten(0, (whole, KV_BLOCK))
        parts.extend(torch.bmm(weights[:whole, 0], values).unsqueeze(1))
    for block in range(len(parts), tile.blocks):
        values = _block(v, block)
        if block == whole:
            kept = tile.length - block * KV_BLOCK
            values = torch.constant_pad_nd(values[:kept], (0, 0, 0, 0, 0, KV_BLOCK - kept))
        parts.append(torch.bmm(weights[block], values.transpose(0, 1).expand(count, -1, -1)))
    return parts


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
            stop, blocks = start + len(positions), -(-length // KV_BLOCK)
            if not single:
                positions = positions + [-1] * (BLOCK_ROWS - len(positions))
            first = max(0, min(position for position in positions) + 1) // KV_BLOCK
            keys = torch.arange(first * KV_BLOCK, blocks * KV_BLOCK).view(-1, 1, 1, KV_BLOCK)
            limit = torch.tensor(positions)
            limit = limit.view(1, -1, 1, 1) if single else limit.repeat_interleave(group).view(1, 1, -1, 1)
            empty = min(positions) < 0
            tiles.append(Tile(sequence, start, stop, blocks, length, first, keys > limit, empty))
    return tiles
