"""Where a dataset's files lie, and how its tables are read."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from specter_core.errors import UserError

REPO = Path(__file__).resolve().parents[2]


def fetch_command(name: str, root: Path) -> str:
    """The command that puts dataset `name` below `root`."""
    where = "" if root.resolve() == REPO / "downloads" else f" --output {root}"
    return f"python3 initialization/download_datasets.py --only {name}{where}"


def find(name: str, root: Path, patterns: Sequence[str], folders: Sequence[str] = ()) -> list[Path]:
    """The files of the first pattern that has any, sorted by name; empty when the dataset is absent.

    Looked for in root/datasets/<name> and root/<name>, then in the other names its folder goes by.
    """
    places = [root / above / folder for folder in (name, *folders) for above in ("datasets", "")]
    for pattern in patterns:
        for place in places:
            found = sorted(p for p in place.glob(pattern) if p.is_file())
            if found:
                return found
    return []


def read_table(path: Path, columns: Sequence[str]) -> pd.DataFrame:
    """Parquet or (gzip'd) JSON lines with at least these columns. UserError names the file and the fault."""
    try:
        if path.suffix == ".parquet":
            table = pd.read_parquet(path)
        else:
            table = pd.read_json(path, lines=True, dtype=False, encoding="utf-8")
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read ({type(error).__name__}); delete it and fetch it again") from None
    require_columns(path, table, columns)
    return table


def require_columns(path: Path, table: pd.DataFrame, columns: Sequence[str]) -> None:
    missing = [c for c in columns if c not in table.columns]
    if missing:
        raise UserError(
            f"{path} has no column {', '.join(missing)} (it has {len(table.columns)} others); fetch it again"
        )
