"""GPTQ tensors in, canonical INT4 out; everything unsupported is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specter_core.draft import rtn
from specter_core.draft.gptq_reader import GptqFormat, gptq_tensors, read_matrix
from specter_core.draft.int4 import GROUP, Int4Matrix, dequantize
from specter_core.errors import UserError

OUTPUTS, INPUTS, NAME = 64, 256, "model.layers.1.mlp.experts.0.gate_proj"
FORMAT = {"bits": 4, "group_size": 128, "sym": True, "desc_act": False, "quant_method": "gptq"}
FORM = GptqFormat.from_dict(FORMAT, Path("quantize_config.json"))


class Tensors(dict[str, Tensor]):
    def tensor(self, name: str) -> Tensor:
        return self[name]


@pytest.fixture
def matrix() -> Int4Matrix:
    return rtn.quantize(torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(0)))


def _read(tensors: dict[str, Tensor], form: GptqFormat = FORM) -> Int4Matrix:
    return read_matrix(Tensors(tensors), NAME, OUTPUTS, INPUTS, form)


def _by_the_formula(tensors: dict[str, Tensor]) -> Tensor:
    """W[o, i] = (nibble - (zero + 1)) * scale, element by element from the file's words."""
    qweight, qzeros = tensors[f"{NAME}.qweight"].long(), tensors[f"{NAME}.qzeros"].long()
    scales, g_idx = tensors[f"{NAME}.scales"], tensors[f"{NAME}.g_idx"].long()
    weight = torch.empty(OUTPUTS, INPUTS, dtype=torch.float64)
    for i in range(INPUTS):
        nibble = (qweight[i // 8] >> (4 * (i % 8))) & 15
        group = g_idx[i]
        for o in range(OUTPUTS):
            zero = int((qzeros[group, o // 8] >> (4 * (o % 8))) & 15) + 1
            weight[o, i] = float(int(nibble[o]) - zero) * float(scales[group, o])
    return weight


def test_reader_inverts_writer(matrix: Int4Matrix) -> None:
    restored = _read(gptq_tensors(NAME, matrix))
    assert torch.equal(restored.codes, matrix.codes) and torch.equal(restored.scales, matrix.scales)


def test_read_weights_are_what_the_format_says(matrix: Int4Matrix) -> None:
    tensors = gptq_tensors(NAME, matrix)
    assert tensors[f"{NAME}.qweight"].shape == (INPUTS // 8, OUTPUTS)
    assert tensors[f"{NAME}.qzeros"].shape == (INPUTS // GROUP, OUTPUTS // 8)
    assert torch.equal(dequantize(_read(tensors)).double(), _by_the_formula(tensors))


def test_a_matrix_written_by_gptqmodel_reads_as_its_own_kernel_sees_it() -> None:
    tensors = load_file(Path(__file__).parent / "fixtures" / "gptqmodel_linear.safetensors")
    source = Tensors({f"{NAME}.{part}": tensor for part, tensor in tensors.items()})
    matrix = read_matrix(source, NAME, 128, 128, FORM)
    assert torch.equal(dequantize(matrix), tensors["dequantised"])
    assert all(torch.equal(tensor, source[name]) for name, tensor in gptq_tensors(NAME, matrix).items())


def test_format_v2_stores_the_zero_point_itself(matrix: Int4Matrix) -> None:
    tensors = gptq_tensors(NAME, matrix)
    tensors[f"{NAME}.qzeros"] += 0x11111111
    second = GptqFormat.from_dict({**FORMAT, "checkpoint_format": "gptq_v2"}, Path("x"))
    assert torch.equal(_read(tensors, second).codes, matrix.codes)
    with pytest.raises(UserError, match="0x88888888"):
        _read(tensors)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bits", 8),
        ("bits", 3),
        ("bits", None),
        ("group_size", 64),
        ("group_size", -1),
        ("desc_act", True),
        ("sym", False),
        ("quant_method", "awq"),
        ("checkpoint_format", "marlin"),
    ],
)
def test_other_formats_are_refused(field: str, value: Any) -> None:
    with pytest.raises(UserError) as caught:
        GptqFormat.from_dict({**FORMAT, field: value}, Path("quantize_config.json"))
    message = str(caught.value)
    assert field in message and repr(value) in message and "quantize_draft.py" in message
    assert "\n" not in message


def test_asymmetric_zeros_are_refused(matrix: Int4Matrix) -> None:
    tensors = gptq_tensors(NAME, matrix)
    tensors[f"{NAME}.qzeros"][1, 3] = 0x77777773
    with pytest.raises(UserError, match="0x77777773, symmetric is 0x77777777"):
        _read(tensors)


def test_permuted_groups_are_refused(matrix: Int4Matrix) -> None:
    tensors = gptq_tensors(NAME, matrix)
    tensors[f"{NAME}.g_idx"] = tensors[f"{NAME}.g_idx"].flip(0).contiguous()
    with pytest.raises(UserError, match="desc_act"):
        _read(tensors)


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales", "g_idx"])
def test_wrong_shapes_and_dtypes_are_refused(matrix: Int4Matrix, part: str) -> None:
    tensors = gptq_tensors(NAME, matrix)
    name = f"{NAME}.{part}"
    for wrong in (tensors[name][:-1], tensors[name].to(torch.float64)):
        with pytest.raises(UserError, match=part):
            _read({**tensors, name: wrong})


def test_scales_that_are_not_finite_are_refused(matrix: Int4Matrix) -> None:
    tensors = gptq_tensors(NAME, matrix)
    tensors[f"{NAME}.scales"][0, 5] = float("nan")
    with pytest.raises(UserError, match="not finite"):
        _read(tensors)


def test_format_is_read_from_either_config_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no quantize_config\.json"):
        GptqFormat.from_dir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_moe", "quantization_config": FORMAT}))
    assert GptqFormat.from_dir(tmp_path).zero_word == 0x77777777
    own = {**FORMAT, "meta": {"quantizer": ["gptqmodel:7.6.0"]}}
    (tmp_path / "quantize_config.json").write_text(json.dumps(own))
    assert GptqFormat.from_dir(tmp_path).producer == "gptqmodel:7.6.0"
    (tmp_path / "quantize_config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        GptqFormat.from_dir(tmp_path)
