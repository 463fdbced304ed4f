"""How many layers' experts stay on the device under a budget."""

from __future__ import annotations

from dataclasses import dataclass

from specter_core.errors import UserError


@dataclass(frozen=True, slots=True)
class Placement:
    """The experts of the first `resident` MoE layers stay; the others share one buffer of a layer's size.
    Bytes."""

    resident: int
    layers: int
    layer_bytes: int
    fixed_bytes: int

    @property
    def offloaded(self) -> int:
        return self.layers - self.resident

    @property
    def total_bytes(self) -> int:
        return self.fixed_bytes + (self.resident + (self.offloaded > 0)) * self.layer_bytes


def place(budget_bytes: int | None, fixed_bytes: int, layer_bytes: int, layers: int) -> Placement:
    """fixed_bytes: all but the routed experts, KV included. budget None: everything stays. UserError when not
    even one layer's experts fit beside the fixed part: a layer is the unit of transfer."""
    if budget_bytes is None or budget_bytes >= fixed_bytes + layers * layer_bytes:
        return Placement(layers, layers, layer_bytes, fixed_bytes)
    room = (budget_bytes - fixed_bytes) // layer_bytes
    if room < 1:
        needed = fixed_bytes + layer_bytes
        raise UserError(
            f"budget {budget_bytes / 1e9:.4g} GB cannot hold one layer's experts: fixed {fixed_bytes / 1e9:.4g} + "
            f"layer {layer_bytes / 1e9:.4g} = {needed / 1e9:.4g} GB; raise the budget"
        )
    return Placement(room - 1, layers, layer_bytes, fixed_bytes)
