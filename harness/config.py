"""The composed configuration as plain values. run.py hands over nested dicts; nothing behind this file sees
Hydra."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, TypeVar

from harness.system import ModelShape
from specter_core.errors import UserError

T = TypeVar("T")
WEIGHTS = ("official", "synthetic", "reference")
DEVICES = ("auto", "cpu", "cuda")
WORKERS = ("cell", "system")
CONSUMED: tuple[str, ...] = (
    "command",
    "models",
    "systems",
    "memories",
    "links",
    "launcher",
    "slots",
    "budgets_gb",
    "variants",
)
CONSUMED += ("by_profile", "named_models", "baseline")


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


def build(cls: type[T], raw: Mapping[str, Any], where: str, **extra: Any) -> T:
    """`cls(**raw, **extra)`; unknown and missing fields give one line that names them."""
    known = {f.name for f in fields(cls)} - set(extra)  # type: ignore[arg-type]
    unknown = sorted(set(raw) - known)
    if unknown:
        raise UserError(f"{where}: unknown field {unknown[0]!r}; known: {', '.join(sorted(known))}")
    required = {
        f.name
        for f in fields(cls)  # type: ignore[arg-type]
        if f.default is MISSING and f.default_factory is MISSING
    }
    missing = sorted(required - set(raw) - set(extra))
    if missing:
        raise UserError(f"{where}: field {missing[0]!r} is missing")
    return cls(**raw, **extra)


def run_config(raw: Mapping[str, Any]) -> RunConfig:
    """The composed config (plain dicts and lists) as a RunConfig. UserError names a bad value and what would
    do."""
    rest = {k: v for k, v in raw.items() if k not in CONSUMED}
    sweep = str(raw.get("sweep", "main"))
    systems = [system_entry(n, s) for n, s in raw["systems"].items()]
    systems += [v for s in systems if s.name == "specter" for v in _variants(s, raw.get("variants") or {})]
    for system in systems:
        if not system.selectable:
            raise UserError(f"system={system.name} is no system to measure; it runs by itself, untimed")
    rest |= {
        "depth": [None if d == "model" else _number(d, "depth", 0) for d in _listed(rest.get("depth", "model"))],
        "batch": [_number(v, "batch", 1) for v in _listed(rest.get("batch", 1))],
        "prefix_tokens": [_number(v, "prefix_tokens", 1) for v in _listed(rest.get("prefix_tokens", 16))],
        "new_tokens": [_number(v, "new_tokens", 1) for v in _listed(rest.get("new_tokens", 128))],
        "prompts": _number(rest.get("prompts"), "prompts", 1),
        "repeats": _number(rest.get("repeats"), "repeats", 1),
        "seed": _number(rest.get("seed"), "seed", 0),
        "figures": _listed(rest.get("figures", [])),
        "output": rest.get("output") or f"outputs/{sweep}-run",
    }
    if rest.get("threads") is not None:
        rest["threads"] = _number(rest["threads"], "threads", 1)
    temperature = rest.get("temperature", 0.0)
    if not _is_size(temperature) or temperature < 0:
        raise UserError(f"temperature={temperature} is no temperature; give a number, 0 (greedy) or more")
    for name in ("fresh", "stop_early"):
        if not isinstance(rest.get(name, False), bool):
            raise UserError(f"{name}={rest[name]} is neither true nor false; give one of these")
    if rest.get("stop_early") and sweep == "depth":
        raise UserError("stop_early=true with sweep=depth: K is chosen from full repeats; leave stop_early out")
    _known(rest.get("weights"), (*WEIGHTS, None), "weights")
    _known(rest.get("device"), DEVICES, "device")
    return build(
        RunConfig,
        rest,
        "config",
        models=[model_entry(n, m) for n, m in raw["models"].items()],
        systems=systems,
        memories=memory_entries(raw),
        links=[build(LinkEntry, v, f"conf/link/{n}", name=n) for n, v in raw["links"].items()],
        launcher=launcher(raw["launcher"]),
    )


def launcher(raw: Mapping[str, Any]) -> Launcher:
    """conf/launcher with what the command line changed in it."""
    built = build(Launcher, raw, "conf/launcher")
    for name in ("load_timeout_s", "generate_timeout_s", "pin_limit_gb"):
        value = getattr(built, name)
        if value is not None and (not _is_size(value) or value <= 0):
            raise UserError(f"launcher.{name}={value} is no length or size; give a number above 0")
    for name, least in {"parallel": 1, "restarts": 0, "numa_node": 0, "jobs": 1, "timeout_min": 1, "gpus": 0}.items():
        if getattr(built, name) is not None:
            _number(getattr(built, name), f"launcher.{name}", least)
    _known(built.workers, WORKERS, "launcher.workers")
    return built


def memory_entries(raw: Mapping[str, Any]) -> list[MemoryEntry]:
    """Those of conf/memory, then one per value of the axes slots and budgets_gb."""
    found = [build(MemoryEntry, m, f"conf/memory/{n}", name=n) for n, m in (raw.get("memories") or {}).items()]
    for slots in _listed(raw.get("slots") or []):
        found.append(MemoryEntry(f"slots{slots}", f"{slots} slots", slots_per_layer=_number(slots, "slots", 1)))
    for size in _listed(raw.get("budgets_gb") or []):
        if not _is_size(size) or size <= 0:
            raise UserError(f"budgets_gb={size} is no size in GB; give a number above 0")
        found.append(MemoryEntry(f"gb{size:g}", f"{size:g} GB", budget_bytes=int(size * 1e9)))
    return found


def _variants(system: SystemEntry, variants: Mapping[str, Mapping[str, Any]]) -> list[SystemEntry]:
    """The same system once more for each variant, under the same name and a variant of its own."""
    found = []
    for name, changes in variants.items():
        options = {k: v for k, v in changes.items() if k != "devices"}
        devices = tuple(_listed(changes.get("devices", system.devices)))
        found.append(replace(system, options={**system.options, **options, "named": name}, devices=devices))
    return found


def model_entry(name: str, raw: Mapping[str, Any]) -> ModelEntry:
    shape = raw.get("shape")
    fields_ = {k: v for k, v in raw.items() if k != "shape"}
    built = build(ModelShape, shape, f"conf/model/{name}: shape") if shape else None
    entry = build(ModelEntry, fields_, f"conf/model/{name}", name=name, shape=built)
    _number(entry.depth, f"conf/model/{name}: depth", 0)
    return entry


def system_entry(name: str, raw: Mapping[str, Any]) -> SystemEntry:
    entry = build(SystemEntry, raw, f"conf/system/{name}", name=name)
    if entry.depth != "model":
        _number(entry.depth, f"conf/system/{name}: depth", 0)
    return entry


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _is_size(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _number(value: Any, name: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"{name}={value} is no whole number; give {least} or more")
    if value < least:
        raise UserError(f"{name}={value} is below {least}; give {least} or more")
    return value


def _known(value: Any, known: Sequence[Any], name: str) -> None:
    if value not in known:
        raise UserError(f"{name}={value} is unknown; known: {', '.join(str(k) for k in known if k is not None)}")
