"""Muon for the matrices inside the layers, AdamW for the rest, one schedule for both."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import nn

from .settings import Training


def orthogonalise(batch: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Newton-Schulz iteration of Muon (K. Jordan 2024) on [N, R, C]: singular values go to about 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = batch.bfloat16() if batch.is_cuda else batch.float()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon:
    """Orthogonalised momentum; updates have RMS 0.2 like AdamW's (arXiv:2502.16982), decoupled weight decay.

    Parameters of more than two dimensions hold stacks of matrices. Equal shapes are stepped together.
    """

    def __init__(self, params: list[tuple[str, nn.Parameter]], momentum: float = 0.95) -> None:
        self.momentum = momentum
        self.groups: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
        self.halves: set[int] = set()
        for name, p in params:
            rows = p.shape[-2]
            if name.endswith("gate_up_proj"):  # gate and up are separate matrices
                self.halves.add(id(p))
                rows //= 2
            self.groups[(rows, p.shape[-1])].append(p)
        self.buffers = {
            shape: torch.zeros(sum(p.numel() for p in ps) // (shape[0] * shape[1]), *shape, device=ps[0].device)
            for shape, ps in self.groups.items()
        }
        self.orthogonalise: Callable[[torch.Tensor], torch.Tensor] = orthogonalise

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float) -> None:
        """Update every parameter from its `.grad`."""
        for shape, params in self.groups.items():
            grads = torch.cat([p.grad.reshape(-1, *shape) for p in params if p.grad is not None])
            buffer = self.buffers[shape]
            buffer.lerp_(grads, 1 - self.momentum)
            update = self.orthogonalise(torch.lerp(grads, buffer, self.momentum))
            update = update.float() * (0.2 * max(shape) ** 0.5)
            parts = [
                u.reshape(p.shape)
                for u, p in zip(update.split([p.numel() // (shape[0] * shape[1]) for p in params]), params, strict=True)
            ]
            torch._foreach_mul_(params, 1 - lr * weight_decay)
            torch._foreach_add_(params, parts, alpha=-lr)


class Optimiser:
    """Both optimisers behind one `step`."""

    def __init__(self, model: nn.Module, training: Training, fused: bool) -> None:
        self.training = training
        matrices, routers, others, decayed = [], [], [], []
        for name, p in model.named_parameters():
            apart = any(s in name for s in ("embed_tokens", "lm_head", ".gate.", ".router.", "expert_gate"))
            if ".gate.weight" in name or ".router.weight" in name:
                routers.append(p)
            elif p.ndim >= 2 and not apart:
                matrices.append((name, p))
            elif p.ndim >= 2:
                decayed.append(p)
            else:
                others.append(p)
        self.muon = Muon(matrices)
        groups = [
            {"params": decayed, "weight_decay": 0.01, "scale": 1.0},
            {"params": others, "weight_decay": 0.0, "scale": 1.0},
            {"params": routers, "weight_decay": 0.0, "scale": training.router_lr / training.vector_lr},
        ]
        self.adam = torch.optim.AdamW(groups, lr=training.vector_lr, betas=(0.9, 0.98), eps=1e-10, fused=fused)

    def step(self, share: float) -> float:
        """One update at `share` (0..1) of the run; returns the schedule's factor."""
        factor = schedule(share, self.training)
        for group in self.adam.param_groups:
            group["lr"] = self.training.vector_lr * factor * group["scale"]
        self.adam.step()
        self.muon.step(self.training.matrix_lr * factor, self.training.weight_decay)
        self.adam.zero_grad(set_to_none=True)
        for params in self.muon.groups.values():
            for p in params:
                p.grad = None
        return factor


def schedule(share: float, training: Training) -> float:
    """Linear warm-up, constant, then linear to zero, by the elapsed share of the run."""
    if share < training.warmup_share:
        return max(share / training.warmup_share, 0.01)
    if share < training.decay_from_share:
        return 1.0
    return max(0.0, (1.0 - share) / (1.0 - training.decay_from_share))
