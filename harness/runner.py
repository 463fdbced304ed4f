"""A run from plan to figures. Everything is resumable: what is recorded is skipped, what failed is measured
again."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pandas as pd

from harness import assets, depth_file, environment, frame, launch, timings
from harness.catalogue import ROOT, shown
from harness.entries import RunConfig, SystemEntry
from harness.grid import PlannedGroup, RunPlan, missing_module
from harness.measure import Measurement
from harness.progress import RunProgress
from harness.prompts import PromptSource
from harness.records import RecordFile
from harness.reference_run import fill_reference, missing_reference
from harness.reference_tokens import ReferenceTokens
from harness.shared_store import Store, shared_store
from harness.summary import summarise
from harness.system import ModelSpec


def output_folder(config: RunConfig) -> Path:
    return ROOT / config.output


def run(
    config: RunConfig,
    plan: RunPlan,
    source: PromptSource,
    *,
    reference: SystemEntry | None = None,
    store: Store = shared_store,
) -> dict[str, Any]:
    """Measures what is planned and not recorded, then writes summary.csv, timings.csv and the figures (after a depth
    sweep depths.json too). Returns what run.py prints as its last line. reference: the system whose greedy tokens
    exact_match compares with; None: no reference run, only tokens that an earlier one left. UserError (disk full, no
    room for a store, a broken checkpoint) ends the run; every row that was recorded stays."""
    out = output_folder(config)
    path = out / "records.csv"
    if config.fresh:
        set_aside(path)
        set_aside(out / "timings.csv")
    places = launch.seats(plan.device, config.launcher.parallel)
    launch.set_host_memory(config.launcher)
    commit = environment.git_commit()
    with RunProgress(plan.requests) as progress:
        records = RecordFile(path, progress.notice)
        before = len(records.done)
        hashes = {name: spec.weights_hash for name, spec in plan.models.items()}
        captured = environment.capture(plan.device, config.threads, hashes, commit)
        environment.write(out / "environment.json", captured)
        write_systems(out / "systems.csv", config.systems)
        if (chosen := depth_file.location(config)) is not None:
            progress.notice(f"K from {shown(chosen)}, where it has the model and memory setting (depths=null: without)")
        for skip in plan.skips:
            progress.notice(f"skipped: {skip.what}: {skip.reason}")
        measurement = Measurement(
            config=config,
            records=records,
            reference=ReferenceTokens(out / "reference_tokens.jsonl"),
            logs=assets.worker_logs(out),
            git_commit=commit,
            notice=progress.notice,
            advance=progress.advance,
        )
        for name, spec in plan.models.items():
            groups = [p for p in plan.groups if p.model.name == name]
            links = "+".join(link.name for link in config.links)
            what = timings.Timed(config.sweep, name, spec.weights, links, plan.device, commit)
            with timings.timed(out / "timings.csv", what, lambda: len(records.done)):
                _run_model(spec, groups, measurement, plan.device, places, progress, source, reference, store)
    return finish(config, plan, out, new=len(records.done) - before)


def _run_model(
    spec: ModelSpec,
    groups: list[PlannedGroup],
    measurement: Measurement,
    device: str,
    places: list[str | None],
    progress: RunProgress,
    source: PromptSource,
    reference: SystemEntry | None,
    store: Store,
) -> None:
    """One model's groups in their order, over one host store that lives as long as it is needed."""
    config = measurement.config
    open_groups = [p for p in groups if measurement.unfinished(p)]
    wanted = missing_reference(measurement.reference, spec, open_groups) if config.temperature == 0 else {}
    if wanted and reference is not None and (line := missing_module(reference)) is not None:
        progress.notice(f"{spec.name}: exact_match stays empty, {line}")
        reference = None
    systems = [p.group.system for p in open_groups] + ([reference] if wanted and reference else [])
    with ExitStack() as stack:
        if any(s.needs_store for s in systems):
            progress.begin(f"{spec.name}: filling the host store")
            spec = stack.enter_context(store(spec, config.threads))
        if wanted and reference is not None:
            progress.begin(f"{spec.name}: reference run (untimed)")
            log = measurement.logs / f"{spec.name}-reference.log"
            fill_reference(measurement, reference, spec, wanted, device=device, log=log)
        lengths = {p.group.setting.prefix_tokens for p in groups}
        warmups = {length: source.warmup(spec, length) for length in lengths}

        def measure(planned: PlannedGroup, gpu: str | None) -> None:
            progress.begin(planned.group.name)
            measurement.run(planned, spec, warmups[planned.group.setting.prefix_tokens], gpu)

        try:
            launch.run_all(groups, places, measure, measurement.stop)
        finally:
            measurement.close()


def finish(config: RunConfig, plan: RunPlan, out: Path, *, new: int) -> dict[str, Any]:
    """summary.csv and the figures from the rows that this plan covers; the closing JSON."""
    rows = frame.load(out / "records.csv", plan.hashes)
    summary = summarise(rows)
    write_csv(out / "summary.csv", summary)
    if config.sweep == "depth":
        _choose_depths(rows, out / depth_file.NAME)
    figures = draw(config.figures, rows, out)
    ok = rows[rows["status"] == "ok"]
    specter = ok[ok["system"] == "specter"]["exact_match"].dropna()
    return {
        "sweep": config.sweep,
        "output": shown(out),
        "rows": len(ok),
        "new_rows": new,
        "failed_rows": int((rows["status"] != "ok").sum()),
        "skipped": len(plan.skips),
        "specter_exact_match": bool(specter.all()) if len(specter) else None,
        "device": plan.device,
        "figures": figures,
    }


def _choose_depths(rows: pd.DataFrame, path: Path) -> None:
    lines = depth_file.beside(rows)
    if choices := depth_file.choose(rows):
        depth_file.write(path, choices)
        lines = [*depth_file.report(choices), f"written to {shown(path)}", *lines]
    print("".join(f"{line}\n" for line in lines), end="", file=sys.stderr)


def draw(figures: Iterable[str], rows: pd.DataFrame, out: Path) -> list[str]:
    """figures/<name>.png and .pdf of each figure that the rows have data for; their paths."""
    names = list(figures)
    if not names or not (rows["status"] == "ok").any():
        return []
    looks, results = (importlib.import_module(f"figures.{name}") for name in ("looks", "results"))
    redraw = importlib.import_module("figures.redraw")
    found = results.Results(out, records={".": looks.with_systems(rows, out / "systems.csv")})
    return [shown(path) for outcome in redraw.redraw(found, out / "figures", names) for path in outcome.paths]


def set_aside(path: Path) -> None:
    """--fresh: the old records stay beside the new ones as records.csv.1, .2, …"""
    if path.exists():
        number = 1
        while (kept := path.with_name(f"{path.name}.{number}")).exists():
            number += 1
        path.rename(kept)


def write_systems(path: Path, systems: Iterable[SystemEntry]) -> None:
    """Label, colour and order of each system for the plots; systems of earlier runs in the folder stay."""
    systems = list({s.name: s for s in systems}.values())
    new = pd.DataFrame(
        [[s.name, s.label, s.colour, s.order, s.figure] for s in systems],
        columns=["system", "label", "colour", "order", "figure"],
    )
    if path.exists():
        new = pd.concat([pd.read_csv(path), new]).drop_duplicates("system", keep="last")
    write_csv(path, new.sort_values("order"))


def write_csv(path: Path, table: pd.DataFrame) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    table.to_csv(temporary, index=False, float_format="%.6g")
    temporary.replace(path)
