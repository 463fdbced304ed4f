"""Which layers, or which layers' experts, llama.cpp keeps on the device under a budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baselines.llama_cpp_offload.gguf_plan import GgufPlan
from specter_core.errors import UserError

OVERHEAD_BYTES = 900_000_000
"""CUDA context, cuBLAS workspace, compute buffers of a decoding step and of a short prompt."""
PLACEMENTS = ("experts", "layers")


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """What a decoder layer takes on the device. kv_bytes: its KV cache of all sequences."""

    experts: int
    others: int
    kv_bytes: int

    @property
    def total(self) -> int:
        return self.experts + self.others + self.kv_bytes


@dataclass(frozen=True, slots=True)
class Placement:
    """kind `layers`: the last gpu_layers decoder layers and the head are on the device. kind `experts`: every layer is,
    but the experts of the first cpu_experts layers are in host memory and computed there. device_bytes: planned."""

    kind: str
    gpu_layers: int
    cpu_experts: int
    device_bytes: int

    @property
    def n_gpu_layers(self) -> int:
        """llama.cpp counts the head as one more layer, behind the last."""
        return self.gpu_layers + 1


def layer_bytes(plan: GgufPlan, kv_bytes_per_token: int, tokens: int) -> tuple[list[LayerBytes], int]:
    """(every layer in order, bytes of what belongs to none and is on the device: the head and its norm). The embedding
    stays in host memory; tensors of padding are not counted."""
    experts = [0] * plan.layers
    others = [0] * plan.layers
    head = 0
    for name in plan.filled:
        tensor = plan.tensors[name]
        if name.startswith("blk."):
            target = experts if "_exps." in name else others
            target[int(name.split(".")[1])] += tensor.nbytes
        elif not name.startswith("token_embd") or "output.weight" not in plan.tensors:
            head += tensor.nbytes
    kv = kv_bytes_per_token * tokens // plan.layers
    return [LayerBytes(e, o, kv) for e, o in zip(experts, others, strict=True)], head


def place(
    kind: str, budget_bytes: int | None, layers: list[LayerBytes], head_bytes: int, overhead_bytes: int = OVERHEAD_BYTES
) -> Placement:
    """As much as fits; budget None: everything. UserError when not even the least of this kind fits."""
    fixed = head_bytes + overhead_bytes
    if kind == "layers":
        used, count = fixed, 0
        for layer in reversed(layers):
            if budget_bytes is not None and used + layer.total > budget_bytes:
                break
            used, count = used + layer.total, count + 1
        if budget_bytes is not None and used > budget_bytes:
            _refuse(budget_bytes, used, "the head")
        return Placement(kind, count, 0, used)
    used = fixed + sum(layer.total for layer in layers)
    cpu = 0
    while budget_bytes is not None and used > budget_bytes and cpu < len(layers):
        used -= layers[cpu].experts
        cpu += 1
    if budget_bytes is not None and used > budget_bytes:
        _refuse(budget_bytes, used, "every layer without its experts")
    while cpu and layers[cpu - 1].experts == 0:
        cpu -= 1
    return Placement(kind, len(layers), cpu, used)


def overrides(placement: Placement) -> list[str]:
    """Regular expressions of the tensors that stay in host memory, as llama.cpp's --n-cpu-moe makes them."""
    return [rf"blk\.{layer}\.ffn_(up|down|gate|gate_up)_(ch|)exps" for layer in range(placement.cpu_experts)]


def facts(placement: Placement) -> Mapping[str, object]:
    """What the engine is told."""
    return {"n_gpu_layers": placement.n_gpu_layers, "cpu_tensors": overrides(placement)}


def _refuse(budget_bytes: int, needed: int, what: str) -> None:
    raise UserError(
        f"budget {budget_bytes / 1e9:.4g} GB cannot hold {what}: {needed / 1e9:.4g} GB with llama.cpp's own memory; "
        "raise the budget"
    )
