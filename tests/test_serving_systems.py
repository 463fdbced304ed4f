"""vLLM's and llama.cpp's near sides against an engine that only counts: what they tell it, and what they refuse."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from baselines.llama_cpp_offload import system as llama_cpp
from baselines.vllm_offload import system as vllm
from harness import catalogue
from harness.config import model_entry
from harness.device_bytes import DeviceBytes
from harness.isolated import IsolatedProcess
from harness.system import MemorySpec, ModelSpec
from harness.weights import read_shape
from specter_core.errors import UserError
from specter_core.types import Request

REQUESTS = [Request("a", (1, 2), 3, ignore_eos=True), Request("b", (3,), 3, ignore_eos=True)]


@pytest.fixture
def counting(monkeypatch):
    """Both systems with the counting engine in place of their own, on a card of 100 GB with a tenth in use."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    for module in (llama_cpp, vllm):
        monkeypatch.setattr(module, "ENVIRONMENT", replace(module.ENVIRONMENT, module="fake_engines"))
    monkeypatch.setattr(vllm, "device_bytes", lambda: DeviceBytes(10_000_000_000, 100_000_000_000))
    for module in (llama_cpp, vllm):
        monkeypatch.setattr(module, "process_bytes", lambda pid: 5_000_000_000)
    made = []

    def create(module, **options):
        made.append(module.create({"python": sys.executable, "depth": 0, **options}))
        return made[-1]

    yield create
    for system in made:
        system.close()


def mini(folder: Path = catalogue.ROOT / "reference/qwen2_moe_mini") -> ModelSpec:
    return ModelSpec(
        "qwen2_moe_mini", "qwen2_moe", str(folder), None, "reference", "bfloat16", "cafe", read_shape(folder)
    )


def full() -> ModelSpec:
    entry = model_entry("qwen15_moe", catalogue.load("model", "qwen15_moe"))
    return ModelSpec("qwen15_moe", "qwen2_moe", "", None, "synthetic", "bfloat16", "cafe", entry.shape)


def on_gpu(budget: int | None, batch: int = 2) -> MemorySpec:
    return MemorySpec("high", budget, None, "native", None, "cuda", batch, 40)


def told(system) -> dict:
    return system.facts["echo"]


def test_llama_cpp_keeps_the_placement_that_its_probe_found_faster(counting, tmp_path, monkeypatch):
    for times, kind in (([9.0, 4.0], "layers"), ([4.0, 9.0], "experts")):
        system = counting(llama_cpp, folder=str(tmp_path), threads=1)
        monkeypatch.setattr(IsolatedProcess, "ms_per_token", lambda process, left=list(times): left.pop(0))
        system.load(mini(), on_gpu(905_000_000))
        assert system.placed.kind == kind and system.timed == dict(zip(("experts", "layers"), times, strict=True))
        found = told(system)
        assert (found["n_gpu_layers"], bool(found["cpu_tensors"])) == (
            (system.placed.gpu_layers + 1, False) if kind == "layers" else (7, True)
        )
        assert found["kv_type"] == "f16" and found["flash"] == "on" and Path(found["path"]).stat().st_size > 1_000_000
        records = system.generate(REQUESTS)
        assert [r.tokens for r in records] == [(0, 1, 2), (100, 101, 102)]
        assert {(r.variant, r.dtype, r.peak_device_bytes) for r in records} == {("offload", "bfloat16", 5_000_000_000)}


def test_a_placement_that_was_asked_for_is_named_in_the_rows(counting, tmp_path):
    system = counting(llama_cpp, folder=str(tmp_path), threads=1, placement="layers")
    system.load(mini(), on_gpu(905_000_000))
    assert system.generate(REQUESTS)[0].variant == "layers"
    resident = counting(llama_cpp, folder=str(tmp_path), threads=1, variant="resident")
    resident.load(mini(), on_gpu(905_000_000))
    assert told(resident)["n_gpu_layers"] == 7 and told(resident)["cpu_tensors"] == []
    assert resident.generate(REQUESTS)[0].variant == "resident"


def test_a_second_load_ends_the_engine_of_the_first(counting, tmp_path):
    first = counting(llama_cpp, folder=str(tmp_path), threads=1, placement="experts")
    first.load(mini(), on_gpu(None))
    second = counting(llama_cpp, folder=str(tmp_path), threads=1, placement="experts")
    second.take_over(first)
    assert first.process is None


def test_vllm_is_told_the_budget_in_its_own_options(counting, monkeypatch):
    monkeypatch.setattr(vllm, "process_bytes", lambda pid: 19_900_000_000)
    system = counting(vllm, offloader="uva")
    system.load(full(), on_gpu(20_000_000_000))
    found = told(system)
    assert found["load_format"] == "dummy" and found["offloads"] is True
    assert found["offload"]["offload_backend"] == "uva" and found["offload"]["cpu_offload_params"] == ["experts"]
    assert found["utilisation"] == pytest.approx(0.2, abs=0.002) and found["kv_bytes"] == 196608 * 16 * (2 * 3 + 8)
    assert json.loads((Path(found["model"]) / "config.json").read_text())["num_experts"] == 60
    assert [r.variant for r in system.generate(REQUESTS)] == ["uva", "uva"]
    folder = Path(found["model"])
    system.close()
    assert not folder.exists()


def test_vllm_loads_again_when_the_first_load_shows_that_more_fits(counting, monkeypatch):
    def loads(beyond: int, budget: int) -> list[int]:
        """Offloaded bytes of each load, if it takes so many bytes beside weights and KV."""
        found = []
        start = vllm.VllmSystem._start

        def noted(self, python, plan, model, budget):
            found.append(plan.offloaded_bytes)
            used = plan.device_bytes - vllm.OVERHEAD_BYTES + beyond
            monkeypatch.setattr(vllm, "process_bytes", lambda pid: used)
            return start(self, python, plan, model, budget)

        monkeypatch.setattr(vllm.VllmSystem, "_start", noted)
        counting(vllm, offloader="uva").load(full(), on_gpu(budget))
        monkeypatch.setattr(vllm.VllmSystem, "_start", start)
        return found

    down = 2048 * 1408 * 60 * 2
    first, second = loads(1_100_000_000, 20_000_000_000)
    assert first - second in (down, 2 * down)
    assert loads(1_600_000_000, 20_000_000_000) == [first]
    assert loads(2_300_000_000, 20_000_000_000)[-1] > first


def test_vllm_refuses_to_report_when_the_bytes_show_that_nothing_was_offloaded(counting, monkeypatch):
    monkeypatch.setattr(vllm, "process_bytes", lambda pid: 29_900_000_000)
    with pytest.raises(UserError, match=r"holds 29\.9 GB on the device with a budget of 20\.0 GB: it did not offload"):
        counting(vllm, offloader="uva").load(full(), on_gpu(20_000_000_000))
    counting(vllm, variant="resident").load(full(), on_gpu(20_000_000_000))


def test_vllm_measures_on_a_gpu_only(counting):
    with pytest.raises(UserError, match="offloads on cuda only, not on cpu"):
        counting(vllm).load(full(), MemorySpec("high", 20_000_000_000, None, "native", None, "cpu", 1, 40))


@pytest.mark.parametrize("module", [llama_cpp, vllm])
def test_an_unknown_option_is_one_line_with_the_known_ones(module):
    with pytest.raises(UserError, match="has no option 'speed'; known: variant"):
        module.create({"speed": 1})
    with pytest.raises(UserError, match="'fast' is unknown; known: "):
        module.create({"variant": "fast"})
