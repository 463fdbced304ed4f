"""Checks of rotary embedding, cache and attention in the decode kernels, as in decode_checks.py: against float64, and a
row's bits in any company; and of a captured chain of launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from scripts.gpu.decode_checks import Check, Env, bit_mismatches, relative_error, rms
from specter_core.model.kernels.attention import combine_splits, gqa_splits
from specter_core.model.kernels.linear import linear
from specter_core.model.kernels.mla import mla_prepare
from specter_core.model.kernels.mla_attention import mla_splits, mla_values
from specter_core.model.kernels.partials import Partials
from specter_core.model.kernels.rope import RopeTables, RowTensors, rope_append
from specter_core.model.kernels.tiles import LinearTile


class Sequences(NamedTuple):
    """B sequences x T rows: row (b, t) stands at starts[b] + t; valid for t < counts[b]."""

    starts: tuple[int, ...]
    steps: int
    counts: tuple[int, ...]

    def rows(self, device: str, kv_start: int = 0) -> RowTensors:
        start = torch.tensor(self.starts, device=device).unsqueeze(1)
        step = torch.arange(self.steps, device=device).unsqueeze(0)
        valid = (step < torch.tensor(self.counts, device=device).unsqueeze(1)).flatten()
        positions = (start + step).flatten()
        return RowTensors(positions, valid, positions + 1, self.steps, kv_start)

    @property
    def last(self) -> int:
        return max(s + c for s, c in zip(self.starts, self.counts, strict=True)) - 1


def rope_tables(env: Env, dim: int, positions: int, *, interleaved: bool, switch: int | None = None) -> RopeTables:
    """Random angles: the kernels must follow the table, whatever is in it."""
    angle = torch.rand(1 if switch is None else 2, positions, dim // 2, generator=env.generator) * 6.28
    cos, sin = angle.cos(), angle.sin()
    if interleaved:
        cos, sin = cos.repeat_interleave(2, -1), torch.stack([-sin, sin], -1).flatten(-2)
    else:
        cos, sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    return RopeTables(cos.to(env.device), sin.to(env.device), interleaved, switch if switch is not None else 1 << 30)


def rotate(x: Tensor, rows: RowTensors, tables: RopeTables) -> Tensor:
    """x [R, n, dim] -> float64, rotated at its row's position (0 for invalid rows)."""
    x = x.double()
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if tables.interleaved else x.roll(x.shape[-1] // 2, -1)
    side = (rows.context > tables.switch).long() if tables.cos.shape[0] == 2 else torch.zeros_like(rows.context)
    position = torch.where(rows.valid, rows.positions, 0)
    cos, sin = tables.cos.double()[side, position].unsqueeze(1), tables.sin.double()[side, position].unsqueeze(1)
    return x * cos + swapped * sin


def attend(q: Tensor, keys: Tensor, values: Tensor, rows: RowTensors, scale: float) -> Tensor:
    """Float64 reference: q [R, Hq, d] over keys [B, S+1, Hkv, d], values [B, S+1, Hkv, v] -> [R, Hq, v]."""
    out = torch.zeros(*q.shape[:2], values.shape[-1], dtype=torch.float64, device=q.device)
    group = q.shape[1] // keys.shape[2]
    for r in range(q.shape[0]):
        if rows.valid[r]:
            b, end = rows.kv_start + r // rows.steps, int(rows.positions[r]) + 1
            k = keys[b, :end].double().repeat_interleave(group, dim=1)
            v = values[b, :end].double().repeat_interleave(group, dim=1)
            p = torch.softmax(torch.einsum("hd,shd->hs", q[r].double(), k) * scale, dim=-1)
            out[r] = torch.einsum("hs,shv->hv", p, v)
    return out


def one_by_one(sequences: Sequences, flat: Tensor, run: Callable[[Sequences, Tensor], Tensor]) -> Tensor:
    """The valid rows of `flat` [B·T, …] through `run` with T = 1, step after step; invalid rows NaN."""
    batch, steps = len(sequences.starts), sequences.steps
    shaped = flat.unflatten(0, (batch, steps))
    parts = []
    for t in range(steps):
        alone = Sequences(tuple(s + t for s in sequences.starts), 1, tuple(int(t < c) for c in sequences.counts))
        parts.append(run(alone, shaped[:, t].contiguous()))
    return torch.stack(parts, dim=1).flatten(0, 1)


def gqa_checks(
    env: Env, heads: int, kv_heads: int, d: int, sequences: Sequences, capacity: int, *, interleaved: bool = False,
    switch: int | None = None,
) -> Iterator[Check]:  # fmt: skip
    """Rope + append, attention, buckets, and T rows at once against one row at a time."""
    batch, rows = len(sequences.starts), sequences.rows(env.device, kv_start=1)
    count = rows.total
    tables = rope_tables(env, d, capacity, interleaved=interleaved, switch=switch)
    history = [env.randn(batch + 1, capacity + 1, kv_heads, d) for _ in range(2)]
    history_copies = [h.clone() for h in history]
    qkv = env.randn(count, (heads + 2 * kv_heads) * d)
    name = f"GQA {heads}/{kv_heads}x{d} B={batch} T={sequences.steps}"

    def append(part: RowTensors, values: Tensor, keys: Tensor, vals: Tensor) -> Tensor:
        q = env.poison(values.shape[0], heads, d)
        rope_append(values, q, keys, vals, part, tables)
        return q

    q = append(rows, qkv, *history)
    split = qkv.unflatten(1, (heads + 2 * kv_heads, d))
    rotated = rotate(split[:, : heads + kv_heads], rows, tables)
    yield Check(f"{name} rope q", relative_error(q, rotated[:, :heads]), env.tolerance)
    expected_k, expected_v = (h.double() for h in history_copies)
    for r in range(count):
        at = (1 + r // rows.steps, int(rows.positions[r]) if rows.valid[r] else capacity)
        expected_k[at], expected_v[at] = rotated[r, heads:], split[r, heads + kv_heads :].double()
    live = slice(0, capacity)
    yield Check(f"{name} keys", relative_error(history[0][:, live], expected_k[:, live]), env.tolerance)
    yield Check(f"{name} values", relative_error(history[1][:, live], expected_v[:, live]), 0.0)

    scale = d**-0.5

    def attention(part: Sequences, query: Tensor, bucket: int) -> Tensor:
        part_rows = part.rows(env.device, kv_start=1)
        partials = poisoned(env, query.shape[0], heads, d, bucket)
        gqa_splits(query, history[0], history[1], part_rows, scale, bucket, partials)
        return combine_splits(partials, part_rows, bucket, env.poison(query.shape[0], heads, d))

    bucket = sequences.last + 1
    out = attention(sequences, q, bucket)
    yield Check(f"{name} attention", relative_error(out, attend(q, *history, rows, scale)), env.tolerance)
    wrong = bit_mismatches(attention(sequences, q, capacity), out)
    yield Check(f"{name}: rows with other bits in a larger bucket", wrong, 0.0)
    alone = one_by_one(sequences, q, lambda part, query: attention(part, query, bucket))
    yield Check(f"{name}: rows with other bits alone", bit_mismatches(alone, out), 0.0)


def mla_checks(
    env: Env, heads: int, nope: int, rope: int, rank: int, v_dim: int, sequences: Sequences, capacity: int,
    steps_per_program: Sequence[int] = (1,), row_tile: int = 32,
) -> Iterator[Check]:  # fmt: skip
    """Prepare, attention over latents, value up-projection; buckets, T, and rows per program change no bit.

    row_tile 32: the value up-projection in two launches; else in one.
    """
    batch, rows = len(sequences.starts), sequences.rows(env.device)
    count, width = rows.total, rank + rope
    tables = rope_tables(env, rope, capacity, interleaved=True)
    cache = env.randn(batch, capacity + 1, width)
    before = cache.clone()
    down = env.randn(count, heads * (nope + rope) + rope + rank)
    key_up = env.randn(heads, nope, rank, scale=nope**-0.5)
    value_up = env.randn(heads, rank, v_dim, scale=rank**-0.5)
    gain = 1.0 + env.randn(rank, scale=0.1)
    name = f"MLA {heads}x({rank}+{rope}) B={batch} T={sequences.steps}"

    def prepare(part: Sequences, values: Tensor, target: Tensor) -> Tensor:
        query = env.poison(values.shape[0], heads, width)
        pieces = values.split([heads * nope, heads * rope, rope, rank], dim=1)
        mla_prepare(*pieces, key_up, gain, 1e-6, part.rows(env.device), tables, query, target, row_tile=row_tile)
        return query

    q = prepare(sequences, down, cache)
    pieces = down.split([heads * nope, heads * rope, rope, rank], dim=1)
    absorbed = torch.einsum("rhn,hnc->rhc", pieces[0].unflatten(1, (heads, nope)).double(), key_up.double())
    pe = rotate(pieces[1].unflatten(1, (heads, rope)), rows, tables)
    yield Check(f"{name} query", relative_error(q, torch.cat([absorbed, pe], dim=2)), env.tolerance)
    entry = torch.cat([rms(pieces[3], gain, 1e-6), rotate(pieces[2].unsqueeze(1), rows, tables)[:, 0]], dim=1)
    expected = before.double()
    for r in range(count):
        expected[r // rows.steps, int(rows.positions[r]) if rows.valid[r] else capacity] = entry[r]
    yield Check(f"{name} cache", relative_error(cache[:, :capacity], expected[:, :capacity]), env.tolerance)
    other = before.clone()
    alone = one_by_one(sequences, down, lambda part, values: prepare(part, values, other))
    keep = rows.valid
    yield Check(f"{name}: queries with other bits alone", bit_mismatches(alone[keep], q[keep]), 0.0)
    wrong = bit_mismatches(other[:, :capacity].flatten(0, 1), cache[:, :capacity].flatten(0, 1))
    yield Check(f"{name}: entries with other bits alone", wrong, 0.0)

    scale = (nope + rope) ** -0.5

    def attention(part: Sequences, query: Tensor, bucket: int, shared: int) -> Tensor:
        part_rows = part.rows(env.device)
        partials = poisoned(env, query.shape[0], heads, rank, bucket)
        mla_splits(query, cache, rank, part_rows, scale, bucket, partials, steps_per_program=shared)
        out = env.poison(query.shape[0], heads * v_dim)
        latent = env.poison(query.shape[0], heads, rank) if row_tile == 32 else None
        return mla_values(partials, value_up, part_rows, bucket, out, latent=latent, row_tile=row_tile)

    bucket = sequences.last + 1
    entries = cache.unsqueeze(2)
    mixed = attend(q, entries, entries[..., :rank], rows, scale)
    wanted = torch.einsum("rhc,hcv->rhv", mixed, value_up.double()).flatten(1)
    for shared in steps_per_program:
        out = attention(sequences, q, bucket, shared)
        yield Check(f"{name} attention x{shared}", relative_error(out, wanted), env.tolerance)
        wrong = bit_mismatches(attention(sequences, q, capacity, shared), out)
        yield Check(f"{name} x{shared}: rows with other bits in a larger bucket", wrong, 0.0)
        alone = one_by_one(sequences, q, lambda part, query, s=shared: attention(part, query, bucket, s))
        yield Check(f"{name} x{shared}: rows with other bits alone", bit_mismatches(alone, out), 0.0)


def poisoned(env: Env, rows: int, heads: int, width: int, bucket: int) -> Partials:
    part = Partials.allocate(rows, heads, width, bucket, env.device)
    for tensor in part:
        tensor.fill_(float("nan"))
    return part


def graph_checks(env: Env) -> Iterator[Check]:
    """A captured chain, replayed on new inputs, equals the same launches made one by one."""
    rows, hidden, heads, rank, rope, capacity = 3, 256, 4, 64, 32, 256
    width, tile = rank + rope, LinearTile(16, 16, 128, 2)
    x, w = env.randn(rows, hidden), env.randn(heads * width, hidden, scale=0.05)
    query = env.poison(rows, heads * width)
    partial = env.poison(2 * rows * heads * width, dtype=torch.float32)
    cache, value_up = env.randn(rows, capacity + 1, width), env.randn(heads, rank, 16)
    part = poisoned(env, rows, heads, rank, capacity)
    row_tensors = Sequences((5, 130, 66), 1, (1, 1, 1)).rows(env.device)
    out = env.poison(rows, heads * 16)

    def chain() -> None:
        linear(x, w, query, tile, partial=partial)
        mla_splits(query.view(rows, heads, width), cache, rank, row_tensors, 0.1, capacity, part)
        mla_values(part, value_up, row_tensors, capacity, out)

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    wrong = 0.0
    for step in range(4):
        x.copy_(env.randn(rows, hidden))
        row_tensors.positions.add_(7 * step)
        out.fill_(float("nan"))
        graph.replay()
        replayed = out.clone()
        out.fill_(float("nan"))
        chain()
        wrong += bit_mismatches(replayed, out) + float(torch.isnan(out).sum())
    yield Check("graph: rows with other bits than eager launches", wrong, 0.0)
