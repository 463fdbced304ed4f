"""A run's plan on this machine: which models, datasets and systems are here, what is skipped and why."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from harness import catalogue
from harness.cells import Group, Skip, config_hash, expand
from harness.config import system_entry
from harness.datasets.select import TooFewDocuments
from harness.depth_file import chosen_depths
from harness.entries import ModelEntry, RunConfig, SystemEntry
from harness.environment import detect_device
from harness.memory import memory_spec
from harness.prompts import BenchPrompt, PromptSource
from harness.records import Key
from harness.shards import part
from harness.switches import engine_options
from harness.system import MemorySpec, ModelSpec
from harness.weights import absent, model_spec
from specter_core.errors import UserError

SPECTER = "harness.systems.specter"


class PlannedGroup(NamedTuple):
    """A group with everything that its worker is given. prompts: by dataset; hashes: by dataset, for the
    records."""

    group: Group
    model: ModelSpec
    memory: MemorySpec
    prompts: dict[str, list[BenchPrompt]]
    hashes: dict[str, str]

    @property
    def requests(self) -> int:
        return sum(len(p) for p in self.prompts.values())

    @property
    def keys(self) -> list[Key]:
        """The key of every row that this group will have."""
        repeat = self.group.setting.repeat
        return [Key(self.hashes[d], p.prompt_id, repeat) for d, chosen in self.prompts.items() for p in chosen]


@dataclass(frozen=True, slots=True)
class RunPlan:
    """blocks in the order of execution; models present, by name."""

    device: str
    models: dict[str, ModelSpec]
    blocks: list[list[PlannedGroup]]
    skips: list[Skip]

    @property
    def groups(self) -> Iterator[PlannedGroup]:
        return (planned for block in self.blocks for planned in block)

    @property
    def hashes(self) -> set[str]:
        return {name for planned in self.groups for name in planned.hashes.values()}

    @property
    def requests(self) -> int:
        return sum(planned.requests for planned in self.groups)


def plan_run(config: RunConfig, source: PromptSource, *, named_models: bool = False) -> RunPlan:
    """UserError when nothing of the run can be measured here, for a switch of Specter that does not exist, or
    when a model that was named is absent (named_models); models of a default list that are absent are skipped."""
    device = detect_device(config.device)
    for system in config.systems:
        if system.module == SPECTER:
            engine_options(system.options)
    datasets = {d: source.absent(d) for d in config.datasets}
    skips = [Skip(f"dataset {d}", line) for d, line in datasets.items() if line is not None]
    models: dict[str, ModelSpec] = {}
    for entry in config.models:
        line = absent(entry, kind_of(entry, config))
        if line is None:
            models[entry.name] = model_spec(entry, kind_of(entry, config))
        elif named_models or len(config.models) == 1:
            raise UserError(line)
        else:
            skips.append(Skip(entry.name, line))
    grid = expand(config, device, chosen_depths(config), models)
    skips = [*grid.skips, *skips]
    here = {s.name: missing_module(s) for s in config.systems if s.available}
    skips += [Skip(name, line) for name, line in here.items() if line is not None]
    blocks = []
    for block in grid.blocks:
        planned = [
            _planned(group, config, source, models[group.setting.model.name], device, datasets, skips)
            for group in block
            if group.setting.model.name in models and here[group.system.name] is None
        ]
        blocks.append([p for p in planned if p.requests])
    whole = [b for b in blocks if b]
    plan = RunPlan(device, models, part(whole, config.shard), list(dict.fromkeys(skips)))
    if not plan.requests:
        reason = skips[0].reason if skips else "no model, dataset, memory or system is chosen"
        raise UserError(f"nothing to measure: {skips[0].what + ': ' if skips else ''}{reason}")
    return plan


def kind_of(entry: ModelEntry, config: RunConfig) -> str:
    return config.weights or entry.default_weights


def missing_module(system: SystemEntry) -> str | None:
    """None when the system's module is here."""
    try:
        found = importlib.util.find_spec(system.module) is not None
    except ModuleNotFoundError:
        found = False
    return None if found else f"module {system.module} is not here"


def reference_system() -> SystemEntry:
    return system_entry("reference", catalogue.load("system", "reference"))


def _planned(
    group: Group,
    config: RunConfig,
    source: PromptSource,
    model: ModelSpec,
    device: str,
    datasets: dict[str, str | None],
    skips: list[Skip],
) -> PlannedGroup:
    """A dataset without enough documents of the prefix length is left out and named in skips."""
    memory, length = memory_spec(group, model, device), group.setting.prefix_tokens
    prompts: dict[str, list[BenchPrompt]] = {}
    for dataset in (d for d, line in datasets.items() if line is None):
        try:
            prompts[dataset] = source.select(model, dataset, length)
        except TooFewDocuments as error:
            skips.append(Skip(f"{model.name}, dataset {dataset}, prefix of {length} tokens", str(error)))
    hashes = {d: config_hash(group, model, memory, d, config) for d in prompts}
    return PlannedGroup(group, model, memory, prompts, hashes)
