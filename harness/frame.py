"""Records as a typed pandas DataFrame, checked against the schema (pandera)."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pandas as pd
import pandera.pandas as pa

from harness.columns import COLUMNS, NAMES, STATUSES, Column
from harness.records import read_rows
from specter_core.errors import UserError

_DTYPES = {"text": "str", "int": "Int64", "float": "float64", "bool": "boolean"}


def schema() -> pa.DataFrameSchema:
    """Every column of harness/columns.py, with type and range; a row with status ok has times and tokens."""
    timed = pa.Check(
        lambda df: (df["status"] != "ok") | (df["ttft_ms"].notna() & df["throughput"].notna()),
        error="a row with status ok has no times",
    )
    explained = pa.Check(
        lambda df: (df["status"] == "ok") | df["reason"].notna(), error="a row that is not ok names no reason"
    )
    return pa.DataFrameSchema({c.name: _column(c) for c in COLUMNS}, checks=[timed, explained], strict=True)


def _column(column: Column) -> pa.Column:
    checks = []
    if column.least is not None:
        checks.append(pa.Check.ge(column.least))
    if column.most is not None:
        checks.append(pa.Check.le(column.most))
    if column.name == "status":
        checks.append(pa.Check.isin(STATUSES))
    return pa.Column(_DTYPES[column.kind], checks, nullable=not column.required)


def typed(rows: list[dict[str, str]]) -> pd.DataFrame:
    """Rows of text -> DataFrame with the schema's dtypes; empty cells become missing values."""
    frame = pd.DataFrame(rows, columns=list(NAMES), dtype="str").replace("", None)
    for column in COLUMNS:
        values = frame[column.name]
        if column.kind == "bool":
            values = values.map({"true": True, "false": False})
        elif column.kind in ("int", "float"):
            values = pd.to_numeric(values)
        frame[column.name] = values.astype(_DTYPES[column.kind])  # type: ignore[call-overload]
    return frame


def load(path: Path, hashes: Collection[str] | None = None) -> pd.DataFrame:
    """records.csv as a checked DataFrame, optionally only the rows of some config hashes. UserError on a bad
    file."""
    if not path.exists():
        raise UserError(f"{path} does not exist; a run writes it (python run.py)")
    rows = read_rows(path)
    if hashes is not None:
        rows = [row for row in rows if row["config_hash"] in hashes]
    try:
        return schema().validate(typed(rows), lazy=True)
    except (ValueError, KeyError) as error:
        raise UserError(f"{path}: a cell does not fit its column: {error}") from error
    except pa.errors.SchemaErrors as error:
        cases = error.failure_cases.sort_values("schema_context", kind="stable")  # Column before DataFrameSchema
        first = cases.iloc[0]
        where = f"{path}: row {first['index']}"
        if first["schema_context"] == "Column":
            where += f", {first['column']} {first['failure_case']}"
        raise UserError(f"{where}: {first['check']}") from error
