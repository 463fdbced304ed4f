"""records.csv: what was recorded stays, whatever happens while a row is written."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from records_fixture import main_run, row

from harness import frame
from harness.columns import COLUMNS, LATER, NAMES
from harness.records import Key, RecordFile, cell, key_of, read_rows
from harness.validate import validate
from specter_core.errors import UserError


def record_file(path: Path, notices: list[str] | None = None) -> RecordFile:
    return RecordFile(path, ([] if notices is None else notices).append)


def test_rows_come_back_with_the_types_of_the_schema(tmp_path):
    written = [row(prompt_id="a", exact_match=False), row(prompt_id="b", M=float("nan"), K=0)]
    record_file(tmp_path / "r.csv").append(written)
    loaded = frame.load(tmp_path / "r.csv")
    assert tuple(loaded.columns) == NAMES
    assert loaded["exact_match"].tolist() == [False, True]
    assert loaded["K"].tolist() == [8, 0] and str(loaded["h2d_bytes"].dtype) == "Int64"
    assert pd.isna(loaded["M"][1]) and loaded["tpot_ms"][0] == 20.0


def test_only_ok_rows_count_as_done_and_the_last_row_of_a_key_counts(tmp_path):
    path = tmp_path / "r.csv"
    failed = row(status="crashed", reason="killed", tpot_ms=None, ttft_ms=None, throughput=None)
    record_file(path).append([failed])
    assert record_file(path).done == set()
    record_file(path).append([row()])
    assert record_file(path).done == {Key("0123456789ab", "web-1", 0)}
    assert [r["status"] for r in read_rows(path)] == ["ok"]


@pytest.mark.parametrize("cut", [1, 5, 60])
def test_a_torn_last_line_is_dropped_with_a_notice_and_nothing_else(tmp_path, cut):
    path = tmp_path / "r.csv"
    record_file(path).append([row(prompt_id="a"), row(prompt_id="b")])
    os.truncate(path, path.stat().st_size - cut)
    notices: list[str] = []
    records = record_file(path, notices)
    assert [key.prompt_id for key in records.done] == ["a"]
    assert len(notices) == 1 and "dropped an unfinished last line" in notices[0]
    records.append([row(prompt_id="b")])
    assert [r["prompt_id"] for r in read_rows(path)] == ["a", "b"]


def test_a_full_disk_is_one_line_and_keeps_what_was_recorded(tmp_path, monkeypatch):
    path = tmp_path / "r.csv"
    records = record_file(path)
    records.append([row(prompt_id="a")])
    before = path.read_bytes()
    real_write = os.write

    def half(fd: int, data: bytes) -> int:
        real_write(fd, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(UserError, match="No space left on device; free some space") as caught:
        records.append([row(prompt_id="b")])
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == before and len(records.done) == 1


def test_a_file_size_limit_of_the_system_is_handled_like_a_full_disk(tmp_path):
    code = (
        "import resource, signal, sys; from pathlib import Path\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from records_fixture import row; from harness.records import RecordFile\n"
        "from specter_core.errors import UserError\n"
        "records = RecordFile(Path(sys.argv[1]), print)\n"
        "records.append([row(prompt_id='a')])\n"
        "size = Path(sys.argv[1]).stat().st_size\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, size + 100))\n"
        "try:\n    records.append([row(prompt_id='b')])\n"
        "except UserError as error:\n    print(error)\n"
        "assert Path(sys.argv[1]).stat().st_size == size\n"
    )
    here = Path(__file__).parent
    command = [sys.executable, "-c", code, str(tmp_path / "r.csv"), str(here)]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ, PYTHONPATH=str(here.parent)))
    assert done.returncode == 0, done.stderr
    assert "cannot append" in done.stdout


def test_other_columns_are_refused_with_the_remedy(tmp_path):
    path = tmp_path / "r.csv"
    path.write_text("system,model\nspecter,x\n")
    with pytest.raises(UserError, match="start anew with --fresh"):
        record_file(path)


def test_a_line_that_is_no_record_is_named_and_stays(tmp_path):
    path = tmp_path / "r.csv"
    record_file(path).append([row(prompt_id="a"), row(prompt_id="b")])
    header, first, second = path.read_text().splitlines(keepends=True)
    for damaged in ("garbage,line\n", f"{second[: len(second) // 2]}\n", f"{second.rstrip()},1,2\n"):
        path.write_text(header + damaged + first)
        with pytest.raises(UserError, match=rf"line 2 is no record \(\d+ of {len(NAMES)} cells\); take it out"):
            record_file(path)
        assert path.read_text() == header + damaged + first
    path.write_bytes(header.encode() + b"\xff\xfe\n" + first.encode())
    with pytest.raises(UserError, match="is no record"):
        read_rows(path)


def test_a_file_from_before_a_column_is_read_and_continued_without_it(tmp_path):
    path, notices = tmp_path / "r.csv", []
    older = [name for name in NAMES if name not in LATER]
    path.write_text(",".join(older) + "\n" + ",".join(cell(row(prompt_id="a")[name]) for name in older) + "\n")
    records = record_file(path, notices)
    assert [key.prompt_id for key in records.done] == ["a"]
    assert len(notices) == len(LATER) and all("--fresh" in line for line in notices)
    records.append([row(prompt_id="b", distinct_experts=9.5)])
    records.append([{name: value for name, value in row(prompt_id="c").items() if name in older}])
    assert path.read_text().splitlines()[0] == ",".join(older)
    loaded = frame.load(path)
    assert loaded["prompt_id"].tolist() == ["a", "b", "c"] and loaded["distinct_experts"].isna().all()


def test_two_writers_do_not_mix_their_lines(tmp_path):
    path = tmp_path / "r.csv"
    first, second = record_file(path), record_file(path)
    for number in range(20):
        first.append([row(prompt_id=f"a{number}")])
        second.append([row(prompt_id=f"b{number}")])
    assert len(frame.load(path)) == 40


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, ""),
        (float("nan"), ""),
        (True, "true"),
        (1.5, "1.5"),
        (3, "3"),
        ("two\nlines,\r\nx", "two lines, x"),
    ],
)
def test_a_cell_is_one_line(value, shown):
    assert cell(value) == shown


@pytest.mark.parametrize(
    ("change", "column"),
    [
        ({"acceptance": 1.5}, "acceptance"),
        ({"K": -1}, "K"),
        ({"status": "fine"}, "status"),
        ({"tpot_ms": -1.0}, "tpot_ms"),
        ({"model": None}, "model"),
        ({"tpot_ms": "fast"}, "fast"),
        ({"status": "crashed"}, "names no reason"),
        ({"ttft_ms": None}, "has no times"),
    ],
)
def test_the_schema_names_the_column_that_a_bad_row_breaks(tmp_path, change, column):
    record_file(tmp_path / "r.csv").append([row(prompt_id="good"), row(**change)])
    with pytest.raises(UserError, match=column) as caught:
        frame.load(tmp_path / "r.csv")
    assert "\n" not in str(caught.value)


def test_every_column_is_named_once_and_the_key_is_among_them():
    assert len(set(NAMES)) == len(COLUMNS)
    assert key_of(row()) == Key("0123456789ab", "web-1", 0)


def test_validate_finds_what_is_wrong_in_a_folder(tmp_path):
    records = record_file(tmp_path / "records.csv")
    records.append(list(main_run()))
    (tmp_path / "environment.json").write_text('{"weights": {"deepseek_v2_mini": "cafe"}}')
    assert validate(tmp_path).problems == []
    records.append([row(prompt_id="x", peak_device_bytes=30_000_000, within_budget=False, exact_match=False)])
    records.append([row(prompt_id="y", model="other")])
    problems = "\n".join(validate(tmp_path).problems)
    assert "30000000 bytes exceed its budget of 20000000" in problems
    assert "other tokens than the target" in problems and "no weights hash of other" in problems
    with pytest.raises(UserError, match="holds no records"):
        validate(tmp_path / "nowhere")
