"""weights=synthetic without a checkpoint folder: generated in memory from a seed (harness/synthetic)."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from harness.catalogue import ROOT
from harness.entries import ModelEntry
from harness.system import ModelSpec
from specter_core.errors import UserError

if TYPE_CHECKING:
    from specter_core.opening import LoadedModel

FILL_TIMEOUT_S = 600


def is_in_memory(model: ModelSpec) -> bool:
    """Whether its weights lie in no folder."""
    return model.weights == "synthetic" and not model.path


def in_memory_spec(entry: ModelEntry) -> ModelSpec:
    """The spec of a model that is generated where it is needed. UserError: no generator for it, no shape."""
    from harness.synthetic import spec_for

    if entry.shape is None:
        raise UserError(f"conf/model/{entry.name} has no shape, so weights=synthetic need a folder; add the shape")
    digest = spec_for(entry.name).hash
    return ModelSpec(entry.name, entry.family, "", None, "synthetic", entry.shape.dtype, digest, entry.shape)


def open_in_memory(
    model: ModelSpec, device: str, *, need_draft: bool, fused: bool = True, encoding: str = "plain"
) -> LoadedModel:
    """The decoder and, where needed, the RTN draft of the experts in the store, made on the device."""
    from harness.synthetic import open_synthetic, spec_for

    assert model.store is not None, "the harness fills the store before a worker starts"
    spec = spec_for(model.name)
    return open_synthetic(spec, device, model.store, need_draft=need_draft, fused=fused, encoding=encoding)


def open_written(model: ModelSpec, device: str, *, encoding: str = "plain") -> LoadedModel:
    """A synthetic checkpoint in a folder that has no draft: with the draft that it has in memory."""
    from harness.synthetic import open_written as opened

    return opened(Path(model.path), device, model.store, encoding=encoding)


@contextmanager
def store_in_memory(model: ModelSpec, device: str) -> Iterator[ModelSpec]:
    """The spec with the handle of a store that a process of its own has filled; the segment is gone afterwards."""
    from harness.synthetic import create_store, spec_for

    start = time.monotonic()
    command = [sys.executable, "-m", "harness.weights_in_memory", model.name, device]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as filling:  # type: ignore[call-overload]  # imports meanwhile
        try:
            store = create_store(spec_for(model.name))
        except BaseException:
            filling.kill()
            raise
        made = time.monotonic()
        try:
            _, said = filling.communicate(pickle.dumps(store.handle), timeout=FILL_TIMEOUT_S)
        except BaseException:
            filling.kill()
            store.discard()
            raise
    try:
        if filling.returncode:
            lines = said.decode(errors="replace").strip().splitlines()
            raise UserError(f"{model.name}: the host store could not be filled: {lines[-1] if lines else 'no reason'}")
        took = f"reserved in {made - start:.1f} s, filled in {time.monotonic() - made:.1f} s"
        print(f"{model.name}: {store.handle.bytes / 1e9:.1f} GB host store {took}", file=sys.stderr, flush=True)
        yield replace(model, store=store.handle)
    finally:
        store.discard()


def fill(name: str, device: str) -> None:
    """The filling process's part: the handle comes in on stdin."""
    from harness.synthetic import fill_store, spec_for
    from specter_core.memory.host_store import HostExpertStore

    if device == "cuda":
        import torch

        torch.zeros(1, device=device)  # the context, while the store is being reserved
    handle = pickle.load(sys.stdin.buffer)
    store = HostExpertStore(handle, os.open(handle.path, os.O_RDWR), owner=False)
    store.owner = True  # it may be marked ready here; the harness removes it
    fill_store(spec_for(name), store, device)


if __name__ == "__main__":
    fill(*sys.argv[1:3])
