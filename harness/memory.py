"""From a setting to what each of its systems may spend."""

from __future__ import annotations

from harness.cells import Group
from harness.footprint import slots_budget_bytes
from harness.system import MemorySpec, ModelSpec


def memory_spec(group: Group, model: ModelSpec, device: str) -> MemorySpec:
    """All budgeted systems of a setting get the same bytes: the model's named budget, or what Specter needs
    for the setting's slots per layer at the model's depth."""
    setting, entry = group.setting, group.setting.memory
    budget: int | None = None
    if group.system.budgeted and entry.budget is not None:
        budget = int(setting.model.budgets_bytes[entry.budget])
    elif group.system.budgeted and entry.budget_bytes is not None:
        budget = entry.budget_bytes
    elif group.system.budgeted and entry.slots_per_layer is not None and model.shape is not None:
        budget = slots_budget_bytes(
            model.shape, entry.slots_per_layer, setting.batch, setting.max_sequence, setting.model.depth
        )
    return MemorySpec(
        label=entry.label if group.system.budgeted else "resident",
        budget_bytes=budget,
        slots_per_layer=entry.slots_per_layer if group.system.budgeted else None,
        link=setting.link.name,
        link_rate_bytes_per_s=setting.link.rate_bytes_per_s,
        device=device,
        batch=setting.batch,
        max_sequence=setting.max_sequence,
    )
