"""Engines of isolated systems that load nothing: they count upwards, or fail in the way that the facts name."""

from __future__ import annotations

import os
import time
from typing import Any

from harness.isolated_child import Refusal, Step


class CountingEngine:
    """Tokens of a row: 100 * row + 0, 1, 2, …, one every `pause_s`. fail: (where, how)."""

    def load(self, facts: dict[str, Any]) -> dict[str, Any]:
        self.facts = facts
        self._fail("load")
        print("engine chatter on stdout")
        return {"pid": os.getpid(), "echo": facts, "version": "fake", "offloaded_bytes": 0, "reserved_bytes": 0}

    def generate(self, requests: list[dict[str, Any]], step: Step) -> dict[str, Any]:
        self._fail("generate")
        for position in range(max(r["max_new_tokens"] for r in requests) - self.facts.get("short", 0)):
            time.sleep(self.facts.get("pause_s", 0.0))
            step([
                100 * row + position if position < request["max_new_tokens"] else None
                for row, request in enumerate(requests)
            ])  # fmt: skip
        return {"prompts": [r["prompt"] for r in requests]}

    def logits(self, tokens: list[int]) -> list[float]:
        return [float(len(tokens))]

    def close(self) -> None:
        pass

    def _fail(self, where: str) -> None:
        at, how = self.facts.get("fail", ("", ""))
        if at != where:
            return
        match how:
            case "refuse":
                raise Refusal("budget 1.0 GB is too small; raise it")
            case "memory":
                raise MemoryError("CUDA out of memory")
            case "bug":
                raise KeyError("layer 3")
            case "missing":
                raise ModuleNotFoundError("No module named 'vllm'")
            case "die":
                os._exit(7)


def create() -> CountingEngine:
    if os.environ.get("FAKE_ENGINE_MISSING"):
        raise ModuleNotFoundError("No module named 'llama_cpp'")
    return CountingEngine()
