"""What command lines make of errors: one line and exit code 2 for the user's, a traceback for ours."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest

from figures import io
from harness.catalogue import ROOT
from specter_core import errors
from specter_core.errors import UserError


def failing(error: BaseException):
    def body() -> int:
        raise error

    return body


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UserError("batch=0 is below 1"), "error: batch=0 is below 1"),
        (SystemExit("error: no such folder"), "error: no such folder"),
        (FileExistsError(errno.EEXIST, "File exists", "out"), "error: out: File exists; name a file or folder"),
        (OSError(errno.ENOSPC, "No space left on device"), "error: the run: No space left on device; free some space"),
    ],
)
def test_a_users_error_is_one_line_and_exit_code_2(error, line, capsys):
    assert errors.exit_code(failing(error), "the run") == 2
    out, said = capsys.readouterr()
    assert out == "" and said.startswith(line) and said.count("\n") == 1


@pytest.mark.parametrize("error", [ZeroDivisionError(), OSError(errno.EPIPE, "Broken pipe"), SystemExit(3)])
def test_everything_else_is_raised(error):
    with pytest.raises(type(error)):
        errors.exit_code(failing(error))


def test_the_figures_command_line_ends_like_the_others(capsys):
    assert io.exit_code(failing(SystemExit("error: nothing here"))) == 2
    assert io.exit_code(failing(NotADirectoryError(errno.ENOTDIR, "Not a directory", "out"))) == 2
    assert (
        capsys.readouterr().err == "error: nothing here\nerror: out: Not a directory; name another or free some space\n"
    )
    assert io.exit_code(lambda: 0) == 0


@pytest.mark.parametrize(
    ("figure", "option"),
    [
        ("fig14_tpot", "--records"),
        ("fig12_verification", "--traces"),
        ("fig10_kernels", "--kernels"),
        ("fig13_routing", "--routing"),
        ("table2_models", "--models"),
    ],
)
def test_a_single_figure_ends_like_all_of_them(figure, option, tmp_path):
    asked = [sys.executable, "-m", f"figures.{figure}", option, "nowhere", "--out", str(tmp_path)]
    done = subprocess.run(asked, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and done.stdout == "", done.stderr
    assert done.stderr.startswith("error: nowhere") and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("command", ["figures", "harness.claims", "harness.report", "harness.aims", "harness.closing"])
def test_a_results_folder_that_is_not_there_is_one_line(command, tmp_path):
    folder = ["nowhere"] if command in ("harness.aims", "harness.closing") else ["--results", "nowhere"]
    done = subprocess.run([sys.executable, "-m", command, *folder], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and done.stdout == "", done.stderr
    assert done.stderr.startswith("error: nowhere") and done.stderr.count("\n") == 1, done.stderr
