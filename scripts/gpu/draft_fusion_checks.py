"""Checks of the draft's fused launches against the launches that they replace; on a GPU or in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from scripts.gpu.decode_checks import Check, Env, bit_mismatches, relative_error
from scripts.gpu.decode_checks_attention import Sequences, attend, poisoned, rope_tables, rotate
from scripts.gpu.int4_checks import Case, make_inputs
from specter_core.draft.kernels.block_path import BlockExpertPath
from specter_core.model.config import RouterConfig
from specter_core.model.kernels import gqa_row
from specter_core.model.kernels.gemv import gemv
from specter_core.model.kernels.linear import NormWeights
from specter_core.model.kernels.rope import RowTensors
from specter_core.model.kernels.router import Routing, route
from specter_core.model.kernels.shared_down import SharedDown
from specter_core.model.kernels.tiles import GemvTile


def routing_checks(env: Env, n: int, k: int, experts: int, top_k: int, tile: GemvTile, count: int) -> Iterator[Check]:
    """A product that routes against one with `route` behind it: the same choices and bits but the weights', which are
    sums over other threads.
    """
    w, router = env.randn(2 * n, k, scale=k**-0.5), env.randn(experts + 1, k, scale=k**-0.5)
    norm = NormWeights(1.0 + env.randn(k, scale=0.1), None, 1e-6, False)
    valid = torch.arange(count, device=env.device) % 4 != 2
    zeros = torch.zeros(count, dtype=torch.int64, device=env.device)
    rows = RowTensors(zeros, valid, zeros, 1)
    arrivals = torch.zeros(1, dtype=torch.int32, device=env.device)
    kinds = [(top_k, RouterConfig(scaling=1.5)), (top_k, RouterConfig(normalise=True)), (2, RouterConfig(jitter=0.01))]
    for chosen, config in kinds:
        for gated in (False, True):
            x = env.randn(count, k)
            found = []
            for fused in (False, True):
                ids = torch.full((count, chosen), -7, dtype=torch.int64, device=env.device)
                weights, gate = env.poison(count, chosen, dtype=torch.float32), env.poison(count, dtype=torch.float32)
                logits, normed = env.poison(count, experts + 1, dtype=torch.float32), env.poison(count, k)
                out, counters = env.poison(count, n), torch.ones(experts, dtype=torch.int32, device=env.device)
                routing = Routing(
                    ids, weights, valid, arrivals, experts, config.scaling, config.normalise, config.jitter, counters,
                    gate if gated else None,
                )  # fmt: skip
                own = router if gated else router[:experts]
                gemv(x, w, out, tile, norm=norm, swiglu=True, router=own, logits=logits, normed=normed,
                     routing=routing if fused else None)  # fmt: skip
                if not fused:
                    route(logits, ids, weights, rows=rows, experts=experts, scaling=config.scaling,
                          normalise=config.normalise, jitter=config.jitter, counters=counters,
                          gate=gate if gated else None)  # fmt: skip
                found.append((weights, ids, gate[:, None], normed, out, counters[:, None]))
            kind = "sparsemixer" if config.jitter else "normalised" if config.normalise else "softmax"
            name = f"routing product {kind} {experts}/{chosen} R={count}{' gated' * gated}"
            (wanted, *others), (weights, *same) = found
            for what, a, b in zip(("ids", "gate", "normed rows", "products", "counters"), others, same, strict=True):
                yield Check(f"{name}: other {what}", bit_mismatches(a, b), 0.0)
            yield Check(f"{name}: weights", relative_error(weights, wanted), 1e-6)
            yield Check(f"{name}: arrivals left", float(arrivals), 0.0)


def gqa_row_checks(
    env: Env, heads: int, kv_heads: int, d: int, starts: tuple[int, ...], capacity: int, switch: int | None = None
) -> Iterator[Check]:
    """Rows of several sequences, one of them invalid, against float64; alone, and in a larger bucket."""
    batch = len(starts)
    rows = Sequences(starts, 1, tuple(int(b != 1) for b in range(batch))).rows(env.device)
    tables = rope_tables(env, d, capacity, interleaved=False, switch=switch)
    before = [env.randn(batch, capacity + 1, kv_heads, d) for _ in range(2)]
    qkv = env.randn(batch, (heads + 2 * kv_heads) * d)
    arrivals = torch.zeros(batch * heads, dtype=torch.int32, device=env.device)

    def run(part: RowTensors, values: Tensor, caches: list[Tensor], bucket: int) -> Tensor:
        count = values.shape[0]
        partials = poisoned(env, count, heads, d, bucket)
        out = env.poison(count, heads, d)
        return gqa_row.gqa_row(values, *caches, part, tables, d**-0.5, bucket, partials, arrivals, out)

    caches, bucket = [t.clone() for t in before], max(starts) + 1
    out = run(rows, qkv, caches, bucket)
    split = qkv.unflatten(1, (heads + 2 * kv_heads, d))
    turned = rotate(split[:, : heads + kv_heads], rows, tables)
    expected = [t.double() for t in before]
    for r in range(batch):
        if rows.valid[r]:
            at = (r, int(rows.positions[r]))
            expected[0][at], expected[1][at] = turned[r, heads:], split[r, heads + kv_heads :].double()
    name = f"GQA row {heads}/{kv_heads}x{d} at {starts}"
    yield Check(f"{name} keys", relative_error(caches[0], expected[0]), env.tolerance)
    yield Check(f"{name} values", relative_error(caches[1], expected[1]), 0.0)
    wanted = attend(turned[:, :heads], expected[0], expected[1], rows, d**-0.5)
    yield Check(f"{name} attention", relative_error(out, wanted), env.tolerance)
    yield Check(f"{name}: arrivals left", float(arrivals.abs().sum()), 0.0)
    wrong = bit_mismatches(run(rows, qkv, [t.clone() for t in before], capacity), out)
    yield Check(f"{name}: rows with other bits in a larger bucket", wrong, 0.0)
    wrong = 0.0
    for r in range(batch):
        alone = RowTensors(rows.positions[r : r + 1], rows.valid[r : r + 1], rows.context[r : r + 1], 1)
        own = [t[r : r + 1].clone() for t in before]
        wrong += bit_mismatches(run(alone, qkv[r : r + 1], own, bucket), out[r : r + 1])
    yield Check(f"{name}: rows with other bits alone", wrong, 0.0)


def shared_checks(env: Env, case: Case, shared: int) -> Iterator[Check]:
    """Routed experts summed into the residual stream, with shared ones beside them and without."""
    gate_up, down, _, ids, weights = make_inputs(case, env.device, 3)
    x, normed = env.randn(case.tokens, case.hidden), env.randn(case.tokens, case.hidden)
    inner, w = env.randn(case.tokens, shared), env.randn(case.hidden, shared, scale=shared**-0.5)
    gate = env.randn(case.tokens, dtype=torch.float32)
    path = BlockExpertPath.from_layers([(gate_up, down)], case.hidden, case.width, case.top_k, env.device)
    routed = path.forward(0, normed, ids, weights).clone()
    for name, inputs in (("alone", None), ("shared", None), ("gated", gate)):
        sums = env.poison(case.tokens, case.hidden, dtype=torch.float32)
        wanted = x.double() + routed.double()
        if name != "alone":
            size = 1.0 if inputs is None else torch.sigmoid(gate.double())[:, None]
            wanted = wanted + size * (inner.double() @ w.double().T)
        out = x.clone()
        shared_down = SharedDown(inner, w, inputs, out, sums) if name != "alone" else None
        path.add(0, normed, ids, weights, out, shared_down)
        yield Check(f"routed and shared experts, {name} {case}", relative_error(out, wanted), env.tolerance)
