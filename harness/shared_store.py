"""The one host store of a model's full-precision experts that all workers of a run attach to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from harness.system import ModelSpec


@contextmanager
def shared_store(
    model: ModelSpec, threads: int | None, progress: Callable[[int, int], None] | None = None
) -> Iterator[ModelSpec]:
    """The spec with the handle of a filled store; the segment is gone afterwards. UserError: no room, bad
    shard."""
    from specter_core.memory.host_store import HostExpertStore
    from specter_core.memory.payload import PayloadLayout
    from specter_core.model.checkpoint import Checkpoint
    from specter_core.model.config import ModelConfig
    from specter_core.model.experts_loader import fill_store

    path = Path(model.path)
    config = ModelConfig.from_file(path / "config.json")
    layout = PayloadLayout(config.hidden, config.expert_width, config.dtype)
    store = HostExpertStore.create(len(config.moe_layers), config.num_experts, layout)
    try:
        fill_store(Checkpoint(path), config, store, threads=threads or 4, progress=progress)
        store.mark_ready()
        yield replace(model, store=store.handle)
    finally:
        store.close()
        store.unlink()
