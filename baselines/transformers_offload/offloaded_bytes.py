"""What accelerate's hooks move to the device in one forward pass."""

from __future__ import annotations

from torch import nn


class OffloadedBytes:
    """Every module whose tensors accelerate keeps on the host is brought to the device whole, once per pass.

    pass_bytes: their parameters and buffers, each tensor once. Zero where nothing is offloaded.
    """

    def __init__(self, model: nn.Module) -> None:
        self.pass_bytes = self.offloaded_modules = 0
        counted: set[int] = set()
        for _, module in model.named_modules():
            hook = getattr(module, "_hf_hook", None)
            for one in getattr(hook, "hooks", (hook,)):
                if getattr(one, "offload", False):
                    places = one.place_submodules
                    own = {id(t): t for t in (*module.parameters(recurse=places), *module.buffers(recurse=places))}
                    self.pass_bytes += sum(t.numel() * t.element_size() for i, t in own.items() if i not in counted)
                    self.offloaded_modules += bool(own)
                    counted |= set(own)
