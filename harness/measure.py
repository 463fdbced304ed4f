"""One cell group measured by one worker: requests in, rows out, whatever the worker does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.catalogue import ROOT
from harness.cells import Group, batches, config_hash
from harness.columns import NAMES
from harness.config import RunConfig
from harness.grid import PlannedGroup
from harness.prompts import BenchPrompt
from harness.records import Key, RecordFile
from harness.reference_tokens import ReferenceTokens, reference_key
from harness.system import NAN, MemorySpec, ModelSpec, RequestRecord
from harness.worker_process import WorkerFailure, WorkerProcess
from specter_core.types import Request

Batch = list[tuple[str, BenchPrompt]]  # (config hash, prompt)


@dataclass(slots=True)
class Measurement:
    """What every group of a run shares. advance(n) is called as n requests get their rows."""

    config: RunConfig
    records: RecordFile
    reference: ReferenceTokens
    logs: Path
    git_commit: str
    notice: Callable[[str], None]
    advance: Callable[[int], None]

    def run(
        self,
        group: Group,
        model: ModelSpec,
        memory: MemorySpec,
        prompts: Mapping[str, Sequence[BenchPrompt]],
        warmup: BenchPrompt,
    ) -> None:
        """Measures what is not recorded yet. prompts: by dataset. A worker that fails gets status rows for
        the batch that it was measuring; a fresh one takes the rest, at most `launcher.restarts` times, then
        the rest gets status rows too."""
        pending = self._pending(group, model, memory, prompts, count=True)
        restarts = self.config.launcher.restarts
        while pending:
            worker = self._worker(group)
            loaded = False
            try:
                self._load(worker, group, model, memory, warmup)
                loaded = True
                while pending:
                    try:
                        measured = self._generate(worker, group, [p for _, p in pending[0]])
                    except WorkerFailure as failure:
                        self._fail(group, model, memory, pending.pop(0), failure)
                        if not failure.alive:
                            raise
                    else:
                        self._record(group, model, memory, pending.pop(0), measured)
            except WorkerFailure as failure:
                self.notice(f"{group.name}: {failure}")
                restarts -= 1
                if restarts < 0 or (not loaded and failure.status in ("refused", "oom")):
                    reason = f"not measured, its worker failed before: {failure.reason}" if loaded else failure.reason
                    for batch in pending:
                        self._fail(group, model, memory, batch, WorkerFailure(failure.status, reason))
                    return
            finally:
                worker.close()

    def unfinished(self, planned: PlannedGroup) -> bool:
        """Whether anything of a group is still to be measured."""
        return bool(self._pending(planned.group, planned.model, planned.memory, planned.prompts, count=False))

    def _pending(
        self,
        group: Group,
        model: ModelSpec,
        memory: MemorySpec,
        prompts: Mapping[str, Sequence[BenchPrompt]],
        *,
        count: bool,
    ) -> list[Batch]:
        pending: list[Batch] = []
        for dataset, chosen in prompts.items():
            name = config_hash(group, model, memory, dataset, self.config)
            for batch in batches(chosen, memory.batch):
                keys = {Key(name, p.prompt_id, group.setting.repeat) for p in batch}
                if keys <= self.records.done:
                    self.advance(len(keys) if count else 0)
                else:
                    pending.append([(name, p) for p in batch])
        return pending

    def _worker(self, group: Group) -> WorkerProcess:
        s = group.setting
        log = self.logs / f"{s.model.name}-{s.memory.name}-{group.system.name}.log"
        python = str(ROOT / group.system.python) if group.system.python else None
        return WorkerProcess(log, threads=self.config.threads, python=python)

    def _load(
        self, worker: WorkerProcess, group: Group, model: ModelSpec, memory: MemorySpec, warmup: BenchPrompt
    ) -> None:
        launcher = self.config.launcher
        options = {**group.system.options, "depth": group.depth}
        worker.load(group.system.module, options, model, memory, launcher.load_timeout_s)
        try:
            self._generate(worker, group, [warmup] * memory.batch)
        except WorkerFailure as failure:
            raise WorkerFailure(failure.status, f"warm-up: {failure.reason}") from failure

    def _generate(self, worker: WorkerProcess, group: Group, prompts: Sequence[BenchPrompt]) -> list[RequestRecord]:
        requests = [
            Request(
                request_id=f"{prompt.prompt_id}#{row}",
                prompt=tuple(prompt.tokens),
                max_new_tokens=group.setting.new_tokens,
                temperature=self.config.temperature,
                seed=self.config.seed,
                ignore_eos=True,
            )
            for row, prompt in enumerate(prompts)
        ]
        return worker.generate(requests, self.config.launcher.generate_timeout_s)

    def _record(
        self,
        group: Group,
        model: ModelSpec,
        memory: MemorySpec,
        batch: Batch,
        measured: Sequence[RequestRecord],
    ) -> None:
        rows: dict[str, dict[str, Any]] = {}
        for (name, prompt), record in zip(batch, measured, strict=True):
            row = self._facts(group, model, memory, name, prompt)
            exact = None
            if self.config.temperature == 0:
                key = reference_key(model.weights_hash, prompt, group.setting.new_tokens)
                exact = self.reference.matches(key, record.tokens)
            rows.setdefault(prompt.prompt_id, row | measured_columns(record, memory) | {"exact_match": exact})
        self._append(rows)

    def _fail(self, group: Group, model: ModelSpec, memory: MemorySpec, batch: Batch, failure: WorkerFailure) -> None:
        rows = {}
        for name, prompt in batch:
            status = {"status": failure.status, "reason": failure.reason}
            rows[prompt.prompt_id] = self._facts(group, model, memory, name, prompt) | status
        self._append(rows)

    def _append(self, rows: Mapping[str, dict[str, Any]]) -> None:
        self.records.append(list(rows.values()))
        self.advance(len(rows))

    def _facts(
        self, group: Group, model: ModelSpec, memory: MemorySpec, name: str, prompt: BenchPrompt
    ) -> dict[str, Any]:
        """The columns that are known before anything runs; measured ones empty."""
        return dict.fromkeys(NAMES) | {
            "system": group.system.name,
            "variant": group.system.variant,
            "model": model.name,
            "weights": model.weights,
            "dtype": model.dtype,
            "dataset": prompt.dataset,
            "label": prompt.label,
            "prompt_id": prompt.prompt_id,
            "repeat": group.setting.repeat,
            "seed": self.config.seed,
            "temperature": float(self.config.temperature),
            "B": memory.batch,
            "K": group.depth,
            "budget_bytes": memory.budget_bytes,
            "memory": memory.label,
            "prefix_len": len(prompt.tokens),
            "new_tokens": group.setting.new_tokens,
            "link": memory.link,
            "link_rate_bytes_per_s": memory.link_rate_bytes_per_s,
            "device": memory.device,
            "config_hash": name,
            "git_commit": self.git_commit,
            "status": "ok",
        }


def measured_columns(record: RequestRecord, memory: MemorySpec) -> dict[str, Any]:
    """The columns that a system's record fills."""
    peak, budget = record.peak_device_bytes, memory.budget_bytes
    causes = {cause: round(ms, 4) for cause, ms in sorted(record.stall_ms.items())}
    return {
        "variant": record.variant,
        "dtype": record.dtype,
        "encoding": record.encoding,
        "K": record.depth,
        "M": record.slots,
        "new_tokens": len(record.tokens),
        "ttft_ms": record.ttft_ms,
        "tpot_ms": record.tpot_ms,
        "throughput": record.throughput,
        "acceptance": record.acceptance,
        "tokens_per_window": record.tokens_per_window,
        "access_hit_rate": record.access_hit_rate,
        "coverage": record.coverage,
        "coverage_ceiling": record.coverage_ceiling,
        "prefetch_precision": record.prefetch_precision,
        "prefetch_recall": record.prefetch_recall,
        "h2d_bytes": record.h2d_bytes,
        "h2d_bytes_used": record.h2d_bytes_used,
        "link_utilisation": record.link_utilisation,
        "stall_ms": sum(record.stall_ms.values()) if record.stall_ms else NAN,
        "stall_by_cause": json.dumps(causes) if causes else None,
        "peak_device_bytes": peak,
        "within_budget": None if peak is None or budget is None else peak <= budget,
        "energy_j": record.energy_j,
    }
