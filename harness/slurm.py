"""launcher=slurm: the blocks of a run as Slurm jobs, through submitit. A job is `python run.py … shard=i/n`."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness import depth_file, shards
from harness.catalogue import ROOT
from harness.entries import Launcher, RunConfig
from harness.grid import RunPlan
from harness.records import RecordFile
from harness.runner import finish, output_folder, set_aside, write_systems
from specter_core.errors import UserError

POLL_S = 2.0
OWN = ("launcher", "output", "fresh", "command", "shard", "depths")


def run(config: RunConfig, plan: RunPlan, overrides: Sequence[str], notice: Callable[[str], None]) -> dict[str, Any]:
    """Submits what is not recorded, waits, merges the parts and finishes as a local run does. overrides: those of the
    command line; each job gets them, with an output folder and a part of its own. A job that fails is named; what it
    recorded counts. UserError where submitit or Slurm is missing."""
    executor = _executor(config.launcher, output_folder(config) / "jobs")
    out = output_folder(config)
    if config.fresh:
        set_aside(out / "records.csv")
        set_aside(out / "timings.csv")
    before = len(RecordFile(out / "records.csv", notice).done)
    shards.merge(out, notice)
    write_systems(out / "systems.csv", config.systems)
    done = RecordFile(out / "records.csv", notice).done
    count = min(config.launcher.jobs, len(plan.blocks))
    jobs = {}
    for number in range(1, count + 1):
        keys = {key for block in shards.part(plan.blocks, f"{number}/{count}") for p in block for key in p.keys}
        if not keys <= done:
            folder = out / shards.FOLDER / f"{number}-of-{count}"
            shards.seed(out, folder)
            arguments = job_arguments(config, overrides, folder, f"{number}/{count}")
            jobs[number] = executor.submit(measure, arguments)
            notice(f"part {number} of {count}: job {jobs[number].job_id}, {len(keys - done)} requests")
    try:
        _wait(jobs, count, notice)
    finally:
        shards.merge(out, notice)
    new = len(RecordFile(out / "records.csv", notice).done) - before
    return finish(config, plan, out, new=new)


def measure(arguments: list[str]) -> int:
    """What a job runs. Returns the exit code of run.py."""
    return subprocess.run([sys.executable, str(ROOT / "run.py"), *arguments], cwd=ROOT).returncode


def job_arguments(config: RunConfig, overrides: Sequence[str], folder: Path, shard: str) -> list[str]:
    kept = [o for o in overrides if o.lstrip("+~").partition("=")[0].partition(".")[0] not in OWN]
    chosen = depth_file.location(config)
    limits = config.launcher
    return [
        *kept,
        "launcher=local",
        f"launcher.load_timeout_s={limits.load_timeout_s}",
        f"launcher.generate_timeout_s={limits.generate_timeout_s}",
        f"launcher.restarts={limits.restarts}",
        f"launcher.pin_limit_gb={'null' if limits.pin_limit_gb is None else limits.pin_limit_gb}",
        f"launcher.numa_node={'null' if limits.numa_node is None else limits.numa_node}",
        f"output={folder}",
        f"shard='{shard}'",
        f"depths={'null' if chosen is None else chosen}",
        "figures=[]",
    ]


def _executor(launcher: Launcher, folder: Path) -> Any:
    try:
        submitit = importlib.import_module("submitit")
    except ModuleNotFoundError as error:
        raise UserError("launcher=slurm needs submitit; install it with: pip install -e '.[slurm]'") from error
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster=launcher.cluster)
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"launcher=slurm, cluster={launcher.cluster}: {reason}; submit from a Slurm node") from error
    executor.update_parameters(
        name="specter",
        timeout_min=launcher.timeout_min,
        cpus_per_task=launcher.cpus,
        mem_gb=launcher.mem_gb,
        gpus_per_node=launcher.gpus,
        **({"slurm_partition": launcher.partition} if launcher.partition else {}),
    )
    return executor


def _wait(jobs: dict[int, Any], count: int, notice: Callable[[str], None]) -> None:
    waiting = dict(jobs)
    while waiting:
        for number, job in list(waiting.items()):
            if job.done():
                error, code = job.exception(), None
                if error is None:
                    code = job.result()
                if error is not None or code != 0:
                    why = f"exit code {code}" if error is None else " ".join(str(error).split())[:300]
                    notice(f"part {number} of {count}: job {job.job_id} failed, {why}; log: {job.paths.stderr}")
                del waiting[number]
        if waiting:
            time.sleep(POLL_S)
