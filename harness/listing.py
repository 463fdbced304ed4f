"""`python run.py list` and `python run.py plan …`: what there is, what would run, and what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from harness import catalogue
from harness.cells import expand
from harness.config import model_entry, system_entry
from harness.depth_file import chosen_depths, location
from harness.entries import RunConfig, SystemEntry
from harness.environment import detect_device
from harness.estimate import Speeds, known_files, recorded
from harness.footprint import entry_bytes, parts, slots_in
from harness.grid import PlannedGroup, RunPlan, missing_module
from harness.isolated import missing_environment
from harness.memory import memory_spec
from harness.prompts import PromptSource
from harness.records import key_of
from harness.system import ModelSpec
from harness.weights import absent
from specter_core.memory.budget import CONTEXT_BYTES

OWN_DRAFT_VARIANTS = ("adapted", "streaming")
"""Systems whose draft shares nothing with the target: its tensors and KV are counted twice."""


def catalogue_lines(source: PromptSource) -> Iterator[str]:
    """One line per model (and kind of weights), dataset, system and sweep, with what is missing."""
    yield "models"
    for name in catalogue.names("model"):
        entry = model_entry(name, catalogue.load("model", name))
        for kind in entry.weights:
            line = absent(entry, kind)
            state = "ready" if line is None else line.partition(": ")[2]
            yield f"  {name:24} {kind:10} {entry.label:18} {state}"
    yield "datasets"
    for name in catalogue.names("dataset"):
        yield f"  {name:24} {source.absent(name) or 'ready'}"
    yield "systems"
    for name in catalogue.names("system"):
        system = system_entry(name, catalogue.load("system", name))
        reason = None if system.available else system.reason
        yield f"  {name:24} {system.label:24} {reason or missing_module(system) or without(system) or 'ready'}"
    for group in ("sweep", "profile", "memory", "link", "launcher"):
        yield f"{group}s" if group != "memory" else "memories"
        for name in catalogue.names(group):
            yield f"  {name:24} {catalogue.headline(group, name)}"


def without(system: SystemEntry) -> str | None:
    """What a system with an environment of its own lacks."""
    if system.environment is None:
        return None
    return missing_environment(system.environment, system.make, system.options.get("python"))


def plan_lines(config: RunConfig, plan: RunPlan, records: Path) -> Iterator[str]:
    """The cell groups in the order of execution with what is still to do, minutes and GiB, bytes by part, what is
    skipped and why. harness/estimate.py says where minutes come from."""
    groups = list(plan.groups)
    done = {key_of(row) for row in recorded(records) if row.get("status") == "ok"}
    yield f"sweep {config.sweep}, device {plan.device}, output {config.output}"
    if (chosen := location(config)) is not None:
        yield f"K from {chosen}, where it has the model and memory setting (depths=null: without)"
    yield f"{len(groups)} cell groups in {len(plan.blocks)} blocks, {plan.requests} requests"
    speeds, total, bases = Speeds(known_files(records), plan.device), 0.0, dict.fromkeys(("recorded",), 0)
    for planned in groups:
        left = sum(key not in done for key in planned.keys)
        cell = speeds.cell_s(planned, left)
        total, bases = total + cell.seconds, bases | {cell.basis: bases.get(cell.basis, 0) + 1}
        tokens, budget = planned.group.setting.new_tokens, planned.memory.budget_bytes
        size = "" if budget is None else f", {budget / 2**30:.3g} GiB on the device"
        minutes = f", about {cell.seconds / 60:.1f} min ({cell.basis})"
        yield f"  {planned.group.name}: {left} of {planned.requests} requests x {tokens} tokens to do{minutes}{size}"
    counts = ", ".join(f"{count} {basis}" for basis, count in bases.items() if count)
    yield f"about {total / 60:.1f} min in all (cells by the source of their estimate: {counts})"
    for name, spec in plan.models.items():
        if spec.shape is not None:
            experts = spec.shape.moe_layers * spec.shape.experts
            yield f"{name}: experts in host memory {experts * entry_bytes(spec.shape) / 2**30:.3g} GiB"
    yield "memory (MB = 1e6 bytes)"
    yield from dict.fromkeys(f"  {memory_line(planned)}" for planned in groups)
    for skip in plan.skips:
        yield f"skipped: {skip.what}: {skip.reason}"


def shape_lines(config: RunConfig) -> Iterator[str]:
    """Budget and bytes by part for models of known shape, whether their weights are here or not."""
    device = detect_device(config.device)
    yield f"sweep {config.sweep}, device {device}; memory (MB = 1e6 bytes)"
    for block in expand(config, device, chosen_depths(config)).blocks:
        for group in block:
            entry = group.setting.model
            if entry.shape is not None and group.setting.repeat == 0:
                spec = ModelSpec(entry.name, entry.family, "", None, "", entry.shape.dtype, "", entry.shape)
                memory = memory_spec(group, spec, device)
                yield f"  {memory_line(PlannedGroup(group, spec, memory, {}, {}))}"


def memory_line(planned: PlannedGroup) -> str:
    """Budget and bytes by part of one group, from shapes; the system itself plans with what it measures."""
    group, memory, shape = planned.group, planned.memory, planned.model.shape
    head = f"{planned.model.name}, {memory.label}, {group.system.name}"
    if shape is None or memory.budget_bytes is None:
        return f"{head}: no budget, every expert resident"
    encoding = "nested" if group.nested else "plain"
    head += ", nested experts" if group.nested else ""
    fixed = parts(shape, memory.batch, memory.max_sequence, group.depth or int(group.nested))
    if memory.device == "cuda":
        fixed |= {"context": CONTEXT_BYTES}
    options = group.system.options
    own_draft = options.get("variant") in OWN_DRAFT_VARIANTS
    if own_draft:
        fixed |= {"draft_shared": fixed["shared"], "kv": 2 * fixed["kv"]}
    shown = ", ".join(f"{name} {size / 1e6:,.1f}" for name, size in fixed.items() if size)
    line = f"{head}: budget {memory.budget_bytes / 1e6:,.1f} MB; {shown}"
    if not group.system.needs_store:
        layer, free = shape.experts * entry_bytes(shape), memory.budget_bytes - sum(fixed.values())
        whole = free >= shape.moe_layers * layer
        resident = shape.moe_layers if whole else max(0, free // layer - 1)  # one more for the layer that streams
        return f"{line}, the rest for {resident} of {shape.moe_layers} resident layers"
    same_cache = options.get("capacity", "same_cache") == "same_cache" and not own_draft
    slots: float | None = memory.slots_per_layer if same_cache else None
    if slots is None:
        if options.get("capacity") == "same_cache":  # as many as Specter has in these bytes
            fixed |= {"draft": parts(shape, memory.batch, memory.max_sequence, group.setting.model.depth)["draft"]}
        slots = slots_in(shape, memory.budget_bytes, fixed, encoding)
    size = slots * shape.moe_layers * entry_bytes(shape, encoding)
    return f"{line}, slots {size / 1e6:,.1f} ({slots:.1f} of {shape.experts} per layer)"
