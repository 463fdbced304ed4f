"""The one host store of a model's full-precision experts that all workers of a run attach to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

from harness.environment import detect_device
from harness.system import ModelSpec
from harness.weights_in_memory import is_in_memory, store_in_memory

LOADING_THREADS = 4
Store = Callable[[ModelSpec, int | None], AbstractContextManager[ModelSpec]]


@contextmanager
def shared_store(model: ModelSpec, threads: int | None) -> Iterator[ModelSpec]:
    """The spec with the handle of a filled store; the segment is gone afterwards. UserError: no room, bad
    shard."""
    if is_in_memory(model):
        with store_in_memory(model, detect_device("auto")) as filled:
            yield filled
        return
    from specter_core.model.config import ModelConfig
    from specter_core.opening import fill_host_store

    path = Path(model.path)
    config = ModelConfig.from_file(path / "config.json")
    store = fill_host_store(path, config, threads=threads or LOADING_THREADS)
    try:
        yield replace(model, store=store.handle)
    finally:
        store.discard()
