"""install.sh checks every wheel before it installs one; doctor.py names what is missing and never fails."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from release_fixture import REPO, Inputs, call, make_inputs, put, refused, wheel

INSTALL = "initialization/install.sh"
DOCTOR = REPO / "scripts" / "doctor.py"
NO_INDEX = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}

pytestmark = pytest.mark.skipif(shutil.which("sha256sum") is None, reason="no sha256sum here")


@pytest.fixture
def inputs(tmp_path: Path) -> Inputs:
    made = make_inputs(tmp_path / "in put")
    write_sums(made.wheels)
    return made


def write_sums(folder: Path) -> None:
    names = sorted(p.name for p in folder.glob("*.whl"))
    done = subprocess.run(["sha256sum", *names], cwd=folder, capture_output=True, check=True)
    put(folder / "SHA256SUMS", done.stdout)


def install(inputs: Inputs, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return call(["bash", str(inputs.source / INSTALL), "--python", sys.executable, *arguments], **environment)


def test_supplied_wheels_are_installed_first_and_replace_their_pins(inputs: Inputs, tmp_path: Path) -> None:
    venv = tmp_path / "an environment"
    done = install(inputs, "--wheels", str(inputs.wheels), "--venv", str(venv), **NO_INDEX)
    assert done.returncode == 0, done.stderr
    assert "torch: the supplied wheel replaces the pin 2.13.0" in done.stderr
    listed = json.loads(call([str(venv / "bin/python"), "-m", "pip", "list", "--format", "json"]).stdout)
    found = {p["name"].lower().replace("_", "-"): p["version"] for p in listed}
    assert (found["torch"], found["gptq-stub"], found["specter"]) == ("9.9+test", "4.0.0.dev0", "0.1.0")
    assert (venv / ".installed").exists()


def test_without_supplied_wheels_everything_comes_from_the_index_at_its_pin(inputs: Inputs) -> None:
    done = install(inputs, "--dry-run")
    assert done.returncode == 0 and "no supplied wheels" in done.stderr
    commands = done.stdout.splitlines()
    assert next(line.split()[-1] for line in commands if "pip" in line) == "torch"
    assert not [line for line in commands if "--no-index" in line or ".whl" in line]
    assert not (inputs.source / ".venv").exists()


def test_the_workspace_s_wheels_are_taken_unasked(inputs: Inputs, tmp_path: Path) -> None:
    shutil.copytree(inputs.wheels, tmp_path / "specter-assets" / "wheels")
    done = install(inputs, "--dry-run", SPECTER_WORK=str(tmp_path))
    assert done.returncode == 0 and done.stderr.count(": OK") == 2
    first, second = [line for line in done.stdout.splitlines() if ".whl" in line]
    assert "--no-index --no-deps" in first and "--no-index" not in second


def test_a_wheel_that_is_changed_unlisted_or_missing_stops_everything(inputs: Inputs, tmp_path: Path) -> None:
    def run() -> str:
        line = refused(install(inputs, "--wheels", str(inputs.wheels), "--venv", str(tmp_path / "env")))
        assert not (tmp_path / "env").exists()
        return line

    extra = put(inputs.wheels / "extra-1-py3-none-any.whl", wheel("extra", "1"))
    assert "extra-1-py3-none-any.whl is not what" in run()
    extra.unlink()
    torch = inputs.wheels / "torch-9.9+test-py3-none-any.whl"
    body = torch.read_bytes()
    torch.write_bytes(body[:-1] + bytes([body[-1] ^ 1]))
    assert "torch-9.9+test-py3-none-any.whl is not what" in run()
    torch.unlink()
    assert "names 2 wheels, 1 are there" in run()
    (inputs.wheels / "SHA256SUMS").unlink()
    assert "has no SHA256SUMS" in run()


def test_bad_arguments_of_the_installer_are_one_line(inputs: Inputs, tmp_path: Path) -> None:
    assert "unknown argument --wheel" in refused(install(inputs, "--wheel"))
    assert "--venv needs a value" in refused(install(inputs, "--venv"))
    assert "no such folder" in refused(install(inputs, "--wheels", str(tmp_path / "nowhere")))
    assert "cannot be run" in refused(install(inputs, "--python", "python-of-nobody"))
    old = put(tmp_path / "old", '#!/bin/sh\ncase "$2" in *version_info\\[*) echo 3.9;; *) exit 1;; esac\n')
    old.chmod(0o755)
    assert "is Python 3.9" in refused(install(inputs, "--python", str(old)))


def test_a_failing_installation_is_exit_code_1(inputs: Inputs, tmp_path: Path) -> None:
    put(tmp_path / "broken", f'#!/bin/sh\n[ "$1" = -m ] && exit 7\nexec {sys.executable} "$@"\n').chmod(0o755)
    done = install(inputs, "--python", str(tmp_path / "broken"), "--venv", str(tmp_path / "env"))
    assert done.returncode == 1 and "error: failed: " in done.stderr


def doctor(**environment: str) -> tuple[dict[str, list[str]], str]:
    done = call([sys.executable, "-B", str(DOCTOR)], **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_the_doctor_names_every_missing_tool_and_what_it_disables(tmp_path: Path) -> None:
    report, text = doctor(PATH=str(tmp_path), CUDA_HOME=str(tmp_path), CC="none", CXX="none")
    tools = {"CUDA driver", "C++ compiler", "C compiler", "curl", "tar", "unzip", "sha256sum", "git"}
    assert tools <= set(report["missing"])
    for name in tools:
        line = next(line for line in text.splitlines() if line.split("  ")[1].strip() == "missing" and name in line)
        assert "disables: " in line


def test_the_doctor_reports_what_is_there(tmp_path: Path) -> None:
    for name, says in (("nvidia-smi", "NVIDIA H200, 143771 MiB, 570.1"), ("nvcc", "release 12.8, V12.8.61\nBuild x")):
        put(tmp_path / name, f"#!/bin/sh\nprintf '%s\\n' '{says}'\n").chmod(0o755)
    report, text = doctor(PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert {"CUDA driver", "CUDA toolkit", "Python"} <= set(report["ok"])
    assert "NVIDIA H200" in text and "release 12.8" in text
    names = ["CUDA driver", "CUDA toolkit", "C++ compiler", "C compiler", "Python", "curl", "tar", "unzip"]
    names += ["sha256sum", "git", "free space", "/dev/shm", "host memory"]
    assert sorted(report["ok"] + report["missing"]) == sorted(names)


def test_the_doctor_looks_at_the_workspace_s_disk(tmp_path: Path) -> None:
    _, text = doctor(SPECTER_WORK=str(tmp_path / "not made yet"))
    assert f"free in {tmp_path}" in text


def test_make_doctor_runs_it() -> None:
    done = call(["make", "-n", "-C", str(REPO), "doctor"])
    assert done.returncode == 0 and "scripts/doctor.py" in done.stdout
