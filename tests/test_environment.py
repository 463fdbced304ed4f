"""environment.json names the machine, with a GPU and without."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from harness import environment, gpu_info, link_probe
from harness.catalogue import ROOT


class FakeNvml(SimpleNamespace):
    """Two GPUs; the driver does not tell application clocks."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2

    def nvmlInit(self):
        if self.broken:
            raise self.NVMLError("no driver")

    def nvmlShutdown(self):
        self.closed = True

    def nvmlDeviceGetApplicationsClock(self, handle, domain):
        raise self.NVMLError("not supported")


def fake(broken: bool = False) -> FakeNvml:
    answers = {
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda i: i,
        "nvmlDeviceGetName": lambda h: b"H200",
        "nvmlDeviceGetUUID": lambda h: f"GPU-{h}",
        "nvmlDeviceGetMemoryInfo": lambda h: SimpleNamespace(total=150e9),
        "nvmlSystemGetDriverVersion": lambda: "570.1",
        "nvmlSystemGetCudaDriverVersion": lambda: 12080,
        "nvmlDeviceGetEnforcedPowerLimit": lambda h: 700_000,
        "nvmlDeviceGetClockInfo": lambda h, d: 345,
        "nvmlDeviceGetMaxClockInfo": lambda h, d: 1980 * d,
        "nvmlDeviceGetCurrPcieLinkGeneration": lambda h: 5,
        "nvmlDeviceGetCurrPcieLinkWidth": lambda h: 16,
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda h: 5,
        "nvmlDeviceGetMaxPcieLinkWidth": lambda h: 16,
        "nvmlDeviceGetPciInfo": lambda h: SimpleNamespace(busId=b"00000000:3B:00.0"),
    }
    return FakeNvml(broken=broken, closed=False, **answers)


def test_every_gpu_tells_driver_clocks_power_link_and_numa_node(monkeypatch, tmp_path):
    nvml = fake()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    node = tmp_path / "0000:3b:00.0"
    node.mkdir()
    (node / "numa_node").write_text("1\n")
    found = gpu_info.gpus()
    assert [g["uuid"] for g in found] == ["GPU-0", "GPU-1"] and nvml.closed
    assert (found[0]["name"], found[0]["cuda_driver"], found[0]["power_limit_w"]) == ("H200", "12.8", 700)
    assert found[0]["clocks_mhz"]["memory"] == {"now": 345, "highest": 3960, "applications": None}
    assert found[0]["pcie"]["generation"] == 5
    json.dumps(found)
    assert gpu_info.numa_node("00000000:3B:00.0", tmp_path) == 1
    (node / "numa_node").write_text("-1\n")
    assert gpu_info.numa_node("0000:3b:00.0", tmp_path) is None
    assert gpu_info.numa_node("00000000:FF:00.0", tmp_path) is None


def test_without_a_driver_there_is_no_gpu_and_no_link_rate(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake(broken=True))
    found = environment.capture("cpu", 1, {"m": "cafe"}, "abc")
    assert found["gpus"] is None and found["link_gb_per_s"] is None and found["weights"] == {"m": "cafe"}
    json.dumps(found)


def test_a_gpu_run_measures_its_link_in_another_process(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake())
    answer = SimpleNamespace(stdout='noise\n{"h2d_gb_per_s": 53.1}\n')
    monkeypatch.setattr(link_probe.subprocess, "run", lambda *a, **k: answer)
    assert environment.capture("cuda", 1, {}, "abc")["link_gb_per_s"] == 53.1
    answer.stdout = "Traceback\n"
    assert link_probe.measured_gb_per_s() is None


@pytest.mark.gpu
def test_the_link_is_measured_where_there_is_a_gpu():
    assert link_probe.measured_gb_per_s() > 1


def test_the_probe_says_null_where_it_finds_no_gpu():
    done = subprocess.run(
        [sys.executable, "-m", "harness.link_probe"],
        cwd=ROOT, capture_output=True, text=True, env={"CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert json.loads(done.stdout) == {"h2d_gb_per_s": None}


def test_numa_nodes_are_listed_with_their_cpus(tmp_path):
    for node, cpus in ((0, "0-15"), (1, "16-31"), (10, "32")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cpus}\n")
    assert environment.numa_nodes(tmp_path) == {"0": "0-15", "1": "16-31", "10": "32"}
    assert environment.numa_nodes(tmp_path / "none") == {}
