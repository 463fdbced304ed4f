"""Greedy and speculative sampling (Leviathan et al., 2023; Chen et al., 2023) on filtered distributions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specter_core.errors import UserError
from specter_core.model.argmax import argmax_lowest
from specter_core.state.rng import Purpose, request_key, uniform
from specter_core.types import Request


class SamplingParams(NamedTuple):
    """Per-row parameters, each [B]: keys int64, temperature and top_p float32, top_k int64."""

    keys: Tensor
    temperature: Tensor
    top_p: Tensor
    top_k: Tensor

    @property
    def all_greedy(self) -> bool:
        return bool((self.temperature == 0).all())

    @classmethod
    def of(cls, requests: Sequence[Request], device: torch.device | str = "cpu") -> SamplingParams:
        """Raises UserError for a temperature below 0 or not finite, top_p outside (0, 1] or top_k below 0."""
        for r in requests:
            if not 0 <= r.temperature < math.inf:
                raise UserError(
                    f"temperature {r.temperature} is below 0 or not finite; use 0 (greedy) or a positive value"
                )
            if not 0 < r.top_p <= 1:
                raise UserError(f"top_p {r.top_p} is outside (0, 1]; use 1 to switch the filter off")
            if r.top_k < 0:
                raise UserError(f"top_k {r.top_k} is below 0; use 0 to switch the filter off")
        return cls(
            torch.tensor([request_key(r.seed, r.request_id) for r in requests], dtype=torch.int64, device=device),
            torch.tensor([r.temperature for r in requests], dtype=torch.float32, device=device),
            torch.tensor([r.top_p for r in requests], dtype=torch.float32, device=device),
            torch.tensor([r.top_k for r in requests], dtype=torch.int64, device=device),
        )


class Verdict(NamedTuple):
    """Outcome of one verification, each a list of B: draft tokens tested (up to and including the first rejection),
    accepted, and the corrected or bonus token."""

    tested: list[int]
    accepted: list[int]
    next_token: list[int]


def check_finite(logits: Tensor) -> None:
    """Raises UserError when logits [..., V] hold NaN: weights or draft are damaged."""
    if bool(torch.isnan(logits).any()):
        bad = int(torch.isnan(logits).sum())
        raise UserError(
            f"logits hold {bad} NaN of {logits.numel()} values; the weights are damaged: verify them with their SHA-256"
        )


def filtered_probs(logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Distribution after temperature, top-k and top-p, in this order.

    logits [R, V] float32; temperature, top_p [R] float32, top_k [R] int64. Returns [R, V] float32, rows sum to 1. A
    greedy row (temperature 0) is one-hot at the lowest-id maximum. At least one token always stays.
    """
    greedy = temperature == 0
    scaled = logits / torch.where(greedy, torch.ones_like(temperature), temperature)[:, None]
    probs = torch.softmax(scaled, dim=-1)
    ordered, index = torch.sort(probs, dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)[None, :]
    before = torch.cumsum(ordered, dim=-1) - ordered
    keep_k = (top_k[:, None] == 0) | (rank < top_k[:, None])
    kept_mass = (ordered * keep_k).sum(-1, keepdim=True)
    keep = keep_k & ((before < top_p[:, None] * kept_mass) | (top_p[:, None] >= 1))
    kept = torch.where(keep, ordered, torch.zeros_like(ordered))
    result = torch.zeros_like(probs).scatter(-1, index, kept / kept.sum(-1, keepdim=True))
    one_hot = torch.nn.functional.one_hot(argmax_lowest(logits), probs.shape[-1]).to(result.dtype)
    return torch.where(greedy[:, None], one_hot, result)


def draw(probs: Tensor, u: Tensor) -> Tensor:
    """Inverse-CDF draw: probs [R, V] float32 (rows need not sum to 1), u [R] in (0, 1). Returns [R] int64."""
    cdf = torch.cumsum(probs.double(), dim=-1)
    hit = cdf >= (u.double() * cdf[:, -1])[:, None]
    first = torch.where(hit & (probs > 0), torch.arange(probs.shape[-1], device=probs.device), probs.shape[-1])
    token = first.min(dim=-1).values
    return torch.where(token < probs.shape[-1], token, argmax_lowest(probs))


class SpeculativeSampler:
    """Samples draft tokens and judges them against the target; one instance per batch."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params

    def sample(self, logits: Tensor, positions: Tensor, purpose: Purpose) -> tuple[Tensor, Tensor | None]:
        """One token per row: logits [B, V] float32, positions [B] int64 -> (tokens [B] int64, probs [B, V] or None
        when every row is greedy)."""
        check_finite(logits)
        if self.params.all_greedy:
            return argmax_lowest(logits), None
        probs = filtered_probs(logits, self.params.temperature, self.params.top_p, self.params.top_k)
        return draw(probs, uniform(self.params.keys, positions, purpose)), probs

    def judge(
        self,
        target_logits: Tensor,
        draft_tokens: Tensor,
        draft_probs: Tensor | None,
        depths: Sequence[int],
        first_positions: Sequence[int],
    ) -> Verdict:
        """Accepts a prefix of each row's draft and picks the token after it.

        target_logits [B, K+1, V] float32, draft_tokens [B, K] int64, draft_probs [B, K, V] float32 (None when greedy);
        depths: draft tokens of each row (a finished row has −1 and is skipped); first_positions: sequence index of
        d_1. Rejection resamples from the residual max(p − q, 0), from p where the residual is zero.
        """
        tested, accepted, following = [], [], []
        for b, depth in enumerate(depths):
            if depth < 0:
                tested.append(0)
                accepted.append(0)
                following.append(-1)
                continue
            check_finite(target_logits[b, : depth + 1])
            row = self._judge_row(b, target_logits[b], draft_tokens[b], draft_probs, depth, first_positions[b])
            tested.append(row[0])
            accepted.append(row[1])
            following.append(row[2])
        return Verdict(tested, accepted, following)

    def _judge_row(
        self, b: int, logits: Tensor, tokens: Tensor, draft_probs: Tensor | None, depth: int, first: int
    ) -> tuple[int, int, int]:
        params = self.params
        if float(params.temperature[b]) == 0:
            best = argmax_lowest(logits[: depth + 1]).tolist()
            proposal = tokens[:depth].tolist()
            a = next((i for i in range(depth) if best[i] != proposal[i]), depth)
            return min(a + 1, depth), a, best[a]
        rows = depth + 1
        p = filtered_probs(
            logits[:rows], *(t[b].expand(rows) for t in (params.temperature, params.top_p, params.top_k))
        )
        positions = torch.arange(first, first + rows, device=logits.device)
        accept_u = uniform(params.keys[b], positions, Purpose.ACCEPT)
        target_u = uniform(params.keys[b], positions, Purpose.TARGET)
        for i in range(depth):
            assert draft_probs is not None
            token, q = int(tokens[i]), draft_probs[b, i]
            if float(accept_u[i]) * float(q[token]) < float(p[i, token]):
                continue
            residual = (p[i] - q).clamp_min(0)
            source = residual if float(residual.sum()) > 0 else p[i]
            return i + 1, i, int(draw(source[None], target_u[i : i + 1]))
        return depth, depth, int(draw(p[depth][None], target_u[depth : depth + 1]))
