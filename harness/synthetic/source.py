"""The tensors outside the routed experts, by their Hugging Face names."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.synthetic.experts import INNER_RMS
from harness.synthetic.random import normal
from harness.synthetic.spec import SyntheticSpec
from harness.synthetic.vocabulary import basis, embedding, head
from specter_core.model.families import family_named

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class SyntheticSource:
    """A `TensorSource` without a checkpoint. Made on the device, in the model's dtype or the one asked for."""

    def __init__(self, spec: SyntheticSpec, device: torch.device | str, dtype: torch.dtype | None = None) -> None:
        self.spec = spec
        self.device = torch.device(device)
        self.dtype = dtype or spec.model_config.dtype
        self._stored = spec.model_config.dtype
        self._shapes = family_named(spec.model_config.family).expected_tensors(spec.model_config)
        self._table: Tensor | None = None

    @property
    def names(self) -> list[str]:
        """All but the routed experts' tensors."""
        return [name for name in self._shapes if ".experts." not in name]

    def get(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor as a checkpoint would hold it, rounded to the model's dtype before any conversion."""
        if name == EMBEDDING:
            self._table = embedding(self.spec, self.device)
            made = self._table
        elif name == HEAD:
            made = head(self.spec, embedding(self.spec, self.device) if self._table is None else self._table)
        else:
            made = self._made(name).to(self._stored)
        return made.to(dtype or self.dtype)

    def get_optional(self, name: str, wanted: bool) -> Tensor | None:
        return self.get(name) if wanted else None

    def stack(self, *names: str) -> Tensor:
        """Several [out_i, in] (or [out_i]) tensors as one."""
        return torch.cat([self.get(name) for name in names])

    def _made(self, name: str) -> Tensor:
        shape, branch = self._shapes[name], self.spec.knobs.branch
        noise = normal(self.spec.seed, name, shape, self.device)
        if name.endswith("norm.weight"):
            return 1.0 + 0.1 * noise
        if name.endswith("bias"):
            small = 0.02 if "norm" in name or "o_proj" in name or "lm_head" in name else 0.1
            return small * noise
        if name.endswith((".mlp.gate.weight", ".block_sparse_moe.gate.weight")):
            return self._router(name)
        noise *= shape[-1] ** -0.5
        if name.endswith("o_proj.weight"):
            return noise * branch
        if name.endswith("down_proj.weight"):
            halved = 2.0 if "shared_expert." in name else 1.0  # by the sigmoid of Qwen2-MoE's scalar gate
            return noise * (halved * branch / INNER_RMS)
        return noise

    def _router(self, name: str) -> Tensor:
        """[E, H]: logits whose variance comes from the common direction, the topics and the token in fixed shares."""
        knobs, seed = self.spec.knobs, self.spec.seed
        experts, hidden = self._shapes[name]
        parts = basis(self.spec, self.device)
        gain, token = knobs.router_gain, 1 - knobs.router_common - sum(knobs.router_topics)
        own = 1 - knobs.common_share - knobs.topic_share * len(knobs.topic_lengths)
        found = parts.own(normal(seed, f"{name} token", (experts, hidden), self.device))
        found *= gain * (token / (own * hidden)) ** 0.5
        popular = normal(seed, f"{name} common", (experts, 1), self.device)
        found += popular * parts.common * (gain * (knobs.router_common / (knobs.common_share * hidden)) ** 0.5)
        for number, (share, topic) in enumerate(zip(knobs.router_topics, parts.topics, strict=True)):
            liking = normal(seed, f"{name} topic {number}", (experts, knobs.topic_dims), self.device)
            found += liking @ topic.T * (gain * (share / (knobs.topic_share * hidden)) ** 0.5)
        return found
