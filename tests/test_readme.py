"""Every command of the README is known here: CI runs it, or checks that it would be understood."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from enum import Enum
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


class How(Enum):
    """RUN: as it stands. DRY: `make -n`. PLAN: run.py without measuring. FLAGS: the tool knows every flag."""

    RUN = "run"
    DRY = "dry"
    PLAN = "plan"
    FLAGS = "flags"
    MODULE = "module"  # the module exists; it needs a CUDA device
    SCRIPT = "script"  # the script is there and its syntax holds; it needs a CUDA device
    ELSEWHERE = "elsewhere"  # another test file runs it, named in the table


COMMANDS: dict[str, tuple[How, str]] = {
    "git clone": (How.ELSEWHERE, "the checkout itself"),
    "make": (How.DRY, ""),
    "make help": (How.RUN, ""),
    "python run.py list": (How.RUN, ""),
    "python run.py plan": (How.RUN, ""),
    "python run.py validate": (How.ELSEWHERE, "test_main_run.py"),
    "python run.py profile=paper": (How.ELSEWHERE, "test_run.py: refused in one line without official weights"),
    "python run.py": (How.PLAN, ""),
    "python -m specter_core generate": (How.RUN, ""),
    "python scripts/": (How.FLAGS, ""),
    "python -m scripts.gpu.": (How.MODULE, "needs a CUDA device"),
    "python -m harness.closing": (How.ELSEWHERE, "test_comparison_script.py"),
    "python -m harness.aims": (How.ELSEWHERE, "test_aims_of_records.py"),
    "sh scripts/gpu/": (How.SCRIPT, "needs a CUDA device and compute-sanitizer"),
    "python initialization/": (How.FLAGS, ""),
}


def readme_commands() -> list[str]:
    """Lines of sh blocks (continued lines joined) and the first column of tables."""
    found = []
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            found += [part.strip() for part in line.split("#")[0].split("&&") if part.strip()]
    found += re.findall(r"^\| `((?:make|python)[^`]*)`", README, re.MULTILINE)
    plain = [c.replace(".venv/bin/python", "python").replace("python3", "python").replace(" …", "") for c in found]
    return sorted({c for c in plain if not c.startswith("cd ")})


def rule(command: str) -> tuple[How, str]:
    matches = [prefix for prefix in COMMANDS if command.startswith(prefix)]
    assert matches, f"README has a command that no test knows: {command}"
    return COMMANDS[max(matches, key=len)]


def run(args: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(args, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_the_readme_has_commands() -> None:
    assert len(readme_commands()) >= 12


@pytest.mark.ci
@pytest.mark.parametrize("command", readme_commands())
def test_readme_command(command: str, tmp_path: Path) -> None:
    how, where = rule(command)
    words = [sys.executable if w == "python" else w for w in shlex.split(command)]
    words = [str(tmp_path / w) if w == "trace.json" else w for w in words]
    if how is How.ELSEWHERE:
        if where.startswith("test_"):
            assert (ROOT / "tests" / where.split(":")[0]).is_file()
        return
    if how is How.FLAGS:
        tool = next(w for w in words if w.endswith(".py"))
        text = run([sys.executable, tool, "--help"])
        assert text.returncode == 0, text.stderr
        unknown = [w for w in words if w.startswith("--") and w not in text.stdout]
        assert not unknown, f"{tool} does not know {unknown}"
        return
    if how is How.MODULE:
        assert (ROOT / (words[2].replace(".", "/") + ".py")).is_file(), words[2]
        return
    if how is How.SCRIPT:
        words = [words[0], "-n", words[1]]
    if how is How.DRY:
        words = [words[0], "-n", *words[1:]]
    if how is How.PLAN:
        words = [*words[:2], "plan", *words[2:]]
    done = run(words)
    if how is How.PLAN and done.returncode == 2:  # a dataset that is not downloaded: one line that says how
        assert "download_datasets.py" in done.stderr and len(done.stderr.strip().splitlines()) == 1
        return
    assert done.returncode == 0, done.stderr


def test_every_local_link_of_the_readme_exists() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert targets and all((ROOT / t).exists() for t in targets if "://" not in t)
