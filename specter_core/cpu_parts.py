"""The engine's parts for `device=cpu`: an I/O thread for the link, torch for computation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specter_core.draft.draft_pass import DraftPass
from specter_core.draft.experts import DraftExpertPath
from specter_core.memory.expert_loader import ExpertLoader
from specter_core.memory.link_cpu import CpuLink
from specter_core.memory.slot_buffer import SlotBuffer
from specter_core.nested.nesting import nested_views
from specter_core.options import EngineOptions
from specter_core.prefetch.pattern_analyzer import PatternAnalyzer
from specter_core.trace import Trace
from specter_core.verify.executor_cpu import CpuLayerExecutor
from specter_core.verify.expert_ffn import expert_ffn
from specter_core.verify.expert_pass import ExpertPass
from specter_core.verify.target_pass import TargetPass

if TYPE_CHECKING:
    from specter_core.opening import LoadedModel


class CpuParts:
    """Makes the parts that differ between devices; `CudaParts` has the same methods."""

    def __init__(self, model: LoadedModel, options: EngineOptions, trace: Trace) -> None:
        self._model, self._options, self._trace = model, options, trace

    def link(self, slots: SlotBuffer, rate_bytes_per_s: float | None) -> CpuLink:
        return CpuLink(self._model.store, slots, rate_bytes_per_s, record_intervals=self._trace.enabled)

    def executor(self, slots: SlotBuffer, loader: ExpertLoader) -> CpuLayerExecutor:
        store, draft = self._model.store, self._model.draft
        views = None
        if store.layout.encoding == "nested":
            assert draft is not None
            views = nested_views(store.layout, draft)
        return CpuLayerExecutor(store.layout, slots, loader, expert_ffn, views=views)

    def target(self, experts: ExpertPass) -> TargetPass:
        return TargetPass(self._model.decoder, experts, trace=self._trace)

    def draft(self, analyzer: PatternAnalyzer) -> DraftPass:
        assert self._model.draft is not None
        path = DraftExpertPath(self._model.draft, fused=self._options.fused_kernel)
        options = self._options
        return DraftPass(self._model.decoder, path, analyzer, shared_kv=options.shared_kv, stop=options.draft_stop)
