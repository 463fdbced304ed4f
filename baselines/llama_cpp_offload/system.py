"""llama.cpp under a device budget: the near side. README.md says what is measured and why so."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import torch

from baselines.llama_cpp_offload.gguf_plan import gguf_plan
from baselines.llama_cpp_offload.gguf_sources import description
from baselines.llama_cpp_offload.placement import OVERHEAD_BYTES, PLACEMENTS, Placement, facts, layer_bytes, place
from baselines.llama_cpp_offload.write_gguf import gguf_file
from harness.catalogue import ROOT
from harness.device_bytes import process_bytes
from harness.isolated import Environment, IsolatedProcess, interpreter
from harness.isolated_records import records
from harness.system import NAN, MemorySpec, ModelSpec, RequestRecord
from specter_core.errors import UserError
from specter_core.types import Request

ENVIRONMENT = Environment(
    "llama_cpp", "baselines.llama_cpp_offload.engine", "llama_cpp", make="baseline-llama", ours=True
)


class LlamaCppSystem:
    """options: placement experts | layers | best (each is loaded and timed once per load, the faster one stays);
    variant offload, or resident for everything on the device; dtype of the file's matrices (auto: BF16 on a GPU, F32 on
    a CPU, whose target computes in float32); folder for GGUF files; threads (auto: threads_for); op_offload: whether
    prompts of 32 tokens and more bring experts to the device, which reserves memory for them; python."""

    def __init__(
        self,
        variant: str = "offload",
        placement: str = "best",
        dtype: str = "auto",
        folder: str = ".work/gguf",
        threads: int | str = "auto",
        op_offload: bool = False,
        python: str | None = None,
    ) -> None:
        if placement not in (*PLACEMENTS, "best"):
            raise UserError(f"llama_cpp placement {placement!r} is unknown; known: {', '.join(PLACEMENTS)}, best")
        if variant not in ("offload", "resident"):
            raise UserError(f"llama_cpp variant {variant!r} is unknown; known: offload, resident")
        if dtype not in ("auto", "bfloat16", "float16", "float32"):
            raise UserError(f"llama_cpp dtype {dtype!r} is unknown; known: auto, bfloat16, float16, float32")
        self.variant, self.placement, self.dtype = variant, placement, dtype
        self.folder, self.threads, self.op_offload, self.python = folder, threads, op_offload, python
        self.process: IsolatedProcess | None = None
        self.facts: dict[str, Any] = {}

    def load(self, model: ModelSpec, memory: MemorySpec) -> None:
        """Writes the GGUF file unless it is there, places, loads. UserError: no environment, too small a budget, a
        model that llama.cpp does not read."""
        python = interpreter(ENVIRONMENT, self.python)
        self.model, self.memory = model, memory
        threads = threads_for(memory.device) if self.threads == "auto" else int(self.threads)
        auto = torch.float32 if memory.device == "cpu" else torch.bfloat16
        self.stored = auto if self.dtype == "auto" else getattr(torch, self.dtype)
        config, raw = description(model)
        counted = gguf_plan(config, raw, getattr(torch, model.dtype))
        path = gguf_file(model, ROOT / self.folder, self.stored, memory.device, threads)
        tokens = memory.batch * -(-memory.max_sequence // 64) * 64
        shape_kv = model.shape.kv_bytes_per_token if model.shape else 0
        layers, head = layer_bytes(counted, shape_kv, tokens)
        overhead = OVERHEAD_BYTES if memory.device == "cuda" else 0
        budget = None if self.variant == "resident" else memory.budget_bytes
        kinds = PLACEMENTS if self.placement == "best" and budget is not None else (self.placement,)
        kinds = ("experts",) if kinds == ("best",) else kinds
        common = {
            "path": str(path),
            "threads": threads,
            "batch": memory.batch,
            "max_sequence": memory.max_sequence,
            "device": memory.device,
            "kv_type": "f32" if memory.device == "cpu" else "f16",
            "flash": "off" if memory.device == "cpu" else "on",
            "op_offload": self.op_offload,
            "vocab_size": config.vocab_size,
            "eos_ids": list(config.eos_ids),
        }
        self._load_best(python, [place(kind, budget, layers, head, overhead) for kind in kinds], common)

    def _load_best(self, python: str, placements: list[Placement], common: Mapping[str, Any]) -> None:
        """Loads each placement in turn; where there are several, the one with the least time per token stays."""
        self.timed: dict[str, float] = {}
        if len(placements) > 1:
            if self.memory.device == "cpu":  # nothing is moved there, so nothing tells them apart
                placements = placements[:1]
            for placement in placements:
                self._start(python, placement, common)
                self.timed[placement.kind] = self.process.ms_per_token()
            placements = [min(placements, key=lambda p: self.timed[p.kind])]
            if placements[0] is self.placed:
                return
        self._start(python, placements[0], common)

    def _start(self, python: str, placement: Placement, common: Mapping[str, Any]) -> None:
        self.close()
        self.placed = placement
        self.process = IsolatedProcess(ENVIRONMENT, python)
        self.facts = self.process.load({**common, **facts(placement)})
        print(f"llama.cpp {placement}: {self.facts}")

    def generate(self, requests: Sequence[Request]) -> list[RequestRecord]:
        """One native batch. peak_device_bytes: of its process as NVML tells it afterwards (it frees nothing), which the
        harness's own meter replaces; on a CPU, where no device is, the planned bytes."""
        assert self.process is not None, "load comes first"
        kind = self.variant if self.variant == "resident" or self.placement == "best" else self.placed.kind
        on_cpu = self.memory.device == "cpu"
        generated = self.process.generate(requests)
        common = RequestRecord(
            "",
            (),
            NAN,
            NAN,
            NAN,
            variant=kind,
            dtype=str(self.stored).removeprefix("torch."),
            peak_device_bytes=self.placed.device_bytes if on_cpu else process_bytes(self.process.pid),
        )
        return records(generated, requests, common)

    def take_over(self, former: object) -> None:
        """Nothing of another load can be kept: it ends."""
        if isinstance(former, LlamaCppSystem):
            former.close()

    def close(self) -> None:
        if self.process is not None:
            self.process.close()
        self.process = None


def threads_for(device: str) -> int:
    """Physical cores; on a CPU what the harness gives every system there (its `threads`)."""
    given = os.environ.get("OMP_NUM_THREADS", "") if device == "cpu" else ""
    return int(given) if given.isdigit() else psutil.cpu_count(logical=False) or 1


def create(options: Mapping[str, Any]) -> LlamaCppSystem:
    known = {k: v for k, v in options.items() if k not in ("depth", "named")}
    names = ("variant", "placement", "dtype", "folder", "threads", "op_offload", "python")
    if unknown := sorted(set(known) - set(names)):
        raise UserError(f"llama_cpp has no option {unknown[0]!r}; known: {', '.join(names)}")
    return LlamaCppSystem(**known)
