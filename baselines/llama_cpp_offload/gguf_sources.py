"""Where the weights of a GGUF file come from: a checkpoint's folder, or the generator of synthetic ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from harness.system import ModelSpec
from specter_core.model.checkpoint import Checkpoint
from specter_core.model.config import ModelConfig
from specter_core.model.families import family_named
from specter_core.model.tensor_source import resolve


class Source(NamedTuple):
    """config, the content of config.json, and every tensor by its official name."""

    config: ModelConfig
    raw: Mapping[str, Any]
    tensors: Iterator[tuple[str, Tensor]]


def description(model: ModelSpec) -> tuple[ModelConfig, Mapping[str, Any]]:
    """config and the content of config.json, without touching a weight."""
    if model.path:
        folder = Path(model.path)
        return ModelConfig.from_file(folder), json.loads((folder / "config.json").read_text(encoding="utf-8"))
    from harness import synthetic

    spec = synthetic.spec_for(model.name)
    return spec.model_config, spec.config


def source(model: ModelSpec, device: str) -> Source:
    """device: where synthetic weights are generated; a checkpoint's come as they lie on disk."""
    return from_folder(Path(model.path)) if model.path else generated(model.name, device)


def from_folder(path: Path) -> Source:
    config = ModelConfig.from_file(path)
    raw = json.loads((path / "config.json").read_text(encoding="utf-8"))

    def tensors() -> Iterator[tuple[str, Tensor]]:
        family = family_named(config.family)
        with Checkpoint(path) as checkpoint:
            for name in family.expected_tensors(config):
                yield name, checkpoint.tensor(resolve(checkpoint, family, name))

    return Source(config, raw, tensors())


def generated(name: str, device: str) -> Source:
    from harness import synthetic

    spec = synthetic.spec_for(name)
    return Source(spec.model_config, spec.config, synthetic.tensors(spec, device))
