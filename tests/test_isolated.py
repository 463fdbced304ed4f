"""An isolated system's process: tokens are stamped as they appear, failures keep their kind, nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from harness.isolated import Environment, IsolatedProcess, interpreter
from harness.isolated_records import records
from harness.system import NAN, RequestRecord
from specter_core.errors import UserError
from specter_core.types import Request

FAKE = Environment("fake", "fake_engines", "no_such_package", make="baseline-fake")
COMMON = RequestRecord("", (), NAN, NAN, NAN, variant="counting")


def request(name: str, new: int, prompt: tuple[int, ...] = (1, 2)) -> Request:
    return Request(name, prompt, new, ignore_eos=True)


@pytest.fixture
def start(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    started: list[IsolatedProcess] = []

    def one(**facts) -> IsolatedProcess:
        process = IsolatedProcess(FAKE, sys.executable)
        started.append(process)
        process.load(facts)
        return process

    yield one
    for process in started:
        process.close()


def test_every_row_gets_its_own_tokens_and_its_own_length(start):
    generated = start().generate([request("a", 3), request("b", 5)])
    found = records(generated, [request("a", 3), request("b", 5)], COMMON)
    assert [r.tokens for r in found] == [(0, 1, 2), (100, 101, 102, 103, 104)]
    assert [r.request_id for r in found] == ["a", "b"] and found[0].variant == "counting"


def test_a_token_is_stamped_when_it_appears_and_not_when_the_batch_ends(start):
    process = start(pause_s=0.03)
    before_ns = time.perf_counter_ns()
    generated = process.generate([request("a", 6)])
    gaps_ms = [(b - a) / 1e6 for a, b in zip(generated.times_ns, generated.times_ns[1:], strict=False)]
    assert before_ns <= generated.start_ns <= generated.times_ns[0]
    assert len(gaps_ms) == 5 and sum(gaps_ms) >= 5 * 30 * 0.9, "stamps of a finished batch would lie together"
    (record,) = records(generated, [request("a", 6)], COMMON)
    assert record.ttft_ms >= 27 and record.tpot_ms == pytest.approx(sum(gaps_ms) / 5)


def test_prompts_arrive_as_they_were_sent_and_the_engine_serves_again(start):
    process = start(marker=[1, "x"])
    assert process.generate([request("a", 1, (7, 8, 9))]).facts == {"prompts": [[7, 8, 9]]}
    assert process.generate([request("a", 2)]).steps == [[0], [1]]
    assert process.logits([1, 2, 3]) == [3.0]


def test_a_row_that_ends_early_is_an_error_and_no_shorter_record(start):
    generated = start(short=1).generate([request("a", 4)])
    with pytest.raises(RuntimeError, match="3 tokens came back, 4 were asked for"):
        records(generated, [request("a", 4)], COMMON)


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("refuse", UserError, r"budget 1\.0 GB"),
        ("memory", MemoryError, "out of memory"),
        ("bug", RuntimeError, "fake: KeyError: 'layer 3'"),
        ("missing", UserError, r"vllm.*make baseline-fake.*baseline\.fake\.python=PATH"),
        ("die", RuntimeError, "ended with code 7"),
    ],
)
@pytest.mark.parametrize("where", ["load", "generate"])
def test_a_failure_keeps_its_kind(start, where, how, error, text):
    with pytest.raises(error, match=text):
        start(fail=[where, how]).generate([request("a", 1)])


def test_a_package_that_is_missing_at_the_start_names_the_command(start, monkeypatch):
    monkeypatch.setenv("FAKE_ENGINE_MISSING", "1")
    with pytest.raises(UserError, match=r"No module named .llama_cpp.; make it with: make baseline-fake"):
        start()


def test_the_process_is_gone_after_close_and_after_its_owner(start):
    process = start()
    pid = process.pid
    process.close()
    assert not psutil.pid_exists(pid)
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from test_isolated import FAKE, IsolatedProcess\n"
        "p = IsolatedProcess(FAKE, sys.executable); p.load({}); print(p.pid, flush=True); time.sleep(600)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(Path(__file__).parent)], stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).resolve().parents[1], env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )  # fmt: skip
    assert owner.stdout is not None
    lines = iter(owner.stdout.readline, "")
    pid = next(int(line) for line in lines if line.strip().isdigit())
    owner.kill()
    owner.wait()
    deadline = time.monotonic() + 20
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(pid)


def test_an_interpreter_is_the_given_one_or_names_what_makes_it(tmp_path):
    assert interpreter(FAKE, sys.executable) == sys.executable
    with pytest.raises(UserError, match=r"baseline\.fake\.python=/nowhere/python does not exist; make it with"):
        interpreter(FAKE, "/nowhere/python")
    with pytest.raises(UserError, match=r"fake has no environment here.*make baseline-fake"):
        interpreter(FAKE, None)
    ours = Environment("fake", "fake_engines", "json", make="baseline-fake", ours=True)
    assert interpreter(ours, None) == sys.executable


def test_an_interpreter_that_does_not_start_is_refused(tmp_path):
    broken = tmp_path / "python"
    broken.write_text("no program")
    with pytest.raises(UserError, match="does not start"):
        IsolatedProcess(FAKE, str(broken))


def _alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
