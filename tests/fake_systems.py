"""Systems that measure nothing: they answer with made-up tokens, or die in the way that an option names."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.system import MemorySpec, ModelSpec, RequestRecord
from specter_core.errors import UserError
from specter_core.types import Request


class FakeSystem:
    """options: `behaviour` on the request `at` (counted over all workers in the file `counter`), else an
    answer. `gpus` names a file for the GPUs that workers see."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.counter = Path(options["counter"]) if "counter" in options else None

    def load(self, model: ModelSpec, memory: MemorySpec) -> None:
        self.model, self.memory = model, memory
        if "gpus" in self.options:
            with Path(self.options["gpus"]).open("a") as file:
                file.write(os.environ["CUDA_VISIBLE_DEVICES"] + "\n")
        if self.options.get("at") == "load":
            misbehave(self.options["behaviour"])

    def generate(self, requests: Sequence[Request]) -> list[RequestRecord]:
        print("generating", len(requests))
        if not requests[0].request_id.startswith("warmup"):
            self._count()
        return [self._answer(r) for r in requests]

    def close(self) -> None:
        pass

    def _count(self) -> None:
        if self.counter is None:
            return
        with self.counter.open("a") as file:
            file.write("x")
        at = self.options.get("at")
        if at == "always" or at == self.counter.stat().st_size:
            misbehave(self.options["behaviour"])

    def _answer(self, request: Request) -> RequestRecord:
        tokens = tuple((sum(request.prompt) + i) % 50 for i in range(request.max_new_tokens))
        if self.options.get("wrong_tokens"):
            tokens = tuple(t + 1 for t in tokens)
        return RequestRecord(
            request.request_id,
            tokens,
            ttft_ms=5.0,
            tpot_ms=float(self.options.get("tpot_ms", 2.0)) + sum(request.prompt) % 7 / 10,
            throughput=100.0,
            depth=self.options["depth"],
            slots=3.0,
            acceptance=0.9,
            h2d_bytes=1000,
            stall_ms={"miss": 1.25, "late": 0.5},
            peak_device_bytes=10,
        )


def misbehave(behaviour: str) -> None:
    match behaviour:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            print("the last words")
            os._exit(3)
        case "hang":
            time.sleep(600)
        case "memory":
            raise MemoryError("cannot allocate 4 GB")
        case "torch_memory":
            raise type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory")
        case "refuse":
            raise UserError("budget 1.0 GB cannot hold one slot per layer; raise it to 2.0 GB")
        case "bug":
            raise KeyError("layer 3")
        case _:
            raise AssertionError(behaviour)


def create(options: Mapping[str, Any]) -> FakeSystem:
    return FakeSystem(options)
