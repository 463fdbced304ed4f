"""What a synthetic checkpoint is made from: a shape, a seed and the fitted knobs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

from harness.synthetic.shapes import CONFIGS, small_config
from specter_core.errors import UserError
from specter_core.memory.payload import PayloadLayout
from specter_core.model.config import ModelConfig

FORMAT = 1
"""Counts changes of the construction that change weights."""


@dataclass(frozen=True, slots=True)
class Knobs:
    """Sizes are in units of the residual stream: an embedding has entries of RMS 1, shares are of its energy.

    steps: ring steps to the candidate successors of a token, one per class; all different modulo their number.
    common_share, topic_share, topic_dims, topic_lengths: the direction that all tokens share, and topic codes (the
    share of each), constant over so many neighbours on the ring.
    router_gain: standard deviation of the router's logits; router_common, router_topics: shares of its variance that
    the common direction and the topics decide, the token deciding the rest.
    branch: RMS of what attention and the shared or dense MLP add per layer. expert_gain: RMS of a routed expert's
    Gaussian output. vote: standard deviation of a class's votes by all routed experts together; vote_coherence: share
    of the up projection's size that follows the common direction, which keeps a vote's size steady; vote_decay: a MoE
    layer's votes over those of the layer before.
    identity_logit: what the head gives to every candidate; vote_logit: standard deviation of a class's part;
    head_noise: of the Gaussian part.
    """

    steps: tuple[int, ...] = (13, 22, 39, 60)
    common_share: float = 0.05
    topic_share: float = 0.1
    topic_dims: int = 48
    topic_lengths: tuple[int, ...] = (150, 600)
    router_gain: float = 1.5
    router_common: float = 0.1
    router_topics: tuple[float, ...] = (0.2, 0.2)
    branch: float = 0.08
    expert_gain: float = 0.13
    vote: float = 3.0
    vote_coherence: float = 0.3
    vote_decay: float = 1.0
    identity_logit: float = 16.0
    vote_logit: float = 8.0
    head_noise: float = 0.4

    def __post_init__(self) -> None:
        classes = len(self.steps)
        assert classes >= 2 and {step % classes for step in self.steps} == set(range(classes)), self.steps
        assert len(self.topic_lengths) == len(self.router_topics) and min(self.steps) > 0
        shares = self.common_share + self.topic_share * len(self.topic_lengths)
        assert 0 < shares < 1 and 0 <= self.router_common + sum(self.router_topics) <= 1
        assert 0 < self.vote_coherence < 1 and 0 < self.vote_decay <= 1

    @property
    def classes(self) -> int:
        return len(self.steps)


KNOBS: Mapping[str, Knobs] = {
    "deepseek_v2_lite": Knobs(
        topic_lengths=(100, 500), router_common=0.22, router_topics=(0.35, 0.03), router_gain=2.2, expert_gain=0.05,
        vote_coherence=0.85, vote_decay=0.5,
    ),
    "qwen15_moe": Knobs(
        topic_lengths=(70, 300), router_common=0.1, router_topics=(0.4, 0.05), expert_gain=0.12, vote_coherence=0.4,
        vote_decay=0.94,
    ),
    "phi35_moe": Knobs(
        topic_lengths=(100, 600), router_common=0.25, router_topics=(0.33, 0.17), expert_gain=0.02, vote_coherence=0.4,
        vote_decay=0.9,
    ),
}  # fmt: skip
_KNOBS_OF_SMALL = {
    "small_deepseek_v2": "deepseek_v2_lite",
    "small_qwen2_moe": "qwen15_moe",
    "small_phimoe": "phi35_moe",
}


@dataclass(frozen=True, slots=True)
class SyntheticSpec:
    """model: its name in conf/model, or a small test shape's. config: content of config.json. The same spec gives the
    same weights on every device of a kind; "cpu" and "cuda" have different random number generators."""

    model: str
    config: Mapping[str, Any] = field(hash=False)
    seed: int
    knobs: Knobs

    @property
    def model_config(self) -> ModelConfig:
        return _model_config(json.dumps(self.config, sort_keys=True))

    @property
    def layout(self) -> PayloadLayout:
        config = self.model_config
        return PayloadLayout(config.hidden, config.expert_width, config.dtype)

    @property
    def store_bytes(self) -> int:
        """Host memory of all routed experts, in bytes."""
        config = self.model_config
        return len(config.moe_layers) * config.num_experts * self.layout.entry_bytes

    @property
    def hash(self) -> str:
        """16 hex digits over everything that decides the weights, the kind of device apart."""
        text = json.dumps([FORMAT, dict(self.config), self.seed, asdict(self.knobs)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@lru_cache(maxsize=16)
def _model_config(text: str) -> ModelConfig:
    return ModelConfig.from_dict(json.loads(text))


def spec_for(model: str, **overrides: Any) -> SyntheticSpec:
    """The calibrated spec of deepseek_v2_lite, qwen15_moe or phi35_moe, or of small_deepseek_v2, small_qwen2_moe or
    small_phimoe.

    overrides: `seed`, any knob by name, and for the small shapes hidden, layers, experts, width, vocab. UserError for
    an unknown model or override.
    """
    seed = int(overrides.pop("seed", 0))
    sizes = {"hidden": 256, "layers": 4, "experts": 16, "width": 128, "vocab": 4096}
    sizes = {name: int(overrides.pop(name, size)) for name, size in sizes.items()} if model not in CONFIGS else {}
    known = [f.name for f in fields(Knobs)]
    for name in overrides:
        if name not in known:
            raise UserError(f"{name!r} is no knob of synthetic weights, known are {', '.join(known)}; correct it")
    config = dict(CONFIGS[model]) if model in CONFIGS else small_config(model, **sizes)
    knobs = replace(KNOBS[_KNOBS_OF_SMALL.get(model, model)], **overrides)
    return SyntheticSpec(model, config, seed, knobs)
