"""What the engine-backed systems share: load a model, build an engine in the given memory, generate, record."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from harness.engine_records import records
from harness.system import MemorySpec, ModelSpec, RequestRecord
from harness.systems import device_memory
from harness.systems.probe import RequestProbe
from harness.weights_in_memory import is_in_memory, open_in_memory, open_written
from specter_core.assembly import build_engine, fixed_parts
from specter_core.engine import SpecterEngine
from specter_core.opening import LoadedModel, open_model
from specter_core.options import EngineOptions
from specter_core.types import Request


class EngineSystem:
    """A `System` on Specter's engine. Options, `build` and a hook tell one from another.

    resident: every expert in a slot, whatever the memory setting says (the reference).
    """

    def __init__(self, options: EngineOptions, *, variant: str, resident: bool = False) -> None:
        self._options = options
        self._variant = variant
        self._resident = resident
        self._model: LoadedModel | None = None
        self._engine: SpecterEngine | None = None
        self._opened: Opened | None = None
        self.watched = False  # the harness sets it where it wants an efficiency report

    def load(self, model: ModelSpec, memory: MemorySpec) -> None:
        """UserError: no draft for depth > 0, a budget below one slot per layer, an unknown device."""
        gc.unfreeze()  # the engine before goes
        options = replace(self._options, context_tokens=memory.max_sequence, max_batch=memory.batch)
        wanted, start = Opened(model, memory.device, options.depth > 0, options.experts_encoding), time.monotonic()
        if self._model is None or self._opened != wanted:
            self._drop_model()
            if memory.device == "cuda":
                device_memory.tidy()
                device_memory.cap_allocator(None)
            self._model, self._opened = open_weights(wanted), wanted
        if memory.device == "cuda":
            device_memory.tidy()
            device_memory.cap_allocator(memory.budget_bytes)
            memory = self._within(memory, self._model, options)
        opened = time.monotonic()
        self._engine = self.build(self._model, options, memory)
        parts = ", ".join(f"{name} {size / 1e9:.3f}" for name, size in self._engine.slots.parts.items())
        print(f"weights {opened - start:.1f} s, engine {time.monotonic() - opened:.1f} s; GB: {parts}")
        if memory.device == "cuda":
            print(f"loaded: {device_memory.report()}")
        gc.collect()
        gc.freeze()  # what lives as long as the engine is not looked through between tokens

    def take_over(self, former: object) -> None:
        """Goes on with the weights that another system of this process has loaded; its engine ends."""
        if isinstance(former, EngineSystem):
            if former._engine is not None:
                former._engine.close()
            self._model, self._opened = former._model, former._opened
            former._engine = former._model = None
            gc.unfreeze()
            if self._opened is not None and self._opened.device == "cuda":
                device_memory.tidy()

    @staticmethod
    def _within(memory: MemorySpec, model: LoadedModel, options: EngineOptions) -> MemorySpec:
        """The setting less what loading left in torch's allocator beyond the weights themselves."""
        if memory.budget_bytes is None:
            return memory
        parts = fixed_parts(model, options)
        extra = device_memory.beyond(parts["shared"] + parts["draft"])
        print(f"opened: {device_memory.report()}; {extra / 1e9:.3f} GB beyond the weights")
        return replace(memory, budget_bytes=memory.budget_bytes - extra)

    def build(self, model: LoadedModel, options: EngineOptions, memory: MemorySpec) -> SpecterEngine:
        """Slots as the setting says: M where it is given in slots, else what the budget leaves. A draft with KV or
        weights of its own pays for them out of the same bytes."""
        if self._resident:
            return build_engine(model, options)
        shared = options.shared_kv and options.shared_weights
        slots = memory.slots_per_layer if shared or memory.budget_bytes is None else None
        return build_engine(
            model,
            options,
            slots_per_layer=slots,
            budget_bytes=memory.budget_bytes if slots is None else None,
            rate_bytes_per_s=memory.link_rate_bytes_per_s,
        )

    def generate(self, requests: Sequence[Request]) -> list[RequestRecord]:
        assert self._engine is not None, "load comes first"
        self._engine.reset_cache()
        if not self.watched:
            return records(self._engine.generate(requests), self._engine, variant=self._variant)
        probe = RequestProbe(self._engine)
        probe.watch()
        run = self._engine.generate(requests, on_commit=probe.on_commit)
        first, *rest = records(run, self._engine, variant=self._variant)
        return [replace(first, efficiency=probe.take(run)), *rest]

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._drop_model()

    def _drop_model(self) -> None:
        if self._model is not None:
            self._model.close()
        self._model = self._opened = None


class Opened(NamedTuple):
    """What a loaded model was opened as."""

    model: ModelSpec
    device: str
    with_draft: bool
    encoding: str


def open_weights(wanted: Opened) -> LoadedModel:
    """From the checkpoint's folder, or generated where the weights lie in no folder."""
    model = wanted.model
    if is_in_memory(model):
        return open_in_memory(model, wanted.device, need_draft=wanted.with_draft, encoding=wanted.encoding)
    needs_draft = wanted.with_draft or wanted.encoding == "nested"
    if model.weights == "synthetic" and model.draft_path is None and needs_draft:
        return open_written(model, wanted.device, encoding=wanted.encoding)
    return open_model(
        Path(model.path),
        None if model.draft_path is None else Path(model.draft_path),
        device=wanted.device,
        store=model.store,
        need_draft=wanted.with_draft,
        encoding=wanted.encoding,
    )
