"""The two passes of a window as the engine sees them; each device has its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from specter_core.model.rows import Rows
from specter_core.state.kv_cache import KVCache
from specter_core.state.sampling import SpeculativeSampler
from specter_core.state.state_manager import StateManager
from specter_core.types import WindowStats
from specter_core.verify.layer_hook import LayerHook


class DraftExpertsPath(Protocol):
    """Routed experts of a draft step: `DraftExpertPath` or `BlockExpertPath`."""

    def forward(self, layer: int, normed: Tensor, ids: Tensor, weights: Tensor) -> Tensor: ...


class Draft(Protocol):
    """`DraftPass` or `GraphDraftPass`."""

    def start_batch(self, state: StateManager, kv: KVCache, sampler: SpeculativeSampler) -> None: ...
    def begin(self, depths: Sequence[int]) -> None: ...
    def step(self) -> None: ...
    def more(self) -> bool: ...
    def candidates(self) -> tuple[list[int], Tensor, Tensor | None]: ...
    def end(self) -> None: ...
    def prefill(self, prompt: Sequence[int], row: int, chunk_tokens: int) -> None: ...


class Target(Protocol):
    """`TargetPass` or `CudaTargetPass`."""

    hook: LayerHook | None

    def decode(self, tokens: Tensor, rows: Rows, kv: KVCache, stats: WindowStats) -> Tensor: ...
    def prefill(
        self, prompt: Sequence[int], row: int, kv: KVCache, chunk_tokens: int, stats: WindowStats
    ) -> Tensor: ...
