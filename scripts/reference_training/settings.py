"""The YAML settings of one reference model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CONF = Path(__file__).parent / "conf"


@dataclass(frozen=True, slots=True)
class Training:
    """How long and how fast to train. Shares are fractions of the run's wall time (or of `steps`)."""

    minutes: float
    steps: int | None
    batch_rows: int
    sequence_tokens: int
    matrix_lr: float
    vector_lr: float
    router_lr: float
    weight_decay: float
    warmup_share: float
    decay_from_share: float
    aux_loss: float


@dataclass(frozen=True, slots=True)
class Settings:
    """One model: its transformers class, config values, seed and training schedule."""

    name: str
    seed: int
    model_class: str
    architectures: list[str]
    config: dict[str, Any]
    training: Training


def model_names() -> list[str]:
    """Names of the model settings that ship here."""
    return sorted(p.stem for p in CONF.glob("*_mini.yaml"))


def load_settings(name: str) -> Settings:
    """Read `conf/NAME.yaml`; raises SystemExit with one line when there is none."""
    path = CONF / f"{name}.yaml"
    if not path.is_file():
        raise SystemExit(f"unknown config {name!r}; choose one of {', '.join(model_names())}")
    raw = yaml.safe_load(path.read_text())
    arch = raw["architecture"]
    return Settings(
        name=raw["name"],
        seed=raw["seed"],
        model_class=arch["class"],
        architectures=arch["architectures"],
        config=arch["config"],
        training=Training(**raw["training"]),
    )
