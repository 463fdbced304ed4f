"""The grid of a run: blocks of cell groups. A group is what one worker process measures; the groups of a
block are compared with each other and run in a seeded random order."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from harness import encodings
from harness.entries import LinkEntry, MemoryEntry, ModelEntry, RunConfig, SystemEntry
from harness.system import MemorySpec, ModelShape, ModelSpec

T = TypeVar("T")
USUAL_PREFIX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Setting:
    """What a block holds fixed. Lengths in tokens."""

    model: ModelEntry
    memory: MemoryEntry
    link: LinkEntry
    batch: int
    prefix_tokens: int
    new_tokens: int
    repeat: int

    @property
    def max_sequence(self) -> int:
        return self.prefix_tokens + self.new_tokens


@dataclass(frozen=True, slots=True)
class Group:
    """One worker's work: a system at one depth in one setting."""

    setting: Setting
    system: SystemEntry
    depth: int

    @property
    def name(self) -> str:
        s = self.setting
        text = f"{s.model.name}, {s.memory.label}, {self.system.name}"
        text += f" ({self.system.variant})" if "named" in self.system.options else ""
        text += ", nested experts" if self.nested and self.system.variant != "nested" else ""
        text += f", K = {self.depth}" if self.depth else ""
        text += f", B = {s.batch}" if s.batch > 1 else ""
        text += f", prefix {s.prefix_tokens}" if s.prefix_tokens != USUAL_PREFIX_TOKENS else ""
        return text + (f", repeat {s.repeat + 1}" if s.repeat else "")

    @property
    def nested(self) -> bool:
        return self.system.options.get(encodings.OPTION) == "nested"


class DepthKey(NamedTuple):
    """What a chosen K holds for. weights: kind; memory: label."""

    model: str
    weights: str
    memory: str
    link: str
    device: str


ChosenDepths = Mapping[DepthKey, int]


class Skip(NamedTuple):
    """A (model, memory, link, system) that will not run, and why."""

    what: str
    reason: str


class Grid(NamedTuple):
    blocks: list[list[Group]]
    skips: list[Skip]


def expand(
    config: RunConfig, device: str, chosen: ChosenDepths | None = None, specs: Mapping[str, ModelSpec] | None = None
) -> Grid:
    """Every group of the run. Systems that cannot run in a setting are left out and named in `skips`. chosen: K where
    the axis says `model`, instead of the model's own. specs: the models that are here, by name."""
    blocks: list[list[Group]] = []
    skips: list[Skip] = []
    for setting in settings(config):
        cells: list[tuple[SystemEntry, int]] = []
        spec = (specs or {}).get(setting.model.name)
        shape = spec.shape if spec is not None else setting.model.shape
        for system in config.systems:
            reason = unfit(setting, system, device, shape)
            if reason is None:
                cells += [(system, k) for k in depths(config, setting, system, device, chosen or {})]
            elif (skip := Skip(_what(setting, system), reason)) not in skips:
                skips.append(skip)
        s = setting
        cells = encodings.settled(cells, device, s.model, spec)
        block = [Group(s, system, k) for system, k in cells]
        order = (config.seed, s.model.name, s.memory.name, s.link.name, s.batch, s.prefix_tokens, s.repeat)
        random.Random(str(order)).shuffle(block)
        blocks.append(block)
    return Grid(blocks, skips)


def settings(config: RunConfig) -> list[Setting]:
    return [
        Setting(model, memory, link, batch, prefix, new, repeat)
        for model in config.models
        for memory in config.memories
        for link in config.links
        for batch in config.batch
        for prefix in config.prefix_tokens
        for new in config.new_tokens
        for repeat in range(config.repeats)
    ]


def depths(config: RunConfig, setting: Setting, system: SystemEntry, device: str, chosen: ChosenDepths) -> list[int]:
    """The depths K at which a system is measured: the axis, or its own fixed depth once."""
    if isinstance(system.depth, int):
        return [system.depth]
    model = setting.model
    weights = config.weights or model.default_weights
    own = chosen.get(DepthKey(model.name, weights, setting.memory.label, setting.link.name, device), model.depth)
    return list(dict.fromkeys(own if d is None else d for d in config.depth))


def _what(setting: Setting, system: SystemEntry) -> str:
    named = f" ({system.variant})" if "named" in system.options else ""
    return f"{setting.model.name}, {setting.memory.label}, {system.name}{named}"


def unfit(setting: Setting, system: SystemEntry, device: str, shape: ModelShape | None) -> str | None:
    """Why a system cannot be measured in a setting; None where it can."""
    if not system.available:
        return system.reason
    if system.devices and device not in system.devices:
        return f"means something on {' and '.join(system.devices)} only, not on {device}"
    links = system.links.get(device)
    if links is not None and setting.link.name not in links:
        return f"runs on {device} with link {' or '.join(links)} only, not {setting.link.name}"
    if setting.memory.budget is not None and setting.memory.budget not in setting.model.budgets_bytes:
        known = ", ".join(setting.model.budgets_bytes) or "none; give slots per layer, e.g. memory=tight"
        return f"conf/model/{setting.model.name} has no budget {setting.memory.budget!r}; known: {known}"
    slots = setting.memory.slots_per_layer
    if shape is not None and slots is not None and slots > shape.experts:
        return f"{slots} slots per layer exceed the model's {shape.experts} experts per layer"
    if shape is not None and shape.max_positions is not None and setting.max_sequence > shape.max_positions:
        lengths = f"prefix {setting.prefix_tokens} and {setting.new_tokens} new tokens"
        return f"{lengths} exceed the model's context of {shape.max_positions}; ask for fewer"
    return None


def config_hash(group: Group, model: ModelSpec, memory: MemorySpec, dataset: str, config: RunConfig) -> str:
    """12 hex digits of everything that decides what a row measures, except prompt and repeat."""
    system = group.system
    facts = {
        "system": [system.name, system.module, {k: v for k, v in system.options.items() if k != "python"}],
        "model": [model.name, model.weights, model.weights_hash],
        "memory": [memory.label, memory.budget_bytes, memory.slots_per_layer],
        "link": [memory.link, memory.link_rate_bytes_per_s],
        "device": memory.device,
        "workload": [
            dataset,
            group.depth,
            memory.batch,
            group.setting.prefix_tokens,
            group.setting.new_tokens,
        ],
        "sampling": [config.temperature, config.seed],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def batches(items: Sequence[T], size: int) -> list[list[T]]:
    """Runs of exactly `size` items; the last is filled up from the beginning, so that every batch is full."""
    return [[items[j % len(items)] for j in range(i, i + size)] for i in range(0, len(items), size)]
