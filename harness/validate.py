"""`python run.py validate DIR`: is a results folder whole and consistent?"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pandas as pd

from harness import environment, frame
from specter_core.errors import UserError


class Validation(NamedTuple):
    rows: int
    problems: list[str]


def validate(folder: Path) -> Validation:
    """Checks records.csv against the schema, and that environment.json names every model's weights. UserError
    when the folder holds no records at all; everything else is a problem in the list."""
    path = folder / "records.csv"
    if not path.exists():
        raise UserError(f"{folder} holds no records.csv; give the folder of a run, e.g. outputs/main-run")
    problems = []
    if not path.read_bytes().endswith(b"\n"):
        problems.append("records.csv: the last line is unfinished; the next run drops it")
    try:
        rows = frame.load(path)
    except UserError as error:
        return Validation(0, [*problems, str(error)])
    problems += row_problems(rows)
    return Validation(len(rows), problems + environment_problems(folder / "environment.json", set(rows["model"])))


def environment_problems(path: Path, models: set[str]) -> list[str]:
    """What environment.json does not tell about the machine and the weights of `models`."""
    if not path.exists():
        return ["environment.json is missing"]
    try:
        weights = environment.read(path).get("weights", {})
    except UserError as error:
        return [str(error)]
    return [f"environment.json: no weights hash of {m}" for m in sorted(models - set(weights))]


def row_problems(rows: pd.DataFrame) -> list[str]:
    """Contradictions that no single column shows. A row beyond its budget is flagged by within_budget; it has to say
    why."""
    problems = []
    ok = rows[rows["status"] == "ok"]
    short = ok[ok["new_tokens"] < 1]
    problems += [f"{i}: status ok without tokens" for i in short["prompt_id"]]
    over = ok[ok["within_budget"].eq(False).fillna(False) & ok["reason"].isna()]
    problems += [
        f"{r.system} on {r.model} ({r.memory}), {r.prompt_id}: {r.peak_device_bytes} bytes exceed its budget "
        f"of {r.budget_bytes}, and no reason is given"
        for r in over.itertuples()
    ]
    wrong = ok[(ok["system"] == "specter") & ok["exact_match"].eq(False).fillna(False)]
    problems += [f"specter on {r.model}, {r.prompt_id}: other tokens than the target" for r in wrong.itertuples()]
    return problems
