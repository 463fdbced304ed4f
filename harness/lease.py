"""A run against the clock: one host store per model, a worker per system, and it stops between requests when its time
is up; the same command goes on from there."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from harness.entries import SystemEntry
from harness.grid import PlannedGroup
from harness.measure import Measurement
from harness.prompts import BenchPrompt, PromptSource
from harness.reference_run import fill_reference, missing_reference
from harness.shared_store import Store
from harness.system import ModelSpec

CLOSING_S = 8.0
"""What is left of the time when no cell is begun any more."""


class Part(NamedTuple):
    """Groups of one model that are measured under one configuration."""

    measurement: Measurement
    groups: list[PlannedGroup]


def run_model(
    spec: ModelSpec,
    parts: Sequence[Part],
    *,
    source: PromptSource,
    reference: SystemEntry,
    store: Store,
    device: str,
    gpu: str | None,
    until: float,
    seed: int,
    notice: Callable[[str], None],
) -> None:
    """Parts in their order; within one, systems in a seeded random order, each with all its cells. until:
    time.monotonic. The reference run comes first. UserError when another process is on the card before a worker."""
    parts = [Part(p.measurement, [g for g in p.groups if p.measurement.unfinished(g)]) for p in parts]
    parts = [p for p in parts if p.groups]
    if not parts or time.monotonic() > until - CLOSING_S:
        return
    start = time.monotonic()

    def note(what: str) -> None:
        notice(f"{time.monotonic() - start:6.1f} s, {until - time.monotonic():5.0f} left: {spec.name}, {what}")

    first = parts[0].measurement
    wanted: dict[Any, BenchPrompt] = {}
    for part in parts:
        wanted |= missing_reference(first.reference, spec, part.groups)
    with ExitStack() as stack:
        filled = spec
        stack.callback(first.close)
        first.prepare(by_system(parts[0].groups, seed)[0][0], gpu)
        if wanted or any(g.group.system.needs_store for p in parts for g in p.groups):
            filled = stack.enter_context(store(spec, first.config.threads))
            note("host store filled")
        if wanted:
            log = first.logs / f"{spec.name}-reference.log"
            fill_reference(first, reference, filled, wanted, device=device, log=log)
            note(f"reference run of {len(wanted)} prompts")
        for part in parts:
            _run_part(part, filled, source, gpu, until, seed, note)


def by_system(groups: Sequence[PlannedGroup], seed: int) -> list[list[PlannedGroup]]:
    """Groups of a model by system, the systems in a seeded random order, the cells of each by variant (weights in
    another encoding are loaded once), then in theirs."""
    found: dict[str, list[PlannedGroup]] = {}
    for group in sorted(groups, key=lambda g: g.group.system.variant):
        found.setdefault(group.group.system.name, []).append(group)
    order = list(found.values())
    random.Random(f"{seed} {groups[0].model.name}").shuffle(order)
    return order


def _run_part(
    part: Part,
    spec: ModelSpec,
    source: PromptSource,
    gpu: str | None,
    until: float,
    seed: int,
    note: Callable[[str], None],
) -> None:
    try:
        systems = by_system(part.groups, seed)
        for number, groups in enumerate(systems):
            for planned in groups:
                if time.monotonic() > until - CLOSING_S:
                    return
                if planned is groups[0] and number + 1 < len(systems):
                    part.measurement.prepare(systems[number + 1][0], gpu)
                warmup = source.warmup(spec, planned.group.setting.prefix_tokens)
                part.measurement.run(planned, spec, warmup, gpu)
                note(f"{planned.group.name}, link {planned.memory.link}")
    finally:
        part.measurement.close()


def write_off(part: Part, reason: str) -> int:
    """A row with status not_run and the reason for every request that has no row; the number of them."""
    before = len(part.measurement.records.done)
    missing = 0
    for planned in part.groups:
        for batch in part.measurement.unfinished(planned):
            part.measurement.write_off(planned, batch, reason)
            missing += len({p.prompt_id for p in batch})
    assert len(part.measurement.records.done) == before
    return missing
