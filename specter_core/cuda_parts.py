"""The engine's parts for `device=cuda`: native link, Triton kernels, captured graphs. Imports Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specter_core.device_runtime import CudaRuntime, DeviceRuntime
from specter_core.device_timeline import DeviceTimeline
from specter_core.draft.draft_graph import GraphDraftPass
from specter_core.draft.experts import DraftExpertPath
from specter_core.draft.kernels.block_path import BlockExpertPath
from specter_core.errors import UserError
from specter_core.memory.expert_loader import ExpertLoader
from specter_core.memory.link_cuda import CudaLink
from specter_core.memory.slot_buffer import SlotBuffer
from specter_core.model.fused_weights import FusedWeights
from specter_core.options import EngineOptions
from specter_core.passes import DraftExpertsPath
from specter_core.prefetch.pattern_analyzer import PatternAnalyzer
from specter_core.trace import Trace
from specter_core.verify.executor_cuda import CudaLayerExecutor
from specter_core.verify.expert_pass import ExpertPass
from specter_core.verify.kernels.nested_ffn import ResidentCodes
from specter_core.verify.target_pass_cuda import CudaTargetPass

if TYPE_CHECKING:
    from specter_core.opening import LoadedModel


class CudaParts:
    """See CpuParts. runtime: how to reach the device (tests run the kernels on another one)."""

    def __init__(
        self, model: LoadedModel, options: EngineOptions, trace: Trace, runtime: DeviceRuntime | None = None
    ) -> None:
        layout, decoder = model.store.layout, model.decoder
        if layout.dtype != decoder.dtype and layout.encoding == "plain":
            raise UserError(
                f"experts are {layout.dtype}, the other tensors {decoder.dtype}; device 'cuda' needs one dtype: convert"
                " the checkpoint or use device 'cpu'"
            )
        self._model, self._options, self._trace = model, options, trace
        model.runtime = runtime or model.runtime or CudaRuntime()
        self._runtime = model.runtime
        if trace.enabled:
            trace.device = DeviceTimeline(self._runtime)
        self._weights = FusedWeights.of(decoder)

    def link(self, slots: SlotBuffer, rate_bytes_per_s: float | None) -> CudaLink:
        self._link = CudaLink(
            self._model.store, slots, self._runtime, rate_bytes_per_s, record_intervals=self._trace.enabled
        )
        return self._link

    def executor(self, slots: SlotBuffer, loader: ExpertLoader) -> CudaLayerExecutor:
        experts = self._model.decoder.config.num_experts
        self._executor = CudaLayerExecutor(
            self._model.store.layout, slots, loader, self._link, self._runtime, experts, self._trace,
            self._resident_codes(),
        )  # fmt: skip
        return self._executor

    def _resident_codes(self) -> ResidentCodes | None:
        """The other half of nested experts: the draft's codes, also where nothing is drafted."""
        if self._model.store.layout.encoding == "plain":
            return None
        path = self._fused_experts()
        assert isinstance(path, BlockExpertPath), path
        return ResidentCodes(path.gate_up, path.down)

    def target(self, experts: ExpertPass) -> CudaTargetPass:
        return CudaTargetPass(
            self._model.decoder, self._weights, experts, self._executor, steps=self._options.depth + 1,
            graphs=self._options.graphs, trace=self._trace,
        )  # fmt: skip

    def draft(self, analyzer: PatternAnalyzer) -> GraphDraftPass:
        model, options = self._model, self._options
        experts: DraftExpertsPath
        if options.fused_kernel:
            experts = self._fused_experts()
        else:  # one launch per expert that was routed to: only the host knows which, so no graph
            assert model.draft is not None
            experts = DraftExpertPath(model.draft.to(model.decoder.device), fused=False)
        return GraphDraftPass(
            model.decoder, self._weights, experts, analyzer, self._runtime, depth=options.depth,
            shared_kv=options.shared_kv, stop=options.draft_stop, graphs=options.graphs and options.fused_kernel,
            trace=self._trace,
        )  # fmt: skip

    def _fused_experts(self) -> DraftExpertsPath:
        """The draft in its kernels' layout, once per loaded model."""
        model, config = self._model, self._model.decoder.config
        if model.fused_draft is None:
            assert model.draft is not None
            model.fused_draft = BlockExpertPath(model.draft, config.top_k, model.decoder.device, pdl=self._runtime.pdl)
        return model.fused_draft
