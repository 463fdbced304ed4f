"""The seam between the harness and everything that generates text: one protocol and the values that cross it.

This module and `harness.worker` need the standard library only (so do `specter_core.types` and `.errors`), so
that a system with an environment of its own (another Python, another torch) can serve it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from specter_core.types import Request

NAN = float("nan")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the byte counts need. shared_params: everything but the routed experts. kv_bytes_per_token is
    summed over the layers, in the stored dtype. max_positions: longest sequence in tokens; None: not known."""

    hidden: int
    decoder_layers: int
    moe_layers: int
    experts: int
    top_k: int
    expert_width: int
    vocab_size: int
    shared_params: int
    kv_bytes_per_token: int
    dtype: str = "bfloat16"
    max_positions: int | None = None

    @property
    def expert_params(self) -> int:
        return 3 * self.hidden * self.expert_width


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model as a worker loads it.

    path, draft_path: absolute folders (config.json and safetensors); draft_path None: no INT4 draft beside
    it. weights: official | synthetic | reference | dummy. store: picklable handle of the shared
    HostExpertStore that the harness filled, None where no system of the run asked for one.
    """

    name: str
    family: str
    path: str
    draft_path: str | None
    weights: str
    dtype: str
    weights_hash: str
    shape: ModelShape | None = None
    store: Any = None


@dataclass(frozen=True, slots=True)
class MemorySpec:
    """What a system may use, and the link it must use.

    budget_bytes: everything on the device (shared tensors, draft, KV, workspace, slots); None: unbudgeted,
    all experts resident. slots_per_layer: M, where the setting is given in slots; budget_bytes is then what
    Specter needs for M slots, and systems that are compared by memory get those bytes. link_rate_bytes_per_s
    None: native. batch and max_sequence (prompt + new tokens) say how much KV must fit beside the slots.
    """

    label: str
    budget_bytes: int | None
    slots_per_layer: int | None
    link: str
    link_rate_bytes_per_s: float | None
    device: str = "cpu"
    batch: int = 1
    max_sequence: int = 256


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What a system measured for one request. NaN (or None for counts) where a quantity does not exist for
    it.

    ttft_ms from prefill; tpot_ms = (t_last - t_first)/(n - 1); throughput in tokens/s of the whole batch.
    depth K and slots M (mean per layer) are those really used. distinct_experts: mean per layer and window (K = 0: per
    layer and step) of what the target needs for the whole batch. Ratios are in [0, 1]; h2d_bytes count decoding
    and prefill of this request (a batch's bytes are divided evenly); d2h_bytes are experts written back.
    stall_ms: compute waiting, by cause.
    peak_device_bytes: on a CPU the bytes that the system accounts for, on a GPU what it saw itself.
    efficiency: of a whole batch, in its first record (harness/efficiency.py); empty where nobody watched.
    """

    request_id: str
    tokens: tuple[int, ...]
    ttft_ms: float
    tpot_ms: float
    throughput: float
    variant: str = "default"
    dtype: str = "bfloat16"
    encoding: str = "plain"
    depth: int = 0
    slots: float = NAN
    acceptance: float = NAN
    tokens_per_window: float = NAN
    access_hit_rate: float = NAN
    coverage: float = NAN
    coverage_ceiling: float = NAN
    distinct_experts: float = NAN
    prefetch_precision: float = NAN
    prefetch_recall: float = NAN
    h2d_bytes: int | None = None
    h2d_bytes_used: int | None = None
    d2h_bytes: int | None = None
    link_utilisation: float = NAN
    stall_ms: Mapping[str, float] = field(default_factory=dict)
    peak_device_bytes: int | None = None
    energy_j: float = NAN
    efficiency: Mapping[str, Any] = field(default_factory=dict)


class System(Protocol):
    """One way to generate text. A module `system.py` offers `create(options: Mapping[str, Any]) -> System`;
    options are those of conf/system plus `depth` (K of this cell).

    Every call of `generate` starts with an empty expert cache, whatever ran before; its requests are one
    batch, and records come back in their order. A UserError becomes status `refused`, MemoryError and torch's
    out-of-memory errors become `oom`, anything else is our bug: `failed`.
    """

    def load(self, model: ModelSpec, memory: MemorySpec) -> None: ...

    def generate(self, requests: Sequence[Request]) -> list[RequestRecord]: ...

    def close(self) -> None: ...
