"""GPTQ (Frantar et al., 2022) of one matrix, computed by the GPTQModel library."""

from __future__ import annotations

import importlib
import os
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor, nn

from specter_core.draft.int4 import GROUP, Int4Matrix, pack
from specter_core.errors import UserError


class GptqModelQuantizer:
    """GPTQModel's `GPTQ` class: symmetric 4-bit, group 128, desc_act false, its other settings at their
    defaults.

    Its silent fallback to round-to-nearest is switched off: what cannot be calibrated raises.
    """

    def __init__(self) -> None:
        os.environ.setdefault("GPTQMODEL_CPU_WORKERS", str(max(2, os.cpu_count() or 2)))
        try:
            self.version = version("gptqmodel")
            config = importlib.import_module("gptqmodel.quantization.config").QuantizeConfig
            self._task = importlib.import_module("gptqmodel.quantization.gptq").GPTQ
        except (ImportError, PackageNotFoundError) as error:
            raise UserError(
                f"method gptq needs GPTQModel, which does not load here ({error}): "
                "pip install 'specter[gptq]', or choose --method rtn"
            ) from error
        self._config = config(bits=4, group_size=GROUP, sym=True, desc_act=False, fallback=None, offload_to_disk=False)
        self.settings = {
            "damp_percent": self._config.damp_percent,
            "act_group_aware": self._config.act_group_aware,
            "mse": self._config.mse,
        }

    def quantize(self, weight: Tensor, inputs: Tensor) -> Int4Matrix:
        """weight [out, in], inputs [n, in], n ≥ 1, float32 on one device -> Int4Matrix on the CPU."""
        assert inputs.shape[0] >= 1 and inputs.shape[1] == weight.shape[1], (inputs.shape, weight.shape)
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(weight.to(torch.float32), requires_grad=False)
        task = self._task(linear, qcfg=self._config)
        task.fallback = None
        task.quantizer.configure(perchannel=True)
        task.add_batch(inputs.unsqueeze(0), None)
        quantised, scales, zeros, groups, *_ = task.quantize()
        task.free()
        assert bool((zeros == 8).all()) and bool((groups.diff() >= 0).all()), "symmetric, not permuted"
        return to_codes(quantised.to(torch.float32).cpu(), scales.to(torch.float32).cpu())


def to_codes(quantised: Tensor, scales: Tensor) -> Int4Matrix:
    """Weights that are code * scale, float32 [out, in], and their scales [out, in/128] -> Int4Matrix."""
    grouped = quantised.view(quantised.shape[0], -1, GROUP)
    inverse = torch.where(scales > 0, 1 / scales, 0.0).unsqueeze(-1)
    exact = grouped * inverse
    codes = exact.round()
    assert float((exact - codes).abs().max()) < 1e-2, "not on the grid of its scales"
    assert float(codes.min()) >= -8 and float(codes.max()) <= 7, "not 4-bit"
    return Int4Matrix(pack(codes.to(torch.int8).flatten(1)), scales.to(torch.float16))
