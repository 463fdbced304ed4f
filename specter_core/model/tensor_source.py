"""Named tensors for building layers: alias, shape, dtype and device in one place."""

from __future__ import annotations

import torch
from torch import Tensor

from specter_core.errors import UserError
from specter_core.model.checkpoint import Checkpoint
from specter_core.model.config import ModelConfig
from specter_core.model.family import Family

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class TensorSource:
    """Hands out the non-expert tensors of a checkpoint, by official name, in the compute dtype on the
    device.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        family: Family,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._checkpoint = checkpoint
        self._family = family
        self._expected = family.expected_tensors(config)
        self.dtype = dtype
        self.device = device

    def get(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor, checked against config.json's shape. UserError: absent, wrong shape, not a float
        dtype.
        """
        actual = resolve(self._checkpoint, self._family, name)
        self._checkpoint.require({name: self._expected[name]}, {name: actual})
        if self._checkpoint.dtype(actual) not in FLOAT_DTYPES:
            raise UserError(
                f"{actual} has dtype {self._checkpoint.info(actual).dtype}, a target needs BF16, F16 or F32; "
                "give an unquantized checkpoint"
            )
        return self._checkpoint.tensor(actual).to(device=self.device, dtype=dtype or self.dtype)

    def get_optional(self, name: str, wanted: bool) -> Tensor | None:
        return self.get(name) if wanted else None

    def stack(self, *names: str) -> Tensor:
        """Several [out_i, in] (or [out_i]) tensors as one, for one product instead of several."""
        return torch.cat([self.get(name) for name in names])


def resolve(checkpoint: Checkpoint, family: Family, name: str) -> str:
    """The name under which the checkpoint holds an official name; UserError when it does not."""
    names = checkpoint.names
    for candidate in (name, *family.aliases(name)):
        if candidate in names:
            return candidate
    if any(other.endswith(".qweight") for other in names):
        raise UserError(
            f"{checkpoint.model_dir} has no {name} but holds quantized tensors (.qweight), a target needs"
            " the original weights; pass this folder as the draft"
        )
    checkpoint.info(name)  # raises
    raise AssertionError(name)
