"""A GGUF file holds every weight of a checkpoint in its place, and llama.cpp computes the target's logits from it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from baselines.llama_cpp_offload.gguf_file import write_gguf
from baselines.llama_cpp_offload.gguf_plan import gguf_name, gguf_plan
from baselines.llama_cpp_offload.gguf_sources import from_folder
from baselines.llama_cpp_offload.system import ENVIRONMENT, create
from harness.catalogue import ROOT
from harness.isolated import interpreter
from harness.system import MemorySpec, ModelSpec
from harness.weights import read_shape
from specter_core.errors import UserError
from specter_core.types import Request

gguf = pytest.importorskip("gguf")
MODELS = ("deepseek_v2_mini", "qwen2_moe_mini", "phimoe_mini")
PROMPT = tuple(range(40, 56))


def folder(name: str) -> Path:
    return ROOT / "reference" / name


def as_float(tensor) -> torch.Tensor:
    """A GGUF tensor in torch's order, float32."""
    shape = tuple(int(n) for n in reversed(tensor.shape))
    raw = torch.from_numpy(tensor.data.copy()).reshape(-1)
    kind = {"BF16": torch.bfloat16, "F32": torch.float32}[tensor.tensor_type.name]
    return raw.view(torch.uint8).view(kind).reshape(shape).float()


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_is_in_the_file_bit_for_bit(name, tmp_path):
    config, raw, tensors = from_folder(folder(name))
    source = dict(tensors)
    plan = gguf_plan(config, raw)
    size = write_gguf(tmp_path / "m.gguf", plan, source.items(), threads=2)
    assert size == (tmp_path / "m.gguf").stat().st_size
    found = {t.name: as_float(t) for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert set(found) == set(plan.tensors)
    padding = plan.layers - config.layers
    for hf, targets in plan.targets.items():
        for target in targets:
            here = found[target.tensor] if target.index is None else found[target.tensor][target.index]
            wanted = source[hf] if target.change is None else target.change(source[hf])
            assert torch.equal(here, wanted.float().reshape(here.shape)), (hf, target.tensor)
    assert all(not found[n].any() for n in set(plan.tensors) - set(plan.filled)), "padding is zero"
    assert padding == 0 or f"blk.{padding - 1}.attn_norm.weight" not in plan.filled


def test_a_stream_that_lacks_or_repeats_a_tensor_writes_no_file(tmp_path):
    config, raw, tensors = from_folder(folder("qwen2_moe_mini"))
    all_of = list(tensors)
    plan, path = gguf_plan(config, raw), tmp_path / "m.gguf"
    with pytest.raises(ValueError, match=r"1 tensors did not come, model\.norm\.weight among them"):
        write_gguf(path, plan, [(n, t) for n, t in all_of if n != "model.norm.weight"])
    with pytest.raises(ValueError, match="came twice"):
        write_gguf(path, plan, [*all_of, all_of[0]])
    with pytest.raises(ValueError, match="planned as"):
        write_gguf(path, plan, [(n, t[:-1] if n == "lm_head.weight" else t) for n, t in all_of])
    assert not path.exists()


def test_names_are_llama_cpps():
    assert gguf_name("model.layers.3.self_attn.o_proj.weight") == "blk.3.attn_output.weight"
    assert gguf_name("model.layers.3.mlp.shared_experts.up_proj.weight", 20) == "blk.23.ffn_up_shexp.weight"
    assert gguf_name("lm_head.bias") == "output.bias"


def llama_python() -> str | None:
    try:
        python = interpreter(ENVIRONMENT, os.environ.get("LLAMA_CPP_PYTHON"))
    except UserError:
        return None
    probe = subprocess.run([python, "-c", "import llama_cpp"], capture_output=True)
    return python if probe.returncode == 0 else None


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """name, dtype -> a loaded system; skipped without llama.cpp (make baseline-llama)."""
    python = llama_python()
    if python is None:
        pytest.skip("llama.cpp is not installed: make baseline-llama")
    made = []

    def load(name: str, dtype: str = "float32", batch: int = 1):
        system = create({"python": python, "dtype": dtype, "threads": 1, "folder": str(tmp_path_factory.getbasetemp())})
        family = name.removesuffix("_mini")
        shape = read_shape(folder(name))
        spec = ModelSpec(name, family, str(folder(name)), None, "reference", "bfloat16", "cafe", shape)
        system.load(spec, MemorySpec("tight", None, None, "native", None, "cpu", batch, 96))
        made.append(system)
        return system

    yield load
    for system in made:
        system.close()


def target(name: str):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder(name), dtype=torch.float32, local_files_only=True).eval()


@pytest.mark.parametrize("name", ["deepseek_v2_mini", "qwen2_moe_mini"])
def test_llama_cpp_computes_the_targets_logits_and_tokens(llama, name):
    model = target(name)
    with torch.inference_mode():
        wanted = model(torch.tensor([PROMPT])).logits[0, -1]
        tokens = model.generate(
            torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, len(PROMPT) :].tolist()  # fmt: skip
    system = llama(name)
    assert (torch.tensor(system.process.logits(PROMPT)) - wanted).abs().max() < 1e-3
    (record,) = system.generate([Request("a", PROMPT, 24, ignore_eos=True)])
    assert list(record.tokens) == tokens


def test_rows_of_a_batch_do_not_disturb_each_other(llama):
    system = llama("qwen2_moe_mini", batch=3)
    requests = [Request(str(n), tuple(range(40 + n, 50 + 3 * n)), 12, ignore_eos=True) for n in range(3)]
    together = [r.tokens for r in system.generate(requests)]
    assert together == [system.generate([r])[0].tokens for r in requests]


def test_a_conversion_with_two_matrices_swapped_is_found(llama, tmp_path, monkeypatch):
    """The check can fail: gate and up in each other's place give other logits."""
    from baselines.llama_cpp_offload import gguf_plan as module

    name = "qwen2_moe_mini"
    swapped = dict(module.PARTS) | {
        "mlp.shared_expert.gate_proj": "ffn_up_shexp", "mlp.shared_expert.up_proj": "ffn_gate_shexp",
    }  # fmt: skip
    config, raw, tensors = from_folder(folder(name))
    monkeypatch.setattr(module, "PARTS", swapped)
    path = tmp_path / f"{name}-swapped-float32.gguf"
    write_gguf(path, gguf_plan(config, raw, torch.float32), tensors)
    monkeypatch.undo()
    system = llama(name)
    right = torch.tensor(system.process.logits(PROMPT))
    other = create({"python": system.python, "dtype": "float32", "threads": 1, "folder": str(tmp_path)})
    shape = read_shape(folder(name))
    spec = ModelSpec(name, "qwen2_moe", str(folder(name)), None, "reference", "bfloat16", "swapped", shape)
    other.load(spec, MemorySpec("tight", None, None, "native", None, "cpu", 1, 96))
    try:
        assert (torch.tensor(other.process.logits(PROMPT)) - right).abs().max() > 0.1
    finally:
        other.close()
