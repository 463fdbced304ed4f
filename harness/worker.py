"""The worker's side: one process, one system, one model, one memory setting. `python -m harness.worker FD`
speaks pickled messages over the inherited socket FD; what the system prints goes to the worker's log."""

from __future__ import annotations

import contextlib
import cProfile
import ctypes
import importlib
import os
import pstats
import signal
import sys
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from specter_core.errors import UserError

PROFILE = "SPECTER_PROFILE"
"""Environment variable: set, workers print a profile of every batch to their logs."""


def serve(pipe: Connection) -> None:
    """Answers ("load", module, options, model, memory) with ("ready",), ("generate", requests) with
    ("records", list) and either with ("error", status, reason) when it raises. ("prepare", modules) imports them and
    has no answer. A second load takes over the weights of the system before (`take_over`). Returns on ("close",) or
    when the harness is gone."""
    system: Any = None
    while True:
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            match message:
                case ("prepare", modules):
                    for name in modules:
                        importlib.import_module(name)
                    continue
                case ("load", module, options, model, memory):
                    former, system = system, importlib.import_module(module).create(options)
                    if former is not None:
                        system.take_over(former)
                    if hasattr(system, "watched"):
                        system.watched = memory.device == "cuda"
                    system.load(model, memory)
                    answer: tuple[Any, ...] = ("ready",)
                case ("generate", requests):
                    with profiled(PROFILE in os.environ):
                        answer = ("records", list(system.generate(requests)))
                case _:
                    if system is not None:
                        system.close()
                    return
        except Exception as error:
            traceback.print_exc()
            answer = ("error", *diagnose(error))
        sys.stdout.flush()
        sys.stderr.flush()
        pipe.send(answer)


@contextlib.contextmanager
def profiled(wanted: bool) -> Iterator[None]:
    """Where the host's time goes, printed to the log; measured times are then those of a profiled program."""
    if not wanted:
        yield
        return
    profile = cProfile.Profile()
    with profile:
        yield
    pstats.Stats(profile).sort_stats("tottime").print_stats(28)


def diagnose(error: Exception) -> tuple[str, str]:
    """(status, reason in one line) of what a system raised."""
    text = " ".join(str(error).split())[:500]
    if isinstance(error, UserError):
        return "refused", text
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "can't allocate" in text:
        return "oom", text or type(error).__name__
    return "failed", f"{type(error).__name__}: {text}"


def die_with_parent() -> None:
    """Linux: the kernel ends this process when the harness ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


if __name__ == "__main__":
    die_with_parent()
    serve(Connection(int(sys.argv[1])))
