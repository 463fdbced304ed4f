"""The harness's side of a worker: starts it, speaks to it, and notices when it dies, hangs or runs out of
memory."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from harness.catalogue import ROOT
from harness.system import MemorySpec, ModelSpec, RequestRecord
from specter_core.types import Request


class WorkerFailure(Exception):
    """The worker gave no result. status: refused | oom | timeout | crashed | failed; reason: one line.

    alive: the worker answered and can take the next request (only after `refused`); otherwise it has been
    ended.
    """

    def __init__(self, status: str, reason: str, *, alive: bool = False) -> None:
        super().__init__(f"{status}: {reason}")
        self.status, self.reason, self.alive = status, reason, alive


class WorkerProcess:
    """A fresh process of its own session. Every method raises WorkerFailure instead of blocking past its
    timeout. The process and its children are gone after `close`, after any failure, and when the harness is
    killed. gpu: the only one that it sees."""

    def __init__(
        self, log: Path, *, threads: int | None = None, python: str | None = None, gpu: str | None = None
    ) -> None:
        ours, theirs = socket.socketpair()
        env = dict(os.environ, PYTHONUNBUFFERED="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
        if gpu is not None:
            env["CUDA_VISIBLE_DEVICES"] = gpu
            if python is None:  # blocks that were split while a draft was made would hold on to gigabytes
                env.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        if threads is not None:
            env["OMP_NUM_THREADS"] = env["MKL_NUM_THREADS"] = str(threads)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out, theirs:
            self._process = subprocess.Popen(
                [python or sys.executable, "-m", "harness.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=env,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._pipe = Connection(ours.detach())
        self._log = log
        self._ended = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._ended

    def prepare(self, modules: Sequence[str]) -> None:
        """Lets the worker import ahead of its load; returns at once."""
        with contextlib.suppress(OSError):
            self._pipe.send(("prepare", list(modules)))

    def load(
        self, module: str, options: Mapping[str, Any], model: ModelSpec, memory: MemorySpec, timeout_s: float
    ) -> None:
        self._ask(("load", module, dict(options), model, memory), "ready", timeout_s)

    def generate(self, requests: Sequence[Request], timeout_s: float) -> list[RequestRecord]:
        records: list[RequestRecord] = self._ask(("generate", list(requests)), "records", timeout_s)[0]
        if [r.request_id for r in records] != [r.request_id for r in requests]:
            self.kill()
            raise WorkerFailure("failed", f"asked for {len(requests)} requests, got records of other ones")
        return records

    def close(self) -> None:
        """Lets the system close; ends the process in any case."""
        if self._ended:
            return
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._pipe.send(("close",))
            self._process.wait(timeout=10)
        self.kill()

    def kill(self) -> None:
        """Ends the process and its children. Idempotent."""
        if self._ended:
            return
        self._ended = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._pipe.close()

    def _ask(self, message: tuple[Any, ...], expected: str, timeout_s: float) -> list[Any]:
        try:
            self._pipe.send(message)
            if not self._pipe.poll(timeout_s):
                self.kill()
                raise WorkerFailure("timeout", f"no answer to {message[0]} within {timeout_s:g} s; worker ended")
            kind, *rest = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise WorkerFailure("crashed", self._epitaph()) from error
        if kind == "error":
            status, reason = rest
            alive = status == "refused" and message[0] == "generate"
            if not alive:
                self.kill()
            raise WorkerFailure(status, reason, alive=alive)
        assert kind == expected, (kind, expected)
        return list(rest)

    def _epitaph(self) -> str:
        """How the process ended, with the last line that it printed."""
        self._reap()
        code = self._process.returncode
        if code < 0:
            name = signal.Signals(-code).name
            hint = " (killed from outside, or by the kernel for want of memory)" if -code == signal.SIGKILL else ""
            return f"worker ended by {name}{hint}"
        lines = self._log.read_text(errors="replace").split("\n") if self._log.exists() else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
        return f"worker exited with code {code}: {last[:300]}"

    def _reap(self) -> None:
        """Waits for a process whose pipe has closed, so that its own exit code is seen; then cleans up."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        self.kill()
