"""The one host store of a model's full-precision experts that all workers of a run attach to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from harness.system import ModelSpec

LOADING_THREADS = 4


@contextmanager
def shared_store(model: ModelSpec, threads: int | None) -> Iterator[ModelSpec]:
    """The spec with the handle of a filled store; the segment is gone afterwards. UserError: no room, bad
    shard."""
    from specter_core.assembly import fill_host_store
    from specter_core.model.config import ModelConfig

    path = Path(model.path)
    config = ModelConfig.from_file(path / "config.json")
    store = fill_host_store(path, config, threads=threads or LOADING_THREADS)
    try:
        yield replace(model, store=store.handle)
    finally:
        store.close()
        store.unlink()
