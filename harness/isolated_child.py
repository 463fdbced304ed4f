"""The far side of an isolated system: another interpreter, this module, one engine. Standard library only.

`python -m harness.isolated_child IN OUT MODULE` reads JSON lines from the file descriptor IN and writes to OUT; what
the engine prints goes where this process's output goes. MODULE offers `create() -> Engine`.

    in   {"do": "load", "facts": {…}}            out  {"ready": {…}}
    in   {"do": "generate", "requests": [{…}]}   out  {"step": [token or null per request]} … then {"done": {…}}
    in   {"do": "logits", "tokens": [ids]}       out  {"logits": [float per vocabulary entry]}
    in   {"do": "close"}                         the process ends
    any of them, when it fails                   out  {"error": [status, reason]}
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, Protocol

Step = Callable[[Sequence[int | None]], None]


class Refusal(Exception):
    """The engine cannot do what was asked, and says why in one line: status `refused`."""


class Engine(Protocol):
    """facts: what the system's near side sends. requests: dicts with prompt (ids), max_new_tokens, temperature, seed,
    ignore_eos. `step` is called as soon as a position is generated, with one token per request, None for those that
    are finished."""

    def load(self, facts: dict[str, Any]) -> dict[str, Any]: ...

    def generate(self, requests: list[dict[str, Any]], step: Step) -> dict[str, Any]: ...

    def logits(self, tokens: list[int]) -> list[float]: ...

    def close(self) -> None: ...


def serve(engine: Engine, lines: BinaryIO, out: BinaryIO) -> None:
    """Answers every line until `close` or until the near side is gone."""

    def say(message: dict[str, Any]) -> None:
        out.write(json.dumps(message).encode() + b"\n")
        out.flush()

    for line in lines:
        message = json.loads(line)
        try:
            match message["do"]:
                case "load":
                    say({"ready": engine.load(message["facts"])})
                case "generate":
                    say({"done": engine.generate(message["requests"], lambda tokens: say({"step": list(tokens)}))})
                case "logits":
                    say({"logits": engine.logits(message["tokens"])})
                case "close":
                    engine.close()
                    return
                case other:
                    raise ValueError(f"unknown message {other!r}")
        except BrokenPipeError:
            return
        except Exception as error:
            traceback.print_exc()
            sys.stderr.flush()
            say({"error": list(diagnose(error))})


def diagnose(error: Exception) -> tuple[str, str]:
    """(status, reason in one line) of what an engine raised."""
    text = " ".join(str(error).split())[:500]
    if isinstance(error, Refusal):
        return "refused", text
    if isinstance(error, ModuleNotFoundError):
        return "missing", text
    if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__ or "out of memory" in text.lower():
        return "oom", text or type(error).__name__
    return "failed", f"{type(error).__name__}: {text}"


def main(source: int, target: int, module: str) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with the near side, however that ends
    with os.fdopen(source, "rb") as lines, os.fdopen(target, "wb") as out:
        try:
            engine = importlib.import_module(module).create()
        except Exception as error:
            traceback.print_exc()
            out.write(json.dumps({"error": list(diagnose(error))}).encode() + b"\n")
            return
        serve(engine, lines, out)


if __name__ == "__main__":
    from harness.isolated_child import main as imported  # one Refusal, whether named here or by an engine

    imported(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
