"""`python run.py list` and `python run.py plan …`: what there is, what would run, and what is missing."""

from __future__ import annotations

from collections.abc import Iterator

from harness import catalogue
from harness.config import RunConfig, model_entry, system_entry
from harness.footprint import entry_bytes, parts, slots_in
from harness.grid import PlannedGroup, RunPlan, missing_module
from harness.prompts import PromptSource
from harness.system import ModelShape
from harness.weights import absent


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
        yield f"  {name:24} {system.label:24} {reason or missing_module(system) or 'ready'}"
    for group in ("sweep", "profile", "memory", "link", "launcher"):
        yield f"{group}s" if group != "memory" else "memories"
        for name in catalogue.names(group):
            yield f"  {name:24} {catalogue.headline(group, name)}"


def plan_lines(config: RunConfig, plan: RunPlan) -> Iterator[str]:
    """The cell groups in the order of execution, slots and bytes by part for each, and what is skipped."""
    groups = list(plan.groups)
    yield f"sweep {config.sweep}, device {plan.device}, output {config.output}"
    yield f"{len(groups)} cell groups in {len(plan.blocks)} blocks, {plan.requests} requests"
    for planned in groups:
        tokens = planned.group.setting.new_tokens
        yield f"  {planned.group.name}: {planned.requests} requests x {tokens} tokens"
    yield "memory (GB = 1e9 bytes)"
    seen = []
    for planned in groups:
        line = memory_line(planned)
        if line not in seen:
            seen.append(line)
            yield f"  {line}"
    minutes = link_minutes(groups)
    if minutes is not None:
        yield f"at most about {minutes:.0f} min of transfers on the paced link, were no expert ever reused"
    for skip in plan.skips:
        yield f"skipped: {skip.what}: {skip.reason}"


def memory_line(planned: PlannedGroup) -> str:
    """Bytes by part and slots per layer of one group, from shapes; the system itself plans with what it
    measures."""
    group, memory, shape = planned.group, planned.memory, planned.model.shape
    head = f"{planned.model.name}, {memory.label}, {group.system.name}"
    if shape is None or memory.budget_bytes is None:
        return f"{head}: no budget, every expert resident"
    depth = group.depth
    fixed = parts(shape, memory.batch, memory.max_sequence, depth)
    shown = " + ".join(f"{name} {size / 1e9:.3f}" for name, size in fixed.items() if size)
    slots = memory.slots_per_layer if depth or _same_cache(group.system.options) else None
    fitting = slots_in(shape, memory.budget_bytes, memory.batch, memory.max_sequence, depth)
    mean = slots or fitting
    return (
        f"{head}: {memory.budget_bytes / 1e9:.3f} GB = {shown} + slots; {mean:.1f} of {shape.experts} "
        f"slots per layer x {shape.moe_layers} layers x {entry_bytes(shape) / 1e6:.2f} MB"
    )


def link_minutes(groups: list[PlannedGroup]) -> float | None:
    """Upper estimate: k experts per MoE layer and token cross the paced link. None where no link is paced."""
    seconds = 0.0
    for planned in groups:
        rate, shape = planned.memory.link_rate_bytes_per_s, planned.model.shape
        if rate is not None and shape is not None:
            tokens = planned.requests * planned.group.setting.new_tokens
            seconds += tokens * bytes_per_token(shape) / rate
    return seconds / 60 if seconds else None


def bytes_per_token(shape: ModelShape) -> int:
    return shape.top_k * shape.moe_layers * entry_bytes(shape)


def _same_cache(options: object) -> bool:
    return isinstance(options, dict) and options.get("capacity", "same_cache") == "same_cache"
