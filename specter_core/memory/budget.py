"""From a byte budget to expert-cache slots: what is not fixed is slots, counted exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from specter_core.errors import UserError

CONTEXT_BYTES = 1_000_000_000
"""CUDA context, kernel modules, captured graphs. Measured with an allocator that leaves no holes: 0.84 to 0.86 GB."""
DEFAULT_STAGING_SLOTS = 4


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes on the device for everything, and the fixed parts of it (shared, draft, kv, workspace, graphs,
    context …).
    """

    total_bytes: int
    parts: Mapping[str, int]

    @property
    def fixed_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def free_bytes(self) -> int:
        """What is left for slots; negative when the fixed parts alone do not fit."""
        return self.total_bytes - self.fixed_bytes


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Slots of each layer, staging slots shared by all, and the bytes of every part, slots included."""

    slots_per_layer: tuple[int, ...]
    staging: int
    parts: dict[str, int] = field(default_factory=dict)

    @property
    def slots(self) -> int:
        return sum(self.slots_per_layer) + self.staging

    @property
    def mean_slots(self) -> float:
        """M: slots per layer, staging not counted."""
        return sum(self.slots_per_layer) / len(self.slots_per_layer)

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


def plan_slots(
    budget_bytes: int,
    parts: Mapping[str, int],
    entry_bytes: int,
    layers: int,
    experts: int,
    uniform: bool,
    staging: int = DEFAULT_STAGING_SLOTS,
) -> SlotPlan:
    """Spend what `parts` leave of `budget_bytes` on slots of `entry_bytes`, at most `experts` per layer.

    uniform: the same number in every layer and no staging (the paper's variant). Otherwise one pool: up to
    `staging` shared slots when more than one slot per layer fits, and the remainder of the division goes to
    the first layers. UserError when not even one slot per layer fits.
    """
    assert entry_bytes > 0 and layers > 0 and experts > 0 and staging >= 0, (
        entry_bytes,
        layers,
        experts,
        staging,
    )
    budget = MemoryBudget(budget_bytes, parts)
    pool = budget.free_bytes // entry_bytes
    if pool < layers:
        raise UserError(_too_small(budget, entry_bytes, layers))
    if uniform or pool >= layers * experts:
        return fixed_slots(min(pool // layers, experts), layers, experts, entry_bytes, parts)
    staging = min(staging, pool - layers)
    base, extra = divmod(pool - staging, layers)
    slots_per_layer = tuple(base + (layer < extra) for layer in range(layers))
    return _slot_plan(slots_per_layer, staging, entry_bytes, parts)


def fixed_slots(
    slots: int,
    layers: int,
    experts: int,
    entry_bytes: int,
    parts: Mapping[str, int],
    staging: int = 0,
) -> SlotPlan:
    """The plan for M = `slots` in every layer, whatever it costs. UserError for M < 1; never more than
    `experts`.
    """
    if slots < 1:
        raise UserError(f"slots per layer must be at least 1, got {slots}; pass 1 … {experts}")
    return _slot_plan((min(slots, experts),) * layers, staging, entry_bytes, parts)


def _slot_plan(slots_per_layer: tuple[int, ...], staging: int, entry_bytes: int, parts: Mapping[str, int]) -> SlotPlan:
    assert "slots" not in parts, "slots are what is being planned"
    slot_bytes = (sum(slots_per_layer) + staging) * entry_bytes
    return SlotPlan(slots_per_layer, staging, {**parts, "slots": slot_bytes})


def _too_small(budget: MemoryBudget, entry_bytes: int, layers: int) -> str:
    needed = budget.fixed_bytes + layers * entry_bytes
    listed = "".join(f"{name} {_gb(size)} + " for name, size in budget.parts.items() if size)
    return (
        f"budget {_gb(budget.total_bytes)} GB cannot hold one slot per layer: {listed}{layers} slots x "
        f"{entry_bytes / 1e6:.3g} MB = {_gb(needed)} GB; raise the budget to at least {needed / 1e9:.6f} GB"
    )


def _gb(size: int) -> str:
    """GB with as many digits as the size deserves."""
    return f"{size / 1e9:.1f}" if size >= 1_000_000_000 else f"{size / 1e9:.3g}"
