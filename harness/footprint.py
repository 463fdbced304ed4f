"""Bytes by part, from shapes alone: what `plan` prints, and the budget that a setting given in slots amounts
to.

A system plans its own slots when it loads; these numbers choose what all systems of a setting may spend.
"""

from __future__ import annotations

from collections.abc import Mapping

from harness.system import ModelShape

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
GROUP_SIZE = 128
TRAILER_BYTES, ALIGNMENT_BYTES = 32, 256
WORKSPACE_SHARE = 50
NESTED_BITS = 8.7
"""Per weight in a slot, about: 8.6 to 8.7 for Gaussian weights; the encoder's report has the model's own."""


def entry_bytes(shape: ModelShape, encoding: str = "plain") -> int:
    """One expert in a slot: weights and trailer, rounded up to 256. encoding: plain | nested (about)."""
    bits = NESTED_BITS if encoding == "nested" else 8 * DTYPE_BYTES[shape.dtype]
    raw = int(shape.expert_params * bits / 8) + TRAILER_BYTES
    return -(-raw // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def draft_bytes(shape: ModelShape) -> int:
    """All routed experts as INT4 with one FP16 scale per 128 inputs."""
    params = shape.moe_layers * shape.experts * shape.expert_params
    return params // 2 + params // GROUP_SIZE * 2


def parts(shape: ModelShape, batch: int, max_sequence: int, depth: int) -> dict[str, int]:
    """Device bytes of everything but the slots. depth 0: no draft is resident. workspace: what rounding small
    tensors up to whole blocks adds to the shared ones."""
    shared = shape.shared_params * DTYPE_BYTES[shape.dtype]
    return {
        "shared": shared,
        "draft": draft_bytes(shape) if depth else 0,
        "kv": shape.kv_bytes_per_token * batch * max_sequence,
        "workspace": shared // WORKSPACE_SHARE,
    }


def slots_budget_bytes(shape: ModelShape, slots: int, batch: int, max_sequence: int, depth: int) -> int:
    """What Specter needs for `slots` slots per layer at depth K: the budget of all systems of that
    setting."""
    fixed = sum(parts(shape, batch, max_sequence, depth).values())
    return fixed + slots * shape.moe_layers * entry_bytes(shape)


def slots_in(shape: ModelShape, budget_bytes: int, fixed: Mapping[str, int], encoding: str = "plain") -> float:
    """Mean slots per layer that a budget leaves beside the fixed parts, at most E; below 1 it is too small."""
    free = budget_bytes - sum(fixed.values())
    return min(float(shape.experts), max(0, free // entry_bytes(shape, encoding)) / shape.moe_layers)
