"""What a model family must say to be served: its config, its tensor names, its layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from specter_core.model.config import ModelConfig

if TYPE_CHECKING:
    from specter_core.model.layer import DecoderLayer
    from specter_core.model.ops import DecoderOps
    from specter_core.model.tensor_source import TensorSource


class ExpertNames(NamedTuple):
    """Tensor names of one routed expert."""

    gate: str
    up: str
    down: str


class Family(Protocol):
    """One file in `families/` holds one object `FAMILY` of this kind."""

    @property
    def name(self) -> str: ...

    @property
    def model_types(self) -> tuple[str, ...]: ...

    @property
    def architectures(self) -> tuple[str, ...]: ...

    def read_config(self, raw: Mapping[str, Any]) -> ModelConfig: ...

    def expected_tensors(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Official name -> shape of every tensor, routed experts included."""
        ...

    def expert_names(self, layer: int, expert: int) -> ExpertNames:
        """Official names of an expert of a decoder layer."""
        ...

    def aliases(self, name: str) -> tuple[str, ...]:
        """Other names under which tools save the tensor with this official name."""
        ...

    def build_layers(self, config: ModelConfig, source: TensorSource, ops: DecoderOps) -> list[DecoderLayer]: ...


class FusedNames(NamedTuple):
    """transformers 5's in-memory names of a layer's experts: gate_up [E, 2·I, H], down [E, H, I]."""

    gate_up: str
    down: str


def fused_expert_names(layer: int) -> FusedNames:
    """The same in every family served so far."""
    prefix = f"model.layers.{layer}.mlp.experts"
    return FusedNames(f"{prefix}.gate_up_proj", f"{prefix}.down_proj")


def expert_tensors(family: Family, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Official name -> shape of the routed experts' tensors: gate and up [I, H], down [H, I]."""
    wide, tall = (config.expert_width, config.hidden), (config.hidden, config.expert_width)
    found: dict[str, tuple[int, ...]] = {}
    for layer in config.moe_layers:
        for expert in range(config.num_experts):
            names = family.expert_names(layer, expert)
            found.update({names.gate: wide, names.up: wide, names.down: tall})
    return found
