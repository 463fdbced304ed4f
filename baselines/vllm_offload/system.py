"""vLLM under a device budget: the near side. README.md says what is measured and why so."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from baselines.vllm_offload.engine import VARIABLES
from baselines.vllm_offload.offload import OFFLOADERS, OVERHEAD_BYTES, Offload, kv_bytes, offload
from harness.device_bytes import device_bytes, process_bytes
from harness.isolated import Environment, IsolatedProcess, interpreter
from harness.isolated_records import records
from harness.system import NAN, MemorySpec, ModelSpec, RequestRecord
from specter_core.errors import UserError
from specter_core.types import Request

ENVIRONMENT = Environment("vllm", "baselines.vllm_offload.engine", "vllm", make="baseline-vllm")
SPARE_BYTES = 50_000_000
"""Kept free when the budget is spent by what the first load has measured."""
TOLERANCE_BYTES = 1_500_000_000
"""Beyond the budget by more than this, offloading did not happen; by less, the row says within_budget false."""


class VllmSystem:
    """options: offloader uva | prefetch | best (each is loaded and timed once per load, the faster one stays); variant
    offload, or resident for everything on the device; compile: torch.compile beside CUDA graphs; load_format auto
    (dummy for synthetic weights, which have no folder) or vLLM's; dtype; python. On a CPU (a vLLM built for it) only
    resident, for comparing tokens."""

    def __init__(
        self,
        variant: str = "offload",
        offloader: str = "best",
        compile: bool = True,
        load_format: str = "auto",
        dtype: str = "bfloat16",
        python: str | None = None,
    ) -> None:
        if offloader not in (*OFFLOADERS, "best"):
            raise UserError(f"vllm offloader {offloader!r} is unknown; known: {', '.join(OFFLOADERS)}, best")
        if variant not in ("offload", "resident"):
            raise UserError(f"vllm variant {variant!r} is unknown; known: offload, resident")
        self.variant, self.offloader, self.compile = variant, offloader, compile
        self.load_format, self.dtype, self.python = load_format, dtype, python
        self.process: IsolatedProcess | None = None
        self.facts: dict[str, Any] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def load(self, model: ModelSpec, memory: MemorySpec) -> None:
        """UserError: no environment, too small a budget, or bytes on the device that show that offloading did
        not happen."""
        if memory.device != "cuda" and self.variant != "resident":
            raise UserError(f"vllm offloads on cuda only, not on {memory.device}; leave it out here")
        python = interpreter(ENVIRONMENT, self.python)
        shape = model.shape
        if shape is None:
            raise UserError(f"vllm: conf/model/{model.name} has no shape, so the budget cannot be spent; add one")
        self.memory, self.model = memory, model
        budget = None if self.variant == "resident" else memory.budget_bytes
        kinds = OFFLOADERS if self.offloader == "best" else (self.offloader,)
        plans = [offload(kind, budget, shape, memory.batch, memory.max_sequence) for kind in kinds]
        plans = list({plan.offloader: plan for plan in plans}.values())
        self.timed: dict[str, float] = {}
        for at, plan in enumerate(plans):
            used = self._start(python, plan, model, budget)
            if plan.offloader == "uva" and (closer := self._closer(plan, used)) is not None:
                self._start(python, closer, model, budget)
                plans[at] = closer
            if len(plans) > 1:
                self.timed[plan.offloader] = self.process.ms_per_token()
        if self.timed and (best := min(plans, key=lambda p: self.timed[p.offloader])) is not self.placed:
            self._start(python, best, model, budget)

    def _closer(self, plan: Offload, used: int) -> Offload | None:
        """The plan with what the first load has shown to be taken beside weights and KV, where it moves less to the
        host, or where that load exceeds the budget."""
        memory, shape, budget = self.memory, self.model.shape, self.memory.budget_bytes
        assert shape is not None and budget is not None
        overhead = used - (plan.device_bytes - OVERHEAD_BYTES) + SPARE_BYTES
        again = offload(plan.offloader, budget, shape, memory.batch, memory.max_sequence, overhead)
        better = again.offloaded_bytes < plan.offloaded_bytes
        return again if better or (used > budget and again.offloaded_bytes > plan.offloaded_bytes) else None

    def _start(self, python: str, plan: Offload, model: ModelSpec, budget: int | None) -> int:
        """Returns the bytes that its process holds on the device; 0 on a CPU."""
        self.close()
        folder, loading = self._source(model)
        on_gpu = self.memory.device == "cuda"
        card = device_bytes() if on_gpu else None
        shape = model.shape
        assert shape is not None
        self.placed = plan
        self.process = IsolatedProcess(ENVIRONMENT, python, VARIABLES)
        ready = self.process.load({
            "model": str(folder),
            "load_format": loading,
            "batch": self.memory.batch,
            "max_sequence": self.memory.max_sequence,
            "kv_bytes": kv_bytes(shape, self.memory.batch, self.memory.max_sequence),
            "device": self.memory.device,
            "dtype": self.dtype,
            "utilisation": plan.device_bytes / card.total if card else 0.1,
            "compile": self.compile,
            "offload": plan.options,
            "offloads": plan.offloaded_bytes > 0,
        })  # fmt: skip
        self.facts = ready
        used: int | None = 0
        if card is not None:
            used = process_bytes(self.process.pid)
            used = ready["reserved_bytes"] if used is None else used  # torch's part, where NVML knows no processes
            print(f"vLLM {plan}: {ready}, {used} bytes on the device")
            check_offloaded(budget, used, ready)
        return used or 0

    def _source(self, model: ModelSpec) -> tuple[Path, str]:
        """(folder, load_format); for weights in no folder one with config.json alone."""
        if model.path:
            return Path(model.path), self.load_format
        from harness import synthetic

        self._folder = tempfile.TemporaryDirectory(prefix="vllm-")
        folder = Path(self._folder.name)
        (folder / "config.json").write_text(json.dumps(dict(synthetic.spec_for(model.name).config)))
        return folder, "dummy"

    def generate(self, requests: Sequence[Request]) -> list[RequestRecord]:
        """One native batch. peak_device_bytes: of its process as NVML tells it afterwards (its allocator gives nothing
        back); the harness's own meter takes precedence."""
        assert self.process is not None, "load comes first"
        kind = self.variant if self.variant == "resident" or self.offloader == "best" else self.placed.offloader
        generated = self.process.generate(requests)
        peak = process_bytes(self.process.pid) if self.memory.device == "cuda" else None
        common = RequestRecord("", (), NAN, NAN, NAN, variant=kind, dtype=self.dtype, peak_device_bytes=peak)
        return records(generated, requests, common)

    def take_over(self, former: object) -> None:
        """Nothing of another load can be kept: it ends."""
        if isinstance(former, VllmSystem):
            former.close()

    def close(self) -> None:
        if self.process is not None:
            self.process.close()
        if self._folder is not None:
            self._folder.cleanup()
        self.process = self._folder = None


def check_offloaded(budget_bytes: int | None, used_bytes: int, ready: Mapping[str, Any]) -> None:
    """UserError when the device holds so much more than the budget that offloading cannot have happened."""
    if budget_bytes is not None and used_bytes > budget_bytes + TOLERANCE_BYTES:
        raise UserError(
            f"vllm {ready['version']} holds {used_bytes / 1e9:.1f} GB on the device with a budget of "
            f"{budget_bytes / 1e9:.1f} GB: it did not offload (it says {ready['offloaded_bytes'] / 1e9:.1f} GB); use "
            "the version of baselines/vllm_offload/requirements.txt"
        )


def create(options: Mapping[str, Any]) -> VllmSystem:
    known = {k: v for k, v in options.items() if k not in ("depth", "named")}
    names = ("variant", "offloader", "compile", "load_format", "dtype", "python")
    if unknown := sorted(set(known) - set(names)):
        raise UserError(f"vllm has no option {unknown[0]!r}; known: {', '.join(names)}")
    return VllmSystem(**known)
