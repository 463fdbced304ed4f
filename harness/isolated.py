"""The near side of a system whose packages clash with ours: an engine under another interpreter, spoken to in JSON
lines over two pipes (`harness.isolated_child`), its tokens stamped here, on this process's clock."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from harness.catalogue import ROOT
from specter_core.errors import UserError
from specter_core.types import Request

PROBE = Request("probe", (0,) * 16, 16, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Environment:
    """Where an isolated system lives. module: its engine; probe: the package without which the interpreter is none;
    make: the target that creates .venvs/<name>; ours: this interpreter may serve, where it has the package."""

    name: str
    module: str
    probe: str
    make: str
    ours: bool = False

    @property
    def missing(self) -> str:
        """What to do about an interpreter that is not there or lacks a package."""
        return f"make it with: make {self.make}, or name one with baseline.{self.name}.python=PATH"


class Generated(NamedTuple):
    """One batch. times_ns: perf_counter_ns at which each step's line was read; steps: a token (None: finished) per
    request and step."""

    start_ns: int
    times_ns: list[int]
    steps: list[list[int | None]]
    facts: dict[str, Any]


def interpreter(environment: Environment, given: str | None) -> str:
    """The Python of an isolated system: the one given, .venvs/<name>'s, or ours. UserError names the remedy."""
    if given:
        path = Path(given) if Path(given).is_absolute() else ROOT / given
        if not path.is_file():
            raise UserError(f"baseline.{environment.name}.python={given} does not exist; {environment.missing}")
        return str(path)
    own = ROOT / ".venvs" / environment.name / "bin" / "python"
    if own.is_file():
        return str(own)
    if environment.ours and importable(environment.probe):
        return sys.executable
    raise UserError(f"{environment.name} has no environment here ({own.relative_to(ROOT)}); {environment.missing}")


def missing_environment(name: str, make: str, given: object = None) -> str | None:
    """None where an isolated system's package is here: in .venvs/<name>, under the interpreter given, or beside us."""
    named = isinstance(given, str) and not given.startswith("$")
    if named or (ROOT / ".venvs" / name / "bin" / "python").is_file() or importable(name):
        return None
    return f"not installed; make it with: make {make}"


def importable(package: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(package) is not None


class IsolatedProcess:
    """An engine's process, ended with this one. Every method raises UserError for what the user can mend, MemoryError
    for want of memory and RuntimeError for the rest; the process is gone after the last two."""

    def __init__(self, environment: Environment, python: str, variables: Mapping[str, str] | None = None) -> None:
        self._environment = environment
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        env = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", **(variables or {})}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        try:
            self._process = subprocess.Popen(
                [python, "-m", "harness.isolated_child", str(theirs_in), str(theirs_out), environment.module],
                stdin=subprocess.DEVNULL,
                env=env,
                pass_fds=[theirs_in, theirs_out],
            )
        except OSError as error:
            raise UserError(f"{python} does not start ({error.strerror}); {environment.missing}") from error
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        self._lines = os.fdopen(ours_in, "rb")
        self._out = os.fdopen(ours_out, "wb")

    @property
    def pid(self) -> int:
        return self._process.pid

    def load(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        self._say({"do": "load", "facts": dict(facts)})
        ready: dict[str, Any] = self._hear()["ready"]
        return ready

    def generate(self, requests: Sequence[Request]) -> Generated:
        """One batch, rows in the order of the requests."""
        message = {
            "do": "generate",
            "requests": [
                {
                    "prompt": list(r.prompt),
                    "max_new_tokens": r.max_new_tokens,
                    "temperature": r.temperature,
                    "seed": r.seed,
                    "ignore_eos": r.ignore_eos,
                }
                for r in requests
            ],
        }
        times: list[int] = []
        steps: list[list[int | None]] = []
        start_ns = time.perf_counter_ns()
        self._say(message)
        while True:
            answer = self._hear()
            if "step" not in answer:
                return Generated(start_ns, times, steps, answer["done"])
            times.append(time.perf_counter_ns())
            steps.append(answer["step"])

    def ms_per_token(self) -> float:
        """Of 16 new tokens behind 16 zeros, the second time: what decides between placements."""
        self.generate([PROBE])
        times = self.generate([PROBE]).times_ns
        return (times[-1] - times[0]) / 1e6 / (len(times) - 1)

    def logits(self, tokens: Sequence[int]) -> list[float]:
        """Of the position after `tokens`, one per vocabulary entry (vLLM's: log-probabilities), for the comparison with
        the target."""
        self._say({"do": "logits", "tokens": list(tokens)})
        found: list[float] = self._hear()["logits"]
        return found

    def close(self) -> None:
        """Lets the engine close; the process is gone afterwards. Idempotent."""
        with contextlib.suppress(OSError, ValueError):
            self._out.write(b'{"do": "close"}\n')
            self._out.flush()
        with contextlib.suppress(OSError, ValueError):
            self._out.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._lines.close()

    def _say(self, message: Mapping[str, Any]) -> None:
        try:
            self._out.write(json.dumps(message).encode() + b"\n")
            self._out.flush()
        except BrokenPipeError:
            self._died()

    def _hear(self) -> dict[str, Any]:
        line = self._lines.readline()
        if not line.endswith(b"\n"):
            self._died()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            self._raise(*answer["error"])
        return answer

    def _raise(self, status: str, reason: str) -> None:
        if status == "refused":
            raise UserError(reason)
        if status == "missing":
            raise UserError(f"{self._environment.name}: {reason}; {self._environment.missing}")
        self._process.kill()
        if status == "oom":
            raise MemoryError(reason)
        raise RuntimeError(f"{self._environment.name}: {reason}")

    def _died(self) -> None:
        code = self._process.wait()
        raise RuntimeError(f"{self._environment.name}: its process ended with code {code}; its log says more")
