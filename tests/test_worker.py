"""A worker that dies, hangs, refuses or runs out of memory is told apart, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from harness.system import MemorySpec, ModelSpec
from harness.worker_process import WorkerFailure, WorkerProcess
from specter_core.types import Request

MODEL = ModelSpec("tiny", "deepseek_v2", "", None, "reference", "bfloat16", "cafe")
MEMORY = MemorySpec("tight", 1000, 3, "scaled", 1e8)
REQUEST = Request("p", (1, 2, 3), 4)


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    workers = []

    def started(timeout_s: float = 60.0, **options) -> WorkerProcess:
        worker = WorkerProcess(tmp_path / "w.log", threads=1)
        workers.append(worker)
        counter = {"counter": str(tmp_path / "count")} if options else {}
        worker.load("fake_systems", {"depth": 0, **counter, **options}, MODEL, MEMORY, timeout_s)
        return worker

    yield started
    for worker in workers:
        worker.kill()


def failure(worker: WorkerProcess, timeout_s: float = 60.0) -> WorkerFailure:
    with pytest.raises(WorkerFailure) as caught:
        worker.generate([REQUEST], timeout_s)
    return caught.value


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_worker_answers_with_records_in_the_order_of_the_requests(start):
    records = start().generate([REQUEST, Request("q", (5,), 2)], 60)
    assert [r.request_id for r in records] == ["p", "q"]
    assert len(records[0].tokens) == 4 and records[1].stall_ms == {"miss": 1.25, "late": 0.5}


def test_what_a_system_prints_goes_to_its_log_alone(start, tmp_path, capfd):
    start().generate([REQUEST], 60)
    assert "generating 1" in (tmp_path / "w.log").read_text()
    assert "generating" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("behaviour", "status", "reason"),
    [
        ("kill", "crashed", "SIGKILL"),
        ("exit", "crashed", "exited with code 3: the last words"),
        ("memory", "oom", "cannot allocate 4 GB"),
        ("torch_memory", "oom", "CUDA out of memory"),
        ("bug", "failed", "KeyError: 'layer 3'"),
        ("refuse", "refused", "raise it to 2.0 GB"),
    ],
)
def test_each_way_to_fail_has_its_status_and_reason(start, behaviour, status, reason):
    worker = start(behaviour=behaviour, at=1)
    found = failure(worker)
    assert found.status == status and reason in found.reason and "\n" not in found.reason
    assert found.alive is (status == "refused")
    assert gone(worker.pid) is (status != "refused")


def test_a_refused_request_leaves_the_worker_usable(start):
    worker = start(behaviour="refuse", at=1)
    assert failure(worker).alive
    assert len(worker.generate([REQUEST], 60)) == 1


def test_a_hanging_worker_is_ended_at_its_timeout(start):
    worker = start(behaviour="hang", at=1)
    found = failure(worker, timeout_s=0.5)
    assert found.status == "timeout" and "0.5 s" in found.reason
    assert gone(worker.pid)


def test_a_worker_killed_from_outside_is_noticed(start):
    worker = start(behaviour="hang", at=1)
    threading.Timer(0.5, os.kill, (worker.pid, signal.SIGKILL)).start()
    assert failure(worker).status == "crashed"


def test_a_failure_while_loading_is_a_failure_of_the_worker(start):
    with pytest.raises(WorkerFailure, match=r"refused: budget 1\.0 GB"):
        start(behaviour="refuse", at="load")


def test_an_unknown_module_is_one_line(tmp_path):
    worker = WorkerProcess(tmp_path / "w.log")
    with pytest.raises(WorkerFailure, match=r"failed: ModuleNotFoundError: No module named 'no_such'"):
        worker.load("no_such.system", {}, MODEL, MEMORY, 60)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_a_killed_harness_leaves_no_worker(tmp_path):
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from test_worker import MODEL, MEMORY, REQUEST, WorkerProcess\n"
        "w = WorkerProcess(Path(sys.argv[2]) / 'w.log')\n"
        "options = {'depth': 0, 'behaviour': 'hang', 'at': 1, 'counter': sys.argv[2] + '/count'}\n"
        "w.load('fake_systems', options, MODEL, MEMORY, 60)\n"
        "print(w.pid, flush=True)\n"
        "w.generate([REQUEST], 600)\n"
    )
    here = Path(__file__).parent
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(here), str(here.parent)]))
    command = [sys.executable, "-c", code, str(here), str(tmp_path)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 30
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gone(pid)
