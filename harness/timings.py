"""timings.csv: the wall time of a sweep per model, loading included."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pandas as pd

KEY = ["sweep", "model", "weights", "link", "device"]
COLUMNS = ["sweep", "minutes", "model", "weights", "link", "device", "git_commit", "rows"]


class Timed(NamedTuple):
    """link: names of all links of the run, joined by +."""

    sweep: str
    model: str
    weights: str
    link: str
    device: str
    git_commit: str


@contextlib.contextmanager
def timed(path: Path, what: Timed, measured: Callable[[], int]) -> Iterator[None]:
    """Adds the block's wall time, and the rows that it measured, to the line of `what` in path; nothing when it
    measured none. The parts of an interrupted run add up to what it took; so does a sweep that grows."""
    start, before = time.monotonic(), measured()
    try:
        yield
    finally:
        if (new := measured() - before) > 0:
            _add(path, what, (time.monotonic() - start) / 60, new)


def _add(path: Path, what: Timed, minutes: float, rows: int) -> None:
    table = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=COLUMNS)
    same = table[KEY].astype(str).eq(pd.Series(what._asdict())[KEY].astype(str)).all(axis=1)
    line = what._asdict() | {"minutes": minutes + table.loc[same, "minutes"].sum()}
    line["rows"] = rows + int(table.loc[same, "rows"].sum())
    kept = table[~same].to_dict("records")
    temporary = path.with_suffix(".tmp")
    pd.DataFrame([*kept, line])[COLUMNS].to_csv(temporary, index=False, float_format="%.6g")
    temporary.replace(path)
