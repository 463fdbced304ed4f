"""The untimed reference run: the target's own greedy tokens for every prompt that will be measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from harness.entries import SystemEntry
from harness.grid import PlannedGroup
from harness.measure import Measurement
from harness.prompts import BenchPrompt
from harness.reference_tokens import ReferenceKey, ReferenceTokens, reference_key
from harness.system import MemorySpec, ModelSpec
from harness.worker_process import WorkerFailure, WorkerProcess
from specter_core.types import Request


def missing_reference(
    reference: ReferenceTokens, model: ModelSpec, groups: Iterable[PlannedGroup]
) -> dict[ReferenceKey, BenchPrompt]:
    """The prompts of some groups that have no reference tokens yet."""
    wanted: dict[ReferenceKey, BenchPrompt] = {}
    for planned in groups:
        for prompts in planned.prompts.values():
            for prompt in prompts:
                key = reference_key(model.weights_hash, prompt, planned.group.setting.new_tokens)
                if not reference.has(key):
                    wanted[key] = prompt
    return wanted


def fill_reference(
    measurement: Measurement,
    system: SystemEntry,
    model: ModelSpec,
    wanted: Mapping[ReferenceKey, BenchPrompt],
    *,
    device: str,
    log: Path,
) -> None:
    """Runs K = 0, B = 1, every expert resident, once per wanted prompt. A reference run that fails leaves
    exact_match empty for the rest, with a notice; the measured run goes on."""
    launcher, threads = measurement.config.launcher, measurement.config.threads
    longest = max(len(prompt.tokens) + key.new_tokens for key, prompt in wanted.items())
    memory = MemorySpec("resident", None, None, "native", None, device, batch=1, max_sequence=longest)
    worker = WorkerProcess(log, threads=threads)
    try:
        worker.load(system.module, {**system.options, "depth": 0}, model, memory, launcher.load_timeout_s)
        for key, prompt in wanted.items():
            request = Request(prompt.prompt_id, tuple(prompt.tokens), key.new_tokens, ignore_eos=True)
            record = worker.generate([request], launcher.generate_timeout_s)[0]
            measurement.reference.put(key, prompt, record.tokens)
    except WorkerFailure as failure:
        measurement.notice(f"{model.name}: exact_match stays empty where the reference run failed, {failure}")
    finally:
        worker.close()
