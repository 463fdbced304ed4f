"""Checks of the prefill kernels, as in decode_checks.py: against float64, and a row's bits wherever a prompt is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from scripts.gpu.decode_checks import Check, Env, bit_mismatches, invariance, relative_error, sum_limit
from scripts.gpu.decode_checks_attention import attend
from scripts.gpu.decode_checks_moe import grouped_checks
from scripts.gpu.nested_checks import nested_checks
from specter_core.model.kernels.linear import linear
from specter_core.model.kernels.prefill_attention import gqa_prefill, mla_prefill
from specter_core.model.kernels.rope import RowTensors
from specter_core.model.kernels.tiles import prefill_tile
from specter_core.verify.kernels import nested_ffn as nested
from specter_core.verify.kernels.combine_rows import add_rows
from specter_core.verify.kernels.grouped_ffn import PREFILL_TILES


def rows_of(start: int, stop: int, kv_row: int, device: str) -> RowTensors:
    """Positions start … stop-1 of one sequence."""
    positions = torch.arange(start, stop, device=device)
    return RowTensors(positions, torch.ones_like(positions, dtype=torch.bool), positions, stop - start, kv_row)


def mla_prefill_checks(
    env: Env, heads: int, rope: int, rank: int, count: int, capacity: int, chunks: Sequence[int]
) -> Iterator[Check]:
    """`count` rows at the beginning of KV row 1, whole and in chunks of several sizes; what lies behind is NaN."""
    cache = env.randn(2, capacity + 1, rank + rope)
    cache[:, count:] = float("nan")
    q = env.randn(count, heads, rank + rope)
    scale = (rank + rope) ** -0.5

    def run(query: Tensor, rows: RowTensors) -> Tensor:
        return mla_prefill(query, cache, rank, rows, scale, env.poison(query.shape[0], heads, rank))

    entries = cache.unsqueeze(2)
    wanted = attend(q, entries, entries[..., :rank], rows_of(0, count, 1, env.device), scale)
    yield from _whole_and_cut(f"MLA prefill {heads}x({rank}+{rope}) R={count}", env, q, run, wanted, chunks)


def gqa_prefill_checks(
    env: Env, heads: int, kv_heads: int, d: int, count: int, capacity: int, chunks: Sequence[int]
) -> Iterator[Check]:
    """As `mla_prefill_checks`."""
    keys, values = env.randn(2, capacity + 1, kv_heads, d), env.randn(2, capacity + 1, kv_heads, d)
    keys[:, count:] = values[:, count:] = float("nan")
    q = env.randn(count, heads, d)

    def run(query: Tensor, rows: RowTensors) -> Tensor:
        return gqa_prefill(query, keys, values, rows, d**-0.5, env.poison(query.shape[0], heads, d))

    wanted = attend(q, keys, values, rows_of(0, count, 1, env.device), d**-0.5)
    yield from _whole_and_cut(f"GQA prefill {heads}/{kv_heads}x{d} R={count}", env, q, run, wanted, chunks)


def _whole_and_cut(
    name: str, env: Env, q: Tensor, run: Callable[[Tensor, RowTensors], Tensor], wanted: Tensor, chunks: Sequence[int]
) -> Iterator[Check]:
    count = q.shape[0]
    out = run(q, rows_of(0, count, 1, env.device))
    yield Check(name, relative_error(out, wanted), env.tolerance)
    for chunk in chunks:
        cuts = [(start, min(start + chunk, count)) for start in range(0, count, chunk)]
        parts = [run(q[a:b].contiguous(), rows_of(a, b, 1, env.device)) for a, b in cuts]
        yield Check(f"{name}: rows with other bits in chunks of {chunk}", bit_mismatches(torch.cat(parts), out), 0.0)


def add_rows_checks(env: Env, count: int, top_k: int, hidden: int) -> Iterator[Check]:
    """With and without shared experts, one choice routed nowhere."""
    rows, x = env.randn(count, top_k, hidden, dtype=torch.float32), env.randn(count, hidden)
    weights = torch.rand(count, top_k, generator=env.generator).to(env.device)
    ids = env.randint(0, 9, count, top_k)
    ids[0, 0] = -1
    rows[0, 0] = float("nan")
    shared = env.randn(count, hidden, dtype=torch.float32)
    routed = (torch.where(ids.unsqueeze(2) >= 0, rows, 0.0).double() * weights.double().unsqueeze(2)).sum(1)
    for extra in (None, shared):
        found = add_rows(rows, weights, ids, extra, x.clone())
        wanted = x.double() + routed + (0.0 if extra is None else extra.double())
        yield Check(
            f"add rows {count}x{hidden} shared={extra is not None}", relative_error(found, wanted), env.tolerance
        )


def product_checks(env: Env, n: int, k: int, count: int) -> Iterator[Check]:
    """A weight [n, k] in the prefill's tile, and a row's bits in other company."""
    w, x = env.randn(n, k, scale=k**-0.5), env.randn(count, k)

    def run(value: Tensor) -> Tensor:
        out = env.poison(value.shape[0], n, dtype=torch.float32)
        return linear(value, w, out, prefill_tile(n, k, pair=False))

    yield Check(f"linear {n}x{k} R={count}", relative_error(run(x), x.double() @ w.double().T), sum_limit(k))
    yield invariance(f"linear {n}x{k}", env, x, run, (1, 70, count))


def on_device(seed: int = 31) -> Iterator[Check]:
    """Everything at the models' shapes, in bfloat16."""
    env = Env.make("cuda", torch.bfloat16, seed)
    yield from mla_prefill_checks(env, 16, 64, 512, 301, 4160, (1, 100, 256))
    yield from gqa_prefill_checks(env, 16, 16, 128, 301, 4160, (1, 100))
    yield from gqa_prefill_checks(env, 32, 8, 128, 301, 4160, (1, 100))
    yield from add_rows_checks(env, 301, 6, 2048)
    for n, k in ((3648, 2048), (2048, 2816), (64, 2048)):
        yield from product_checks(env, n, k, 300)
    yield from grouped_checks(env, 8, 6, 2048, 1408, 300, PREFILL_TILES)
    yield from nested_checks(env, 4, 2, 2048, 1408, 300, nested.PREFILL_TILES, PREFILL_TILES)
