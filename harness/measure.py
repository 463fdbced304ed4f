"""One cell group measured by one worker: requests in, rows out, whatever the worker does."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import efficiency, gpu_guard
from harness.catalogue import ROOT
from harness.cells import batches
from harness.device_meter import DeviceMeter
from harness.early_stop import LEAST_REPEATS, settled
from harness.entries import RunConfig
from harness.grid import PlannedGroup
from harness.prompts import BenchPrompt
from harness.records import Key, RecordFile, key_of, read_rows
from harness.reference_tokens import ReferenceTokens, reference_key
from harness.rows import known_columns, measured_columns
from harness.seat import Seat, Serves
from harness.system import ModelSpec, RequestRecord
from harness.worker_process import WorkerFailure, WorkerProcess
from specter_core.types import Request

DEVICE_MODULES: dict[str, tuple[str, ...]] = {"cpu": (), "cuda": ("harness.synthetic", "specter_core.cuda_parts")}
"""What the systems import only when they load."""
GRACE_S = 20.0
"""How long a request may go on after the run's time is up."""


@dataclass(slots=True)
class Measurement:
    """What every group of a run shares. advance(n) is called as n requests get their rows.

    Groups may be measured by several threads at a time. After `stop` nothing is recorded any more, and every worker
    is ended. `close` when no more groups come. guard: refuse a card
    that another process uses. loads: what each load of a system took, for the run's side file.
    """

    config: RunConfig
    records: RecordFile
    reference: ReferenceTokens
    logs: Path
    git_commit: str
    notice: Callable[[str], None]
    advance: Callable[[int], None]
    until: float = math.inf
    guard: bool = True
    loads: list[dict[str, Any]] = field(default_factory=list)
    _workers: set[WorkerProcess] = field(default_factory=set)
    _kept: dict[str | None, Seat] = field(default_factory=dict)
    _ahead: dict[Serves, WorkerProcess] = field(default_factory=dict)
    _stopped: bool = False

    def stop(self) -> None:
        self._stopped = True
        for worker in list(self._workers):
            worker.kill()

    def close(self) -> None:
        """Ends the workers that are kept for the next cell."""
        for seat in self._kept.values():
            seat.close()
        for worker in self._ahead.values():
            worker.kill()
        self._workers -= set(self._ahead.values())
        self._ahead.clear()
        self._workers -= {seat.worker for seat in self._kept.values()}
        self._kept.clear()

    @property
    def out_of_time(self) -> bool:
        """Whether `until` (time.monotonic) has come; what is unfinished then is left to the next run."""
        return time.monotonic() >= self.until

    def unfinished(self, planned: PlannedGroup) -> list[list[BenchPrompt]]:
        """The batches of a group that have a prompt without an ok row."""
        return [batch for batch in self._batches(planned) if not self._keys(planned, batch) <= self.records.done]

    def run(self, planned: PlannedGroup, model: ModelSpec, warmup: BenchPrompt, gpu: str | None = None) -> None:
        """Measures what is unfinished. model: the planned one, with the handle of its store. gpu: the only one that the
        worker sees.

        A worker that fails gets status rows for the batch that it was measuring; a fresh one takes the rest,
        at most `launcher.restarts` times, then the rest gets status rows too.
        """
        pending = self.unfinished(planned)
        self.advance(planned.requests - len({p.prompt_id for batch in pending for p in batch}))
        restarts = self.config.launcher.restarts
        if pending and self._settled(planned):
            self.notice(f"{planned.group.name}: stopped early, its mean TPOT is known to 5 %")
            self.advance(len({p.prompt_id for batch in pending for p in batch}))
            return
        while pending and not self._stopped and not self.out_of_time:
            seat, loaded = self._seat(planned, gpu), False
            worker = seat.worker
            try:
                self._load(seat, planned, model, warmup)
                loaded = True
                while pending and not self.out_of_time:
                    try:
                        measured = self._generate(worker, planned, pending[0])
                    except WorkerFailure as failure:
                        if failure.status == "timeout" and self.out_of_time:
                            raise
                        self._fail(planned, pending.pop(0), failure.status, failure.reason)
                        if not failure.alive:
                            raise
                    else:
                        self._record(planned, pending.pop(0), seat.metered(measured))
            except WorkerFailure as failure:
                self._release(seat, gpu)
                self.notice(f"{planned.group.name}: {failure}")
                restarts -= 1
                if restarts < 0 or (not loaded and failure.status in ("refused", "oom")):
                    why = "not measured, its worker failed before: " if loaded else ""
                    for batch in pending:
                        self._fail(planned, batch, failure.status, why + failure.reason)
                    return
            except BaseException:
                self._release(seat, gpu)
                raise
        if not self._keeps:
            self.close_seat(gpu)

    @property
    def _keeps(self) -> bool:
        return self.config.launcher.workers == "system"

    def close_seat(self, gpu: str | None) -> None:
        """Ends the worker that a card is kept for."""
        if (seat := self._kept.pop(gpu, None)) is not None:
            self._workers.discard(seat.worker)
            seat.close()

    def _release(self, seat: Seat, gpu: str | None) -> None:
        if self._kept.get(gpu) is seat:
            self.close_seat(gpu)

    def _settled(self, planned: PlannedGroup) -> bool:
        repeat = planned.group.setting.repeat
        if not self.config.stop_early or repeat < LEAST_REPEATS:
            return False
        return settled(read_rows(self.records.path), set(planned.hashes.values()))

    def _batches(self, planned: PlannedGroup) -> list[list[BenchPrompt]]:
        return [b for chosen in planned.prompts.values() for b in batches(chosen, planned.memory.batch)]

    def _keys(self, planned: PlannedGroup, batch: Sequence[BenchPrompt]) -> set[Key]:
        repeat = planned.group.setting.repeat
        return {Key(planned.hashes[p.dataset], p.prompt_id, repeat) for p in batch}

    def prepare(self, planned: PlannedGroup, gpu: str | None) -> None:
        """Starts the worker of a group that comes next and lets it import; it touches no device before its load."""
        if not self._stopped and self._serves(planned) not in self._ahead and self.unfinished(planned):
            worker = self._ahead[self._serves(planned)] = self._started(planned, gpu)
            worker.prepare([planned.group.system.module, *DEVICE_MODULES[planned.memory.device]])

    @staticmethod
    def _serves(planned: PlannedGroup) -> Serves:
        return planned.model.name, planned.group.system.name, planned.group.system.python

    def _started(self, planned: PlannedGroup, gpu: str | None) -> WorkerProcess:
        system = planned.group.system
        place = "" if gpu is None else f"-gpu{gpu}"
        log = self.logs / f"{planned.model.name}-{planned.memory.label}-{system.name}{place}.log".replace(" ", "_")
        python = str(ROOT / system.python) if system.python else None
        worker = WorkerProcess(log, threads=self.config.threads, python=python, gpu=gpu)
        self._workers.add(worker)
        return worker

    def _seat(self, planned: PlannedGroup, gpu: str | None) -> Seat:
        """The kept worker where it is one of this model and system (launcher.workers=system), else a fresh one; nobody
        else may be on the card when that starts."""
        wanted = self._serves(planned)
        kept = self._kept.get(gpu)
        if kept is not None and kept.serves == wanted and not kept.worker.ended:
            return kept
        self.close_seat(gpu)
        meter = None
        if planned.memory.device == "cuda":
            if self.guard:
                gpu_guard.check_free(gpu)
            meter = DeviceMeter(gpu).open()
        worker = self._ahead.pop(wanted, None) or self._started(planned, gpu)
        seat = self._kept[gpu] = Seat(worker, wanted, meter)
        if meter is not None and meter.status:
            self.notice(meter.status)
        if self._stopped:
            seat.worker.kill()
        return seat

    def _load(self, seat: Seat, planned: PlannedGroup, model: ModelSpec, warmup: BenchPrompt) -> None:
        system, launcher = planned.group.system, self.config.launcher
        options = {**system.options, "depth": planned.group.depth}
        seat.begin()
        start = time.monotonic()
        seat.worker.load(system.module, options, model, planned.memory, launcher.load_timeout_s)
        loaded, peak = time.monotonic(), seat.begin()
        try:
            self._generate(seat.worker, planned, [warmup] * planned.memory.batch, self.config.warmup_tokens)
        except WorkerFailure as failure:
            raise WorkerFailure(failure.status, f"warm-up: {failure.reason}") from failure
        seat.note()
        self.loads.append({
            "group": planned.group.name, "link": planned.memory.link, "load_s": round(loaded - start, 2),
            "warmup_s": round(time.monotonic() - loaded, 2), "load_peak_bytes": peak, "peak_bytes": seat.peak_bytes,
        })  # fmt: skip

    def _generate(
        self,
        worker: WorkerProcess,
        planned: PlannedGroup,
        prompts: Sequence[BenchPrompt],
        new_tokens: int | None = None,
    ) -> list[RequestRecord]:
        requests = [
            Request(
                request_id=f"{prompt.prompt_id}#{row}",
                prompt=tuple(prompt.tokens),
                max_new_tokens=new_tokens or planned.group.setting.new_tokens,
                temperature=self.config.temperature,
                seed=self.config.seed,
                ignore_eos=True,
            )
            for row, prompt in enumerate(prompts)
        ]
        timeout_s = min(self.config.launcher.generate_timeout_s, max(1.0, self.until - time.monotonic()) + GRACE_S)
        return worker.generate(requests, timeout_s)

    def _record(self, planned: PlannedGroup, batch: Sequence[BenchPrompt], measured: Sequence[RequestRecord]) -> None:
        rows: dict[str, dict[str, Any]] = {}
        for prompt, record in zip(batch, measured, strict=True):
            row = self._known(planned, prompt) | measured_columns(record, planned.memory)
            if self.config.temperature == 0 and row["weights"] == planned.model.weights:
                key = reference_key(planned.model.weights_hash, prompt, planned.group.setting.new_tokens)
                row["exact_match"] = self.reference.matches(key, record.tokens)
            rows.setdefault(prompt.prompt_id, row)
            if record.efficiency:
                efficiency.append(self.records.path.with_name(efficiency.FILE), row, record.efficiency)
        self._append(list(rows.values()))

    def write_off(self, planned: PlannedGroup, batch: Sequence[BenchPrompt], reason: str) -> None:
        """Status rows for a batch that is not going to be measured."""
        self._fail(planned, batch, "not_run", reason)

    def _fail(self, planned: PlannedGroup, batch: Sequence[BenchPrompt], status: str, reason: str) -> None:
        rows = {p.prompt_id: self._known(planned, p) | {"status": status, "reason": reason} for p in batch}
        self._append(list(rows.values()))

    def _known(self, planned: PlannedGroup, prompt: BenchPrompt) -> dict[str, Any]:
        return known_columns(planned.group, planned.model, planned.memory, prompt) | {
            "seed": self.config.seed,
            "temperature": float(self.config.temperature),
            "config_hash": planned.hashes[prompt.dataset],
            "git_commit": self.git_commit,
        }

    def _append(self, rows: list[dict[str, Any]]) -> None:
        """Leaves out prompts that fill up a batch and have their row already."""
        if self._stopped:
            return
        rows = [row for row in rows if key_of(row) not in self.records.done]
        self.records.append(rows)
        self.advance(len(rows))
