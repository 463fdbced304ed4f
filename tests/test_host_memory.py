"""Page-locking within a limit, and host memory next to the GPU: one line of error, nothing silent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from harness import launch
from harness.entries import Launcher
from specter_core.device_runtime import CudaRuntime
from specter_core.errors import UserError
from specter_core.memory import numa
from specter_core.memory.host_registration import refusal
from specter_core.memory.host_store import HostExpertStore
from specter_core.memory.payload import PayloadLayout
from specter_core.memory.pin_limit import PIN_LIMIT, PinLimit
from specter_core.model.config import ModelConfig
from specter_core.opening import fill_host_store

MODEL = Path(__file__).resolve().parents[1] / "reference" / "qwen2_moe_mini"


def test_what_exceeds_the_limit_is_refused_before_the_driver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = CudaRuntime.__new__(CudaRuntime)  # no device here
    runtime.pin_limit, runtime._registered, runtime._locked_bytes = PinLimit(1_000), {}, 0
    asked: list[int] = []
    monkeypatch.setattr("specter_core.device_runtime.HostRegistration", lambda s: asked.append(s.numel()))
    first, second = torch.zeros(600, dtype=torch.uint8), torch.zeros(500, dtype=torch.uint8)
    runtime.register(first)
    runtime.register(first)
    with pytest.raises(UserError) as error:
        runtime.register(second)
    text = str(error.value)
    assert asked == [600] and "\n" not in text
    assert "5e-07 GB" in text and "6e-07 GB" in text and "--pin-limit-gb" in text and "1e-06" in text


def test_a_store_above_the_limit_is_not_even_filled() -> None:
    config = ModelConfig.from_file(MODEL / "config.json")
    with pytest.raises(UserError, match=r"allows 0\.001; raise it or choose a smaller model"):
        fill_host_store(MODEL, config, pin_limit=PinLimit(1_000_000))


def test_a_refusal_of_the_driver_says_how_much_and_that_there_is_no_fallback() -> None:
    text = refusal(28_900_000_000, 2)
    assert "28.9 GB" in text and "CUDA error 2" in text and "no pageable fallback" in text and "\n" not in text


def test_the_process_is_told_its_limit_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PIN_LIMIT, raising=False)
    assert PinLimit.of_process().limit_bytes is None
    monkeypatch.setenv(PIN_LIMIT, "1.5")
    assert PinLimit.of_process().limit_bytes == 1_500_000_000
    monkeypatch.setenv(PIN_LIMIT, "much")
    with pytest.raises(UserError, match="'much'"):
        PinLimit.of_process()


def machine(folder: Path, online: str, gpus: dict[str, int]) -> Path:
    """A /sys with these nodes and GPUs (PCI address -> node), and a network card on node 0."""
    (folder / "devices/system/node").mkdir(parents=True)
    (folder / "devices/system/node/online").write_text(online + "\n")
    for address, (vendor, kind, node) in {
        "0000:01:00.0": ("0x15b3", "0x020000", 0), **{a: ("0x10de", "0x030200", n) for a, n in gpus.items()}
    }.items():  # fmt: skip
        device = folder / "bus/pci/devices" / address
        device.mkdir(parents=True)
        for name, value in (("vendor", vendor), ("class", kind), ("numa_node", str(node))):
            (device / name).write_text(value + "\n")
    return folder


def test_the_node_is_that_of_the_first_visible_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv(numa.NUMA_NODE, raising=False)
    two = machine(tmp_path / "two", "0-1", {"0000:9a:00.0": 1, "0000:1b:00.0": 0})
    assert numa.nodes(two) == [0, 1] and numa.gpu_nodes(two) == [0, 1]
    assert numa.chosen_node(None, two) == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert numa.chosen_node(None, two) == 1 and numa.chosen_node(0, two) == 0
    monkeypatch.setenv(numa.NUMA_NODE, "0")
    assert numa.chosen_node(None, two) == 0
    with pytest.raises(UserError, match=r"numa_node is 7, online are 0, 1"):
        numa.chosen_node(7, two)
    one = machine(tmp_path / "one", "0", {"0000:1b:00.0": -1})
    assert numa.chosen_node(None, one) is None and numa.chosen_node(0, one) is None
    assert numa.nodes(tmp_path / "none") == [0] and numa.gpu_nodes(tmp_path / "none") == []


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="no NUMA in this kernel")
def test_pages_come_from_the_preferred_node_and_the_preference_ends(tmp_path: Path) -> None:
    with numa.preferred(None) as on:
        assert not on
    with numa.preferred(0) as on:
        if not on:
            pytest.skip("memory policies are not allowed here")
    store = HostExpertStore.create(1, 2, PayloadLayout(64, 32, torch.float32), tmp_path, numa_node=0)
    store.close()
    store.unlink()


def test_the_harness_tells_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (PIN_LIMIT, numa.NUMA_NODE):
        monkeypatch.setenv(name, "")
    launch.set_host_memory(Launcher())
    assert os.environ[PIN_LIMIT] == ""
    launch.set_host_memory(Launcher(pin_limit_gb=2.5))
    assert PinLimit.of_process().limit_bytes == 2_500_000_000
    with pytest.raises(UserError, match=r"numa_node is 99"):
        launch.set_host_memory(Launcher(numa_node=99))
