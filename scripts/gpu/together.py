"""Measures cells one after the other whose workers were all started at the same time, where a start takes a minute and
the card has room for all of them. While one generates, the others wait for their next request and move nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from harness.grid import PlannedGroup
from harness.measure import Measurement
from harness.prompts import BenchPrompt
from harness.reference_tokens import token_digest
from harness.worker_process import WorkerFailure, WorkerProcess

DIGESTS = "token_digests.jsonl"
"""Beside the records: SHA-256 of every answer, to be compared with a reference run that comes later."""


class Cell(NamedTuple):
    measurement: Measurement
    planned: PlannedGroup
    warmup: BenchPrompt


def measure_together(cells: Sequence[Cell], gpu: str | None, notice: Callable[[str], None]) -> None:
    """Rows of every cell; a worker that fails gets status rows. Device memory is what each system sees of its own
    process, as the card's total says nothing here."""
    start = time.monotonic()
    started = [_started(cell, gpu) for cell in cells]  # by this thread: a worker ends with the one that started it
    with ThreadPoolExecutor(max(1, len(cells))) as pool:
        workers = list(pool.map(_loaded, cells, started))
    notice(f"{time.monotonic() - start:5.1f} s until all {len(cells)} were loaded")
    try:
        for cell, found in zip(cells, workers, strict=True):
            begun = time.monotonic()
            try:
                _measure(cell, found)
            except WorkerFailure as failure:
                for batch in cell.measurement.unfinished(cell.planned):
                    cell.measurement._fail(cell.planned, batch, failure.status, failure.reason)
                notice(f"{cell.planned.group.name}: {failure}")
            if isinstance(found, WorkerProcess):
                found.kill()
            notice(f"{time.monotonic() - begun:5.1f} s {cell.planned.group.name} {cell.planned.group.system.options}")
    finally:
        for worker in started:
            worker.kill()


def _started(cell: Cell, gpu: str | None) -> WorkerProcess:
    planned, system = cell.planned, cell.planned.group.system
    kind = "-".join(str(v) for k, v in system.options.items() if k in ("variant", "placement", "offloader"))
    log = cell.measurement.logs / f"{planned.model.name}-{planned.memory.label}-{system.name}-{kind}.log"
    return WorkerProcess(log, threads=cell.measurement.config.threads, gpu=gpu)


def _loaded(cell: Cell, worker: WorkerProcess) -> WorkerProcess | WorkerFailure:
    planned, launcher = cell.planned, cell.measurement.config.launcher
    system = planned.group.system
    options = {**system.options, "depth": planned.group.depth}
    try:
        worker.load(system.module, options, planned.model, planned.memory, launcher.load_timeout_s)
    except WorkerFailure as failure:
        worker.kill()
        return failure
    return worker


def _measure(cell: Cell, worker: WorkerProcess | WorkerFailure) -> None:
    if isinstance(worker, WorkerFailure):
        raise worker
    measurement, planned = cell.measurement, cell.planned
    warmups = [cell.warmup] * planned.memory.batch
    measurement._generate(worker, planned, warmups, measurement.config.warmup_tokens)
    for batch in measurement.unfinished(planned):
        records = measurement._generate(worker, planned, batch)
        measurement._record(planned, batch, records)
        with measurement.records.path.with_name(DIGESTS).open("a") as file:
            for prompt, record in zip(batch, records, strict=True):
                line = {"config_hash": planned.hashes[prompt.dataset], "prompt_id": prompt.prompt_id}
                file.write(json.dumps(line | {"tokens_sha256": token_digest(record.tokens)}) + "\n")
