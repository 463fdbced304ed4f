"""What a check of a kernel is: a value beside its limit, where it runs, and how outputs are compared.

The modules decode_checks_linear, decode_checks_attention and decode_checks_moe run one kernel family per function and
yield `Check`s: a relative error with its limit, or a number of mismatches (limit 0), for any device, dtype and shape.
tests/ runs them under Triton's interpreter at odd little sizes, check_decode_kernels.py on CUDA at real ones. Outputs
are poisoned with NaN before each run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Check(NamedTuple):
    name: str
    value: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.value <= self.limit


class Env(NamedTuple):
    """Where and in which dtype to check; small integers are drawn on the CPU, values on the device."""

    device: str
    dtype: torch.dtype
    generator: torch.Generator
    values: torch.Generator

    @staticmethod
    def make(device: str, dtype: torch.dtype, seed: int) -> Env:
        values = torch.Generator(device).manual_seed(seed)
        return Env(device, dtype, torch.Generator().manual_seed(seed), values)

    @property
    def tolerance(self) -> float:
        return {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}[self.dtype]

    def randn(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        kind = dtype or self.dtype
        return torch.randn(*shape, generator=self.values, device=self.device, dtype=kind).mul_(scale)

    def randint(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(self.device)

    def poison(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.full(shape, float("nan"), device=self.device, dtype=dtype or self.dtype)


def relative_error(out: Tensor, reference: Tensor) -> float:
    """‖out − reference‖ / ‖reference‖ in float64; inf where out is not finite."""
    out, reference = out.double(), reference.double()
    if not bool(torch.isfinite(out).all()):
        return float("inf")
    return float((out - reference).norm() / reference.norm().clamp_min(1e-30))


def sum_limit(terms: int) -> float:
    """Relative error allowed to a float32 sum of products of random signs: rounding errors add up as a random walk."""
    return max(1e-5, 4e-7 * terms**0.5)


def bit_mismatches(a: Tensor, b: Tensor) -> float:
    """Rows (dim 0) of a and b that differ in any bit; NaN equals NaN of the same bits."""
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    a, b = a.contiguous().view(raw).flatten(1), b.contiguous().view(raw).flatten(1)
    return float((a != b).any(dim=1).sum())


def invariance(name: str, env: Env, x: Tensor, run: Callable[[Tensor], Tensor], counts: Sequence[int]) -> Check:
    """x [R, …] through `run` in other company: counts of rows, drawn at random places among strangers."""
    whole = run(x)
    wrong = 0.0
    for count in counts:
        kept = torch.randperm(x.shape[0], generator=env.generator)[: max(1, count // 2)].to(x.device)
        crowd = env.randn(count, *x.shape[1:], scale=3.0, dtype=x.dtype)
        places = torch.randperm(count, generator=env.generator)[: kept.numel()].to(x.device)
        crowd[places] = x[kept]
        wrong += bit_mismatches(run(crowd)[places], whole[kept])
    return Check(f"{name}: rows with other bits in other company", wrong, 0.0)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    x = x.double()
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight.double(), bias.double(), eps)
