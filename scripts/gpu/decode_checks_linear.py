"""Checks of the decode kernels' linear layers and norms, as in decode_checks.py: every option against float64, and a
row's bits in any company.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from scripts.gpu.decode_checks import Check, Env, invariance, layer_norm, relative_error, rms, sum_limit
from specter_core.model.kernels.gemv import gemv
from specter_core.model.kernels.head_linear import head_linear
from specter_core.model.kernels.linear import NormWeights, linear
from specter_core.model.kernels.norm import norm_rows, softmax_rows
from specter_core.model.kernels.tiles import GemvTile, LinearTile


def linear_checks(
    env: Env, n: int, k: int, tile: LinearTile, counts: Sequence[int],
    value_counts: Sequence[int] | None = None,
) -> Iterator[Check]:  # fmt: skip
    """Every option of the linear layer on a weight [n, k], and its row-invariance over `counts` rows.

    value_counts: numbers of rows at which the options are compared with float64; None: counts.
    """
    w = env.randn(n, k, scale=k**-0.5)
    pair = env.randn(2 * n, k, scale=k**-0.5)
    bias, gain, shift = env.randn(n), 1.0 + env.randn(k, scale=0.1), env.randn(k, scale=0.1)
    rms_norm, full_norm = NormWeights(gain, None, 1e-6, False), NormWeights(gain, shift, 1e-5, True)
    whole = LinearTile(tile.rows, tile.block_n, tile.block_k, 1, tile.warps, tile.stages)

    def run(
        x: Tensor, weight: Tensor = w, with_tile: LinearTile = tile, out_dtype: Any = None, **options: Any
    ) -> Tensor:
        out = env.poison(x.shape[0], n, dtype=out_dtype)
        partial = env.poison(with_tile.split * x.shape[0] * n, dtype=torch.float32)
        return linear(x, weight, out, with_tile, partial=partial, **options)

    for count in counts if value_counts is None else value_counts:
        x = env.randn(count, k)
        residual, addend = env.randn(count, n), env.randn(count, n, dtype=torch.float32)
        gate = env.randn(count, 3, dtype=torch.float32)[:, 1]
        plain = x.double() @ w.double().T
        x_rms = rms(x, gain, 1e-6)
        gated = x_rms @ pair[:n].double().T
        swiglu = torch.nn.functional.silu(gated) * (x_rms @ pair[n:].double().T)
        name = f"linear {n}x{k} R={count}"
        yield Check(f"{name} plain", relative_error(run(x), plain), env.tolerance)
        yield Check(f"{name} fp32 out", relative_error(run(x, out_dtype=torch.float32), plain), sum_limit(k))
        value = run(x, bias=bias, residual=residual)
        yield Check(f"{name} bias+residual", relative_error(value, plain + bias.double() + residual), env.tolerance)
        value = run(x, residual=residual, addend=addend, row_gate=gate)
        wanted = plain * torch.sigmoid(gate.double()).unsqueeze(1) + addend + residual
        yield Check(f"{name} gate+addend+residual", relative_error(value, wanted), env.tolerance)
        value = run(x, norm=rms_norm)
        yield Check(f"{name} RMSNorm", relative_error(value, x_rms @ w.double().T), env.tolerance)
        normed = env.poison(count, k)
        value = run(x, norm=rms_norm, normed=normed)
        yield Check(f"{name} RMSNorm kept", relative_error(normed, x_rms), env.tolerance)
        yield Check(f"{name} RMSNorm, kept", relative_error(value, x_rms @ w.double().T), env.tolerance)
        wanted = layer_norm(x, gain, shift, 1e-5) @ w.double().T + bias.double()
        yield Check(f"{name} LayerNorm", relative_error(run(x, norm=full_norm, bias=bias), wanted), env.tolerance)
        value = run(x, weight=pair, with_tile=whole, norm=rms_norm, swiglu=True)
        yield Check(f"{name} SwiGLU", relative_error(value, swiglu), 2 * env.tolerance)
    x = env.randn(max(counts), k)
    yield invariance(f"linear {n}x{k}", env, x, run, counts)
    yield invariance(f"linear {n}x{k} RMSNorm", env, x, lambda v: run(v, norm=rms_norm), counts)
    yield invariance(f"linear {n}x{k} LayerNorm", env, x, lambda v: run(v, norm=full_norm, bias=bias), counts)
    yield invariance(
        f"linear {n}x{k} SwiGLU", env, x,
        lambda v: run(v, weight=pair, with_tile=whole, norm=rms_norm, swiglu=True), counts,
    )  # fmt: skip


def gemv_checks(env: Env, n: int, k: int, experts: int, tile: GemvTile, counts: Sequence[int]) -> Iterator[Check]:
    """Every option of the draft's linear layer, the router beside it, and a row's bits in any company."""
    w, pair = env.randn(n, k, scale=k**-0.5), env.randn(2 * n, k, scale=k**-0.5)
    router = env.randn(experts, k, scale=k**-0.5)
    bias, gain, shift = env.randn(n), 1.0 + env.randn(k, scale=0.1), env.randn(k, scale=0.1)
    rms_norm, full_norm = NormWeights(gain, None, 1e-6, False), NormWeights(gain, shift, 1e-5, True)

    def run(x: Tensor, weight: Tensor = w, out_dtype: Any = None, **options: Any) -> Tensor:
        return gemv(x, weight, env.poison(x.shape[0], n, dtype=out_dtype), tile, **options)

    for count in counts:
        x = env.randn(count, k)
        residual, addend = env.randn(count, n), env.randn(count, n, dtype=torch.float32)
        gate = env.randn(count, 3, dtype=torch.float32)[:, 1]
        plain, name = x.double() @ w.double().T, f"gemv {n}x{k} R={count}"
        yield Check(f"{name} fp32 out", relative_error(run(x, out_dtype=torch.float32), plain), sum_limit(k))
        value = run(x, bias=bias, residual=residual)
        yield Check(f"{name} bias+residual", relative_error(value, plain + bias.double() + residual), env.tolerance)
        value = run(x, residual=residual, addend=addend, row_gate=gate)
        wanted = plain * torch.sigmoid(gate.double()).unsqueeze(1) + addend + residual
        yield Check(f"{name} gate+addend+residual", relative_error(value, wanted), env.tolerance)
        for norm, x_norm in ((rms_norm, rms(x, gain, 1e-6)), (full_norm, layer_norm(x, gain, shift, 1e-5))):
            kind = "LayerNorm" if norm.layer else "RMSNorm"
            value = run(x, norm=norm, out_dtype=torch.float32)
            yield Check(f"{name} {kind}", relative_error(value, x_norm @ w.double().T), 2 * sum_limit(k))
            logits, normed = env.poison(count, experts, dtype=torch.float32), env.poison(count, k)
            value = run(x, weight=pair, norm=norm, swiglu=True, router=router, logits=logits, normed=normed)
            halves = x_norm @ pair.double().T
            wanted = torch.nn.functional.silu(halves[:, :n]) * halves[:, n:]
            yield Check(f"{name} {kind} SwiGLU", relative_error(value, wanted), 2 * env.tolerance)
            yield Check(f"{name} {kind} kept", relative_error(normed, x_norm), env.tolerance)
            yield Check(f"{name} {kind} logits", relative_error(logits, x_norm @ router.double().T), 2 * sum_limit(k))
            gemv(x, router[:0], logits.fill_(float("nan"))[:, :0], tile, norm=norm, router=router, logits=logits)
            yield Check(f"{name} {kind} alone", relative_error(logits, x_norm @ router.double().T), 2 * sum_limit(k))
    x = env.randn(max(counts), k)
    yield invariance(f"gemv {n}x{k}", env, x, run, counts)
    yield invariance(f"gemv {n}x{k} RMSNorm SwiGLU", env, x,
                     lambda v: run(v, weight=pair, norm=rms_norm, swiglu=True), counts)  # fmt: skip


def norm_checks(env: Env, hidden: int, counts: Sequence[int]) -> Iterator[Check]:
    gain, shift = 1.0 + env.randn(hidden, scale=0.1), env.randn(hidden, scale=0.1)
    x = env.randn(max(counts), hidden)

    def run(value: Tensor, bias: Tensor | None = None) -> Tensor:
        return norm_rows(value, gain, bias, 1e-6, env.poison(*value.shape))

    def soft(value: Tensor) -> Tensor:
        return softmax_rows(value, env.poison(*value.shape, dtype=torch.float32))

    yield Check(f"RMSNorm {hidden}", relative_error(run(x), rms(x, gain, 1e-6)), env.tolerance)
    wanted = layer_norm(x, gain, shift, 1e-6)
    yield Check(f"LayerNorm {hidden}", relative_error(run(x, shift), wanted), env.tolerance)
    yield Check(f"softmax {hidden}", relative_error(soft(x), torch.softmax(x.double(), -1)), 1e-5)
    yield invariance(f"RMSNorm {hidden}", env, x, run, counts)
    yield invariance(f"softmax {hidden}", env, x, soft, counts)


def head_linear_checks(env: Env, heads: int, k: int, n: int, counts: Sequence[int]) -> Iterator[Check]:
    w = env.randn(heads, k, n, scale=k**-0.5)

    def run(value: Tensor) -> Tensor:
        return head_linear(value, w, env.poison(value.shape[0], heads, n))

    x = env.randn(max(counts), heads, k)
    wanted = torch.einsum("rhk,hkn->rhn", x.double(), w.double())
    yield Check(f"head linear {heads}x{k}x{n}", relative_error(run(x), wanted), env.tolerance)
    yield invariance(f"head linear {heads}x{k}x{n}", env, x, run, counts)
