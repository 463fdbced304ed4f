"""From the composed configuration to entries (harness/entries.py), every value checked. run.py hands over nested dicts;
nothing behind this file sees Hydra."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from typing import Any, TypeVar

from harness.entries import Launcher, LinkEntry, MemoryEntry, ModelEntry, RunConfig, SystemEntry
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
