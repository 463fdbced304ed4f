"""GPTQ tensors (AutoGPTQ / GPTQModel files) to the canonical INT4 layout, and back.

A linear layer X [out, in] is stored as

    X.qweight  int32   [in/8, out]      word j, bits 4n … 4n+3: nibble of input 8j + n
    X.qzeros   int32   [in/128, out/8]  zero points, less one in format "gptq"; symmetric: every nibble is 7
    X.scales   float16 [in/128, out]
    X.g_idx    int32   [in]             group of each input: i // 128 unless the file was made with desc_act

and W[o, i] = (nibble - 8) * scale. Only symmetric 4-bit, group 128, desc_act false is read; anything else is
refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from specter_core.draft.int4 import GROUP, Int4Matrix
from specter_core.errors import UserError

# The word of a symmetric zero point by checkpoint format: "gptq" stores zero - 1, "gptq_v2" the zero itself.
_ZERO_WORDS = {"gptq": 0x77777777, "gptq_v2": -0x77777778}
_REMEDY = "make a draft with initialization/quantize_draft.py"


class TensorSource(Protocol):
    """What is read of a checkpoint: `specter_core.model.checkpoint.Checkpoint` is one."""

    def tensor(self, name: str) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class GptqFormat:
    """The supported part of a GPTQ folder's quantization config; constructing it from a file checks it."""

    zero_word: int
    producer: str

    @classmethod
    def from_dir(cls, draft_dir: Path) -> GptqFormat:
        """Reads quantize_config.json, or `quantization_config` of config.json. UserError if unsupported."""
        own, model = draft_dir / "quantize_config.json", draft_dir / "config.json"
        if own.is_file():
            return cls.from_dict(_read_json(own), own)
        if model.is_file():
            raw = _read_json(model).get("quantization_config")
            if isinstance(raw, dict):
                return cls.from_dict(raw, model)
        raise UserError(f"{draft_dir} has no quantize_config.json and no quantization_config: {_REMEDY}")

    @classmethod
    def from_dict(cls, raw: dict[str, Any], source: Path) -> GptqFormat:
        bits = raw.get("bits")
        if isinstance(bits, dict):
            bits = bits.get("bits")
        for field, found, wanted in (
            ("quant_method", raw.get("quant_method", raw.get("method", "gptq")), "gptq"),
            ("bits", bits, 4),
            ("group_size", raw.get("group_size"), GROUP),
            ("desc_act", raw.get("desc_act", False), False),
            ("sym", raw.get("sym", True), True),
        ):
            if found != wanted:
                raise UserError(f"{source}: {field} is {found!r}, the draft needs {wanted!r}: {_REMEDY}")
        form = raw.get("checkpoint_format", raw.get("format", "gptq"))
        if form not in _ZERO_WORDS:
            known = ", ".join(_ZERO_WORDS)
            raise UserError(f"{source}: checkpoint_format is {form!r}, known are {known}: {_REMEDY}")
        producer = raw.get("meta", {}).get("quantizer", "unknown")
        return cls(_ZERO_WORDS[form], ", ".join(producer) if isinstance(producer, list) else str(producer))


def read_matrix(source: TensorSource, name: str, outputs: int, inputs: int, form: GptqFormat) -> Int4Matrix:
    """Linear layer `name` [outputs, inputs] -> canonical form; checks shapes, zeros and group order."""
    groups = inputs // GROUP
    qweight = _checked(source, f"{name}.qweight", (inputs // 8, outputs), torch.int32)
    scales = _checked(source, f"{name}.scales", (groups, outputs), torch.float16)
    qzeros = _checked(source, f"{name}.qzeros", (groups, outputs // 8), torch.int32)
    g_idx = _checked(source, f"{name}.g_idx", (inputs,), torch.int32)
    if not bool((qzeros == form.zero_word).all()):
        word, symmetric = int(qzeros[qzeros != form.zero_word][0]) & 0xFFFFFFFF, form.zero_word & 0xFFFFFFFF
        raise UserError(f"{name}.qzeros holds {word:#010x}, symmetric is {symmetric:#010x}: {_REMEDY}")
    if not torch.equal(g_idx, torch.arange(inputs, dtype=torch.int32) // GROUP):
        raise UserError(f"{name}.g_idx is permuted (desc_act), the draft needs i // {GROUP}: {_REMEDY}")
    if not bool(scales.isfinite().all()):
        raise UserError(f"{name}.scales has values that are not finite, the draft needs finite ones: {_REMEDY}")
    # A little-endian word holds inputs 8j … 8j+7 in four bytes, low nibble first: the canonical order.
    codes = qweight.t().contiguous().view(torch.uint8)  # [out, in/2]
    return Int4Matrix(codes, scales.t().contiguous())


def gptq_tensors(name: str, matrix: Int4Matrix) -> dict[str, Tensor]:
    """The four tensors of format "gptq" for one canonical matrix; the inverse of `read_matrix`."""
    outputs, inputs = matrix.codes.shape[0], matrix.codes.shape[1] * 2
    words = matrix.codes.contiguous().view(torch.int32)  # [out, in/8]
    return {
        f"{name}.qweight": words.t().contiguous(),
        f"{name}.qzeros": torch.full((inputs // GROUP, outputs // 8), _ZERO_WORDS["gptq"], dtype=torch.int32),
        f"{name}.scales": matrix.scales.t().contiguous(),
        f"{name}.g_idx": torch.arange(inputs, dtype=torch.int32) // GROUP,
    }


def _checked(source: TensorSource, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    tensor = source.tensor(name)
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        found = f"{tensor.dtype} {list(tensor.shape)}"
        raise UserError(f"{name} is {found}, the model needs {dtype} {list(shape)}: {_REMEDY}")
    return tensor


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): fetch it again") from error
    if not isinstance(raw, dict):
        raise UserError(f"{path} holds {type(raw).__name__}, a JSON object is needed: fetch it again")
    return raw
