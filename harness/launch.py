"""launcher=local: which workers run at the same time. One at a time on a CPU; one per visible GPU, never two on one."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

from harness.entries import Launcher
from harness.gpu_info import gpus
from specter_core.errors import UserError
from specter_core.memory.numa import NUMA_NODE, chosen_node
from specter_core.memory.pin_limit import PIN_LIMIT, PinLimit

T = TypeVar("T")


def set_host_memory(launcher: Launcher) -> None:
    """Tells this process and its workers, through their environment, how much host memory may be page-locked and on
    which NUMA node the store belongs. UserError for a node that is not there, before anything is loaded."""
    for name, value in ((PIN_LIMIT, launcher.pin_limit_gb), (NUMA_NODE, launcher.numa_node)):
        if value is not None:
            os.environ[name] = str(value)
    PinLimit.of_process()
    chosen_node()


def seats(device: str, parallel: int | None) -> list[str | None]:
    """One entry per worker that may run at the same time: its CUDA_VISIBLE_DEVICES, or None on a CPU. parallel: at most
    so many; None: all. UserError for more than there is room for."""
    if device != "cuda":
        if parallel is not None and parallel != 1:
            raise UserError(f"launcher.parallel={parallel} on {device}: workers would slow each other; leave it out")
        return [None]
    found = visible_gpus()
    if parallel is not None and not 1 <= parallel <= len(found):
        raise UserError(
            f"launcher.parallel={parallel}, but {len(found)} GPUs are visible, one worker each; give 1 to that"
        )
    return list(found[:parallel])


def visible_gpus() -> list[str]:
    """Identifiers as CUDA_VISIBLE_DEVICES takes them: those it names, else every index."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [part.strip() for part in named.split(",") if part.strip()]
    return [str(index) for index in range(len(gpus()))] or ["0"]


def run_all(
    items: Sequence[T],
    places: Sequence[str | None],
    job: Callable[[T, str | None], None],
    stop: Callable[[], None] = lambda: None,
) -> None:
    """job(item, place) for every item, in order, as many at a time as there are places and never two on one. The first
    exception ends it: what has not begun is left out, what runs is waited for. An interrupt calls stop, which ends what
    runs."""
    if len(places) == 1:
        for item in items:
            job(item, places[0])
        return
    free: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    for place in places:
        free.put(place)

    def one(item: T) -> None:
        place = free.get()
        try:
            job(item, place)
        finally:
            free.put(place)

    with ThreadPoolExecutor(len(places)) as pool:
        futures = [pool.submit(one, item) for item in items]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        except KeyboardInterrupt:
            stop()
            raise
        finally:
            for future in futures:
                future.cancel()
    for future in futures:
        if not future.cancelled():
            future.result()
