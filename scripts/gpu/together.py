"""Measures cells one after the other, each in a worker of its own. Where a start takes a minute and the card has room
for all of them, their workers are started at the same time; while one generates, the others wait for their next
request and move nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from harness.device_bytes import device_bytes
from harness.device_meter import DeviceMeter
from harness.gpu_guard import wait_for_rest
from harness.grid import PlannedGroup
from harness.measure import Measurement
from harness.prompts import BenchPrompt
from harness.reference_tokens import reference_key, token_digest
from harness.seat import Seat
from harness.system import RequestRecord
from harness.worker_process import WorkerFailure, WorkerProcess

DIGESTS = "token_digests.jsonl"
"""Beside the records: SHA-256 of every answer, to be compared with a reference run that comes later."""
CLOSING_S = 5.0
"""What is left of the time when no request is begun any more."""


class Cell(NamedTuple):
    measurement: Measurement
    planned: PlannedGroup
    warmup: BenchPrompt

    @property
    def left_s(self) -> float:
        return self.measurement.until - time.monotonic() - CLOSING_S


def measure_alone(cell: Cell, gpu: str | None, notice: Callable[[str], None]) -> None:
    """Rows of one cell, with the card's memory and energy as NVML tells them meanwhile."""
    meter = None
    if cell.planned.memory.device == "cuda":
        wait_for_rest(lambda: device_bytes().used)  # of the engine before
        meter = DeviceMeter(gpu).open()
    try:
        _measure_all([cell], gpu, notice, meter)
    finally:
        if meter is not None:
            meter.close()


def measure_together(cells: Sequence[Cell], gpu: str | None, notice: Callable[[str], None]) -> None:
    """Rows of every cell. Device memory is what each system sees of its own process, as the card's total says nothing
    here."""
    _measure_all(cells, gpu, notice, None)


def _measure_all(
    cells: Sequence[Cell], gpu: str | None, notice: Callable[[str], None], meter: DeviceMeter | None
) -> None:
    """A worker that fails gets status rows, and one that the time is too short for none, so that the next call measures
    it. A row is measured again unless it is ok."""
    cells = [cell for cell in cells if cell.left_s > 0]
    if not cells:
        return
    start = time.monotonic()
    started = [_started(cell, gpu) for cell in cells]  # by this thread: a worker ends with the one that started it
    try:
        failures = _loaded(cells, started)
        notice(f"{time.monotonic() - start:5.1f} s until {len(cells)} loaded, {failures.count(None)} of them well")
        for cell, worker, failure in zip(cells, started, failures, strict=True):
            begun, group = time.monotonic(), cell.planned.group
            try:
                if failure is not None:
                    raise failure
                _measure(cell, Seat(worker, ("", "", None), meter))
            except WorkerFailure as found:
                if found.status != "timeout" or cell.left_s > 0:
                    for batch in cell.measurement.unfinished(cell.planned):
                        cell.measurement._fail(cell.planned, batch, found.status, found.reason)
                notice(f"{group.name}: {found}")
            worker.kill()
            notice(f"{time.monotonic() - begun:5.1f} s {group.name} {group.system.options}")
    finally:
        for worker in started:
            worker.kill()


def _started(cell: Cell, gpu: str | None) -> WorkerProcess:
    planned, system = cell.planned, cell.planned.group.system
    kind = "-".join(str(v) for k, v in system.options.items() if k in ("variant", "placement", "offloader"))
    name = f"{planned.model.name}-{planned.memory.label}-{system.name}-{kind}-{planned.memory.batch}"
    return WorkerProcess(cell.measurement.logs / f"{name}.log", threads=cell.measurement.config.threads, gpu=gpu)


def _loaded(cells: Sequence[Cell], started: Sequence[WorkerProcess]) -> list[WorkerFailure | None]:
    """Every worker's failure to load, or None; an interrupt ends them all."""
    with ThreadPoolExecutor(len(cells)) as pool:
        try:
            return list(pool.map(_load, cells, started))
        except BaseException:
            for worker in started:
                worker.kill()
            raise


def _load(cell: Cell, worker: WorkerProcess) -> WorkerFailure | None:
    planned, launcher = cell.planned, cell.measurement.config.launcher
    system = planned.group.system
    options = {**system.options, "depth": planned.group.depth}
    timeout_s = max(1.0, min(launcher.load_timeout_s, cell.left_s))
    try:
        worker.load(system.module, options, planned.model, planned.memory, timeout_s)
    except WorkerFailure as failure:
        return failure
    return None


def _measure(cell: Cell, seat: Seat) -> None:
    measurement, planned = cell.measurement, cell.planned
    warmups = [cell.warmup] * planned.memory.batch
    measurement._generate(seat.worker, planned, warmups, measurement.config.warmup_tokens)
    seat.note()
    for batch in measurement.unfinished(planned):
        if cell.left_s <= 0:
            return
        records = seat.metered(measurement._generate(seat.worker, planned, batch))
        measurement._record(planned, batch, records)
        _note_answers(cell, batch, records)


def _note_answers(cell: Cell, batch: Sequence[BenchPrompt], records: Sequence[RequestRecord]) -> None:
    planned = cell.planned
    with cell.measurement.records.path.with_name(DIGESTS).open("a") as file:
        for prompt, record in zip(batch, records, strict=True):
            key = reference_key(planned.model.weights_hash, prompt, planned.group.setting.new_tokens)
            row = {"config_hash": planned.hashes[prompt.dataset], "prompt_id": prompt.prompt_id}
            answer = {"tokens_sha256": token_digest(record.tokens)}
            file.write(json.dumps(row | key._asdict() | answer) + "\n")
