"""Cells spread over GPUs, or over Slurm jobs: none twice, none lost, one results folder."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest
from harness_fixture import raw_config, run
from records_fixture import row
from test_run import run as typed
from test_run import tiny_run

from harness import frame, launch, shards
from harness.config import run_config
from harness.records import RecordFile, read_rows
from harness.slurm import job_arguments
from specter_core.errors import UserError

pytestmark = pytest.mark.usefixtures("fakes_on_the_path")


def test_a_gpu_never_has_two_workers_and_all_are_used():
    lock, here, most, done = threading.Lock(), dict.fromkeys("ab", 0), dict.fromkeys("ab", 0), []

    def job(item: int, place: str | None) -> None:
        assert place is not None
        with lock:
            here[place] += 1
            most[place] = max(most[place], here[place])
        time.sleep(0.01)
        with lock:
            here[place] -= 1
            done.append(item)

    launch.run_all(range(12), ["a", "b"], job)
    assert sorted(done) == list(range(12)) and most == {"a": 1, "b": 1}


def test_one_place_keeps_the_order_and_a_failure_ends_what_has_not_begun():
    order: list[int] = []
    launch.run_all([3, 1, 2], [None], lambda item, place: order.append(item))
    assert order == [3, 1, 2]
    begun: list[int] = []

    def failing(item: int, place: str | None) -> None:
        begun.append(item)
        time.sleep(0.02)
        raise UserError(f"disk full at {item}")

    with pytest.raises(UserError, match="disk full"):
        launch.run_all(range(50), ["a", "b"], failing)
    assert len(begun) < 10


def test_an_interrupt_ends_the_workers_and_records_nothing_more(tmp_path, monkeypatch):
    """Both workers hang; without `stop` the run would wait for their timeouts and record these."""
    counter = tmp_path / "count"

    def interrupted(futures, return_when):
        deadline = time.monotonic() + 30
        while not (counter.exists() and counter.stat().st_size == 2) and time.monotonic() < deadline:
            time.sleep(0.05)
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "seats", lambda device, parallel: ["0", "1"])
    monkeypatch.setattr(launch, "wait", interrupted)
    options = {"behaviour": "hang", "at": "always", "counter": str(counter)}
    with pytest.raises(KeyboardInterrupt):
        run(raw_config(tmp_path / "out", {name: {"options": options} for name in ("specter", "mo_sm", "mo_sc")}))
    assert read_rows(tmp_path / "out/records.csv") == [] and counter.stat().st_size == 2


def test_seats_are_the_visible_gpus_and_one_on_a_cpu(monkeypatch):
    assert launch.seats("cpu", None) == launch.seats("cpu", 1) == [None]
    with pytest.raises(UserError, match=r"launcher\.parallel=2 on cpu"):
        launch.seats("cpu", 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 5")
    assert launch.seats("cuda", None) == ["2", "5"] and launch.seats("cuda", 1) == ["2"]
    with pytest.raises(UserError, match=r"launcher\.parallel=3, but 2 GPUs are visible"):
        launch.seats("cuda", 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(launch, "gpus", lambda: [{}, {}, {}])
    assert launch.visible_gpus() == ["0", "1", "2"]


def test_workers_of_several_gpus_write_one_whole_file(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "seats", lambda device, parallel: ["6", "7"])
    systems = {name: {"options": {"gpus": str(tmp_path / "gpus")}} for name in ("specter", "mo_sm", "mo_sc")}
    assert run(raw_config(tmp_path / "out", systems))["rows"] == 12
    rows = frame.load(tmp_path / "out/records.csv")
    assert rows.groupby("system").size().to_dict() == {"specter": 4, "mo_sm": 4, "mo_sc": 4}
    assert set((tmp_path / "gpus").read_text().split()) == {"6", "7"}


def test_the_parts_of_a_run_are_its_blocks_once_each(tmp_path):
    blocks = list(range(7))
    parts = [shards.part(blocks, f"{i}/3") for i in (1, 2, 3)]
    assert sorted(b for p in parts for b in p) == blocks and shards.part(blocks, None) == blocks
    for bad in ("0/3", "4/3", "x", "1"):
        with pytest.raises(UserError, match="is no part; give i/n"):
            shards.part(blocks, bad)


def test_merging_adds_what_is_missing_once_and_leaves_nothing_to_count_twice(tmp_path):
    notice: list[str] = []
    whole = RecordFile(tmp_path / "records.csv", notice.append)
    whole.append([row(prompt_id="a", tpot_ms=1.0)])
    failed = {"status": "oom", "reason": "no room", "tpot_ms": None, "ttft_ms": None, "throughput": None}
    for name, rows in {
        "1-of-2": [row(prompt_id="a", tpot_ms=9.0), row(prompt_id="b")],
        "2-of-2": [row(prompt_id="c", **failed), row(prompt_id="b")],
    }.items():
        RecordFile(tmp_path / "shards" / name / "records.csv", notice.append).append(rows)
        (tmp_path / "shards" / name / "timings.csv").write_text(
            f"sweep,minutes,model,weights,link,device,git_commit,rows\nmain,{name[0]}.5,m,reference,scaled,cpu,x,2\n"
        )
        (tmp_path / "shards" / name / "environment.json").write_text('{"weights": {"m": "cafe"}, "device": "cpu"}')
        (tmp_path / "shards" / name / "reference_tokens.jsonl").write_text('{"same": 1}\n')
    torn = tmp_path / "shards/2-of-2/records.csv"
    torn.write_bytes(torn.read_bytes() + b"specter,def")
    assert shards.merge(tmp_path, notice.append) == 1 and "unfinished last line" in notice[0]
    found = {r["prompt_id"]: (r["status"], r["tpot_ms"]) for r in read_rows(tmp_path / "records.csv")}
    assert found == {"a": ("ok", "1"), "b": ("ok", "20"), "c": ("oom", "")}
    assert (tmp_path / "timings.csv").read_text().splitlines()[1] == "main,2.5,m,reference,scaled,cpu,x,4"
    assert json.loads((tmp_path / "environment.json").read_text())["weights"] == {"m": "cafe"}
    assert (tmp_path / "reference_tokens.jsonl").read_text() == '{"same": 1}\n'
    assert not [p for p in (tmp_path / "shards").rglob("*") if p.is_file()]
    assert shards.merge(tmp_path, notice.append) == 0


def test_a_job_is_the_same_command_with_a_part_and_a_folder_of_its_own(tmp_path):
    config = run_config(raw_config(tmp_path))
    typed_in = ["model=phimoe_mini", "launcher=slurm", "launcher.jobs=8", "fresh=true", "output=x", "+models.a={b: c}"]
    found = job_arguments(config, typed_in, tmp_path / "p", "2/4")
    assert found[:3] == ["model=phimoe_mini", "+models.a={b: c}", "launcher=local"]
    assert {"shard='2/4'", f"output={tmp_path / 'p'}", "depths=null"} <= set(found)
    assert not {"launcher=slurm", "launcher.jobs=8", "fresh=true", "output=x"} & set(found)


def fake_slurm(folder: Path) -> None:
    """sbatch that runs the script at once in the background; srun and sacct to go with it."""
    (folder / "jobs").mkdir(parents=True)
    here = 'd=$(dirname "$0")'
    scripts = {
        "sbatch": f"""{here}; id=$((1000 + $(ls "$d/jobs" | grep -c RUN\\\\\\|COM))); touch "$d/jobs/$id.RUNNING"
        ( export SLURM_JOB_ID=$id SLURM_NTASKS=1 SLURM_JOB_NUM_NODES=1 SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0
          bash "${{@: -1}}" > "$d/jobs/$id.log" 2>&1; mv "$d/jobs/$id.RUNNING" "$d/jobs/$id.COMPLETED"
        ) > /dev/null 2>&1 &
        echo "Submitted batch job $id" """,
        "srun": 'while [[ "$1" == --* ]]; do if [[ "$1" == --output ]]; then shift; fi\n'
        'if [[ "$1" == --error ]]; then shift; fi; shift; done; exec "$@"',
        "sacct": f"""{here}; echo "JobID|State|NodeList"
        for f in "$d"/jobs/*.{{RUNNING,COMPLETED}}; do n=$(basename "$f"); echo "${{n%.*}}|${{n##*.}}|here"; done""",
    }
    for name, text in scripts.items():
        path = folder / name
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize("cluster", [pytest.param("local", marks=pytest.mark.slow), "slurm"])
def test_slurm_jobs_measure_every_cell_once_into_one_folder(cluster, tmp_path):
    pytest.importorskip("submitit")
    fake_slurm(tmp_path / "bin")
    command = tiny_run(tmp_path, "launcher=slurm", f"launcher.cluster={cluster}", "launcher.jobs=2", "repeats=2")
    path = f"{tmp_path / 'bin'}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = typed(*command, PATH=path)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert (outcome["rows"], outcome["new_rows"], outcome["failed_rows"]) == (20, 20, 0), done.stderr
    assert "part 2 of 2: job" in done.stderr
    lines = (tmp_path / "records.csv").read_text().splitlines()
    assert len(lines) == 21 == len(set(lines)) and (tmp_path / "environment.json").exists()


def test_without_slurm_the_launcher_says_what_is_missing(tmp_path):
    pytest.importorskip("submitit")
    done = typed(*tiny_run(tmp_path, "launcher=slurm"))
    assert done.returncode == 2 and "submit from a Slurm node" in done.stderr.splitlines()[-1]
