"""What conf/ and a command line say, as plain values: one entry per file of conf/, and the run that they make up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.system import ModelShape
from specter_core.errors import UserError


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """conf/model/<name>.yaml. shape None: read from the checkpoint's config.json. weights: kind -> {path,
    draft}."""

    name: str
    label: str
    family: str
    depth: int
    default_weights: str
    weights: Mapping[str, Mapping[str, str]]
    budgets_bytes: Mapping[str, float] = field(default_factory=dict)
    download: Mapping[str, Any] = field(default_factory=dict)
    shape: ModelShape | None = None


@dataclass(frozen=True, slots=True)
class SystemEntry:
    """conf/system/<name>.yaml. depth: "model" (the depth axis applies) or a fixed number.

    links: device -> the links it can be measured with (absent device: all). devices: those it can be measured
    on (none: all). budgeted False: runs without a budget. python: interpreter of the worker, relative to the
    repository, where the system has an environment of its own. weights_as: model's kind of weights -> what the system
    really has in their place, e.g. {synthetic: dummy}; such rows are compared with no reference tokens. environment:
    .venvs/<environment>, made by `make <make>`, whose package has the same name.
    """

    name: str
    module: str
    label: str
    colour: str
    order: int
    depth: str | int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    links: Mapping[str, Sequence[str]] = field(default_factory=dict)
    devices: Sequence[str] = ()
    figure: bool = True
    budgeted: bool = True
    selectable: bool = True
    needs_store: bool = False
    available: bool = True
    reason: str = ""
    python: str | None = None
    weights_as: Mapping[str, str] = field(default_factory=dict)
    environment: str | None = None
    make: str = ""

    @property
    def variant(self) -> str:
        """What its rows are called: `named` where several variants of one system run side by side."""
        return str(self.options.get("named") or self.options.get("variant", "default"))


@dataclass(frozen=True, slots=True)
class MemoryEntry:
    """conf/memory/<name>.yaml: slots per layer, the name of one of the model's budgets, or bytes."""

    name: str
    label: str
    slots_per_layer: int | None = None
    budget: str | None = None
    budget_bytes: int | None = None

    def __post_init__(self) -> None:
        if [self.slots_per_layer, self.budget, self.budget_bytes].count(None) != 2:
            raise UserError(f"memory {self.name}: give slots_per_layer or budget or budget_bytes, one of them")
        if self.slots_per_layer is not None and self.slots_per_layer < 1:
            raise UserError(f"memory {self.name}: slots_per_layer {self.slots_per_layer} is below 1 slot per layer")


@dataclass(frozen=True, slots=True)
class LinkEntry:
    """conf/link/<name>.yaml. rate None: the machine's own link, unpaced."""

    name: str
    rate_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Launcher:
    """conf/launcher/<name>.yaml. parallel: workers at a time; None: one per visible GPU, one on a CPU. workers: a fresh
    process for every `cell`, or one for all cells of a model and `system`, which loads its weights once. pin_limit_gb:
    the most host memory a worker may page-lock. numa_node: of the host store, instead of the GPU's. The rest from
    `jobs` on is for slurm: the number of jobs that the cells are dealt to, and what each asks for."""

    name: str = "local"
    parallel: int | None = None
    load_timeout_s: float = 1800.0
    generate_timeout_s: float = 900.0
    restarts: int = 1
    workers: str = "cell"
    pin_limit_gb: float | None = None
    numa_node: int | None = None
    jobs: int = 4
    cluster: str = "slurm"
    partition: str | None = None
    timeout_min: int = 240
    gpus: int = 0
    cpus: int = 2
    mem_gb: int = 16


@dataclass(frozen=True, slots=True)
class RunConfig:
    """One invocation: the axes, each a sequence, and the few settings that are the same for every cell."""

    sweep: str
    profile: str
    models: Sequence[ModelEntry]
    systems: Sequence[SystemEntry]
    memories: Sequence[MemoryEntry]
    links: Sequence[LinkEntry]
    datasets: Mapping[str, Mapping[str, Any]]
    launcher: Launcher
    depth: Sequence[int | None]
    batch: Sequence[int]
    prefix_tokens: Sequence[int]
    new_tokens: Sequence[int]
    prompts: int
    repeats: int
    temperature: float
    seed: int
    device: str
    threads: int | None
    weights: str | None
    output: str
    fresh: bool
    figures: Sequence[str] = ()
    depths: str | None = None
    stop_early: bool = False
    shard: str | None = None
    warmup_tokens: int | None = None
