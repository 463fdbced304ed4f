"""scripts/kick_tires.py touches everything there is, and says what fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness import catalogue
from harness.catalogue import ROOT
from harness.config import run_config, system_entry
from harness.sweep_defaults import with_defaults
from scripts import kick_tires


def sweeps(out: Path) -> dict[str, list[str]]:
    found = [s.arguments for s in kick_tires.steps(out) if s.arguments[:1] == ["run.py"]]
    return {a[1].removeprefix("sweep="): a[1:] for a in found if a[1].startswith("sweep=")}


def test_every_sweep_and_every_system_that_can_run_has_its_step(tmp_path):
    assert set(sweeps(tmp_path)) == set(catalogue.names("sweep"))
    entries = [system_entry(n, catalogue.load("system", n)) for n in catalogue.names("system")]
    entries = [s for s in entries if s.available and s.selectable and "cpu" in (s.devices or ("cpu",))]
    here = {s.name for s in entries if "cpu" not in s.links}
    assert here <= set(kick_tires.SYSTEMS.split(",")), "a system is missing; systems for native links are not"


@pytest.mark.parametrize("name", catalogue.names("sweep"))
def test_every_step_is_a_run_that_composes(name, tmp_path):
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    with initialize_config_dir(str(catalogue.CONF), version_base="1.3"):
        for arguments in (sweeps(tmp_path)[name], [f"sweep={name}"], [f"sweep={name}", "profile=paper"]):
            composed = compose("config", with_defaults(arguments))
            config = run_config(OmegaConf.to_container(composed, resolve=True))
            assert config.sweep == name and config.systems and config.models and config.memories


def test_a_step_that_fails_is_named_and_the_others_run(tmp_path):
    command = [sys.executable, "scripts/kick_tires.py", "--out", str(tmp_path), "--only", "list", "--only", "validate"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    outcome = json.loads(done.stdout)
    assert done.returncode == 1 and (outcome["steps"], outcome["failed"]) == (2, ["validate"])
    assert "holds no records.csv" in done.stderr and (tmp_path / "logs/list.log").stat().st_size > 0


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (["depth-sweep"], "run.py sweep=depth profile=reference"),
        (["prefix-sweep", "ARGS=prompts=1"], "run.py sweep=prefix profile=reference  prompts=1"),
        (["baselines", "MEMORY=high", "PROFILE=paper"], "run.py sweep=baselines profile=paper memory=high"),
        (["kick-tires"], "scripts/kick_tires.py"),
    ],
)
def test_make_targets_are_the_commands(target, said):
    done = subprocess.run(["make", "-n", *target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and said in done.stdout
