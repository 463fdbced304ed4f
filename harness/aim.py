"""Aims of the project and what was reached: the rows of aims.csv, written by benches and by harness/aims.py.

Needs the standard library only, so that benches write theirs on a bare GPU machine.
"""

from __future__ import annotations

import csv
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

FIELDS = ("aim", "value", "unit", "target", "met", "git_commit", "note")
BETTER: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge}


class Aim(NamedTuple):
    """value None: not measured, note says why. target: "<= 2.0", ">= 0.9", or "" for a figure that has none."""

    aim: str
    value: float | None
    unit: str
    target: str
    git_commit: str
    note: str = ""
    void: bool = False
    """Measured where the aim cannot count as met whatever the value, as the note says."""

    @property
    def met(self) -> bool | None:
        """None without a value or a target."""
        if self.value is None or not self.target:
            return None
        sign, _, bound = self.target.partition(" ")
        return not self.void and BETTER[sign](self.value, float(bound))


def write(path: Path, aims: Sequence[Aim]) -> None:
    """One line per aim, values to six digits; atomic. Nothing is written without aims."""
    if not aims:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FIELDS)
        for aim in aims:
            value = "" if aim.value is None else f"{aim.value:.6g}"
            met = "" if aim.met is None else str(aim.met).lower()
            writer.writerow([aim.aim, value, aim.unit, aim.target, met, aim.git_commit, aim.note])
    temporary.replace(path)
