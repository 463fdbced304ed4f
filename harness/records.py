"""records.csv: appended line by line as requests are measured, read back to resume."""

from __future__ import annotations

import csv
import fcntl
import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.columns import COLUMNS, LATER, NAMES
from specter_core.errors import UserError


class Key(NamedTuple):
    """What a row is the measurement of."""

    config_hash: str
    prompt_id: str
    repeat: int


class RecordFile:
    """An append-only CSV. A line is one write and one fsync under a lock, so that several writers may share
    the file and a killed run loses at most the row that it was writing; such a torn last line is cut off,
    with a notice, when the file is opened. `done` holds the keys that have a row with status ok; other rows
    are measured again.
    """

    def __init__(self, path: Path, notice: Callable[[str], None]) -> None:
        self.path = path
        self.done: set[Key] = set()
        self._names = NAMES
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            self._cut_torn_line(notice)
        if not path.exists() or path.stat().st_size == 0:
            self._write(",".join(NAMES) + "\n")
        self._read(notice)

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes complete rows (every column, None or NaN for none; rows of an older file may lack the later columns),
        all or nothing. UserError when the disk is full."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        for row in rows:
            assert set(row) | LATER == set(NAMES), set(row) ^ set(NAMES)
            writer.writerow([cell(row.get(name)) for name in self._names])
        self._write(out.getvalue())
        self.done |= {key_of(row) for row in rows if row["status"] == "ok"}

    def _write(self, text: str) -> None:
        fd = -1
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            fcntl.flock(fd, fcntl.LOCK_EX)
            before = os.fstat(fd).st_size
            data = text.encode()
            try:
                written = os.write(fd, data)
                if written != len(data):
                    raise OSError(f"{written} of {len(data)} bytes written")
                os.fsync(fd)
            except OSError:
                os.ftruncate(fd, before)
                raise
        except OSError as error:
            reason = error.strerror or error
            raise UserError(
                f"cannot append {len(text)} bytes to {self.path}: {reason}; free some space or set output=DIR"
                " and start again, what is recorded so far stays"
            ) from error
        finally:
            if fd >= 0:
                os.close(fd)

    def _cut_torn_line(self, notice: Callable[[str], None]) -> None:
        with self.path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            data = file.read()
            whole = data.rfind(b"\n") + 1
            if whole < len(data):
                file.truncate(whole)
                notice(f"{self.path}: dropped an unfinished last line of {len(data) - whole} bytes")

    def _read(self, notice: Callable[[str], None]) -> None:
        found, rows = _read(self.path)
        if found == tuple(name for name in NAMES if name in found or name not in LATER):
            self._names = found
            for name in (name for name in NAMES if name not in found):
                notice(f"{self.path} is older than column {name}, which stays out of it; --fresh starts a new file")
        else:
            odd = sorted(set(found) ^ set(NAMES)) or ["their order"]
            raise UserError(f"{self.path} has other columns than this version ({odd[0]}); start anew with --fresh")
        self.done |= {key for key, row in rows if row["status"] == "ok"}


def key_of(row: Mapping[str, Any]) -> Key:
    return Key(str(row["config_hash"]), str(row["prompt_id"]), int(row["repeat"]))


def cell(value: Any) -> str:
    """A value as one CSV cell: nothing for None and NaN, true/false, no line breaks, floats to nine
    digits."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.9g}"
    return " ".join(str(value).split())


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows as text, the last one for each key (a failure that was measured again counts once). UserError for a file
    with a line that is no record."""
    return list(dict(_read(path)[1]).values())


def _read(path: Path) -> tuple[tuple[str, ...], list[tuple[Key, dict[str, str]]]]:
    """The names of the columns, and every row with its key."""
    rows = []
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        try:
            names = tuple(reader.fieldnames or ())
            for row in reader:
                cells = sum(value is not None for value in row.values()) + len(row.get(None) or ()) - (None in row)
                if cells != len(names):
                    raise ValueError(f"{cells} of {len(names)} cells")
                rows.append((key_of(row), row))
        except (KeyError, ValueError, csv.Error) as error:
            where = f"{path}: line {max(1, reader.line_num)} is no record ({' '.join(str(error).split())})"
            raise UserError(f"{where}; take it out of the file or start anew with --fresh") from error
    return names, rows


assert len(set(NAMES)) == len(COLUMNS)
