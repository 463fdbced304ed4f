"""Reading records, and writing a figure as PNG and PDF."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from figures import style
from figures.looks import with_systems

WORKLOAD = ["link", "B", "prefix_len", "new_tokens", "temperature", "device"]


def exit_code(body: Callable[[], int]) -> int:
    """What a command line ends with: the code that `body` returns, or 2 and one line on stderr for bad input and for a
    file or folder that cannot be read or written."""
    try:
        return body()
    except SystemExit as end:
        if not isinstance(end.code, str):
            raise
        line = end.code
    except OSError as error:
        if error.strerror is None:
            raise
        line = f"error: {error.filename or 'the output folder'}: {error.strerror}; name another or free some space"
    print(line, file=sys.stderr)
    return 2


def read_records(path: Path, where: Sequence[str] = ()) -> pd.DataFrame:
    """records.csv, the last row for each (config_hash, prompt_id, repeat), with the systems' looks (figures/looks.py).
    where: `column=value` conditions. SystemExit with one line on a bad file or condition."""
    if not path.exists():
        raise SystemExit(f"error: {path} does not exist; a run writes it (python run.py)")
    rows = pd.read_csv(path).drop_duplicates(["config_hash", "prompt_id", "repeat"], keep="last")
    for condition in where:
        column, _, value = condition.partition("=")
        if column not in rows:
            raise SystemExit(f"error: --where {condition}: no column {column}; columns: {', '.join(rows.columns)}")
        rows = rows[rows[column].astype(str) == value]
    if rows.empty:
        raise SystemExit(f"error: {path} has no row that meets {' '.join(where) or 'anything'}")
    return with_systems(rows, path.with_name("systems.csv"))


def check_one_workload(rows: pd.DataFrame, free: Sequence[str] = ()) -> None:
    """SystemExit with one line when the rows of a figure mix workloads, or a system's depths or variants. free:
    columns that the figure's own axis may vary."""
    rows = style.shown(rows)
    mixed = [c for c in WORKLOAD if rows[c].nunique() > 1 and c not in free]
    request = ["system", "model", "memory", "label", "prompt_id", "repeat"]  # a system may choose K per prompt
    for column, keys in (("K", request), ("variant", request[:3])):
        if rows.groupby(keys)[column].nunique().max() > 1 and column not in free:
            mixed.append(column)
    if mixed:
        values = ", ".join(str(v) for v in rows[mixed[0]].unique())
        raise SystemExit(f"error: rows differ in {mixed[0]} ({values}); choose with --where {mixed[0]}=VALUE")


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """<folder>/<name>.png and .pdf; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.png", folder / f"{name}.pdf"]
    for path in paths:
        temporary = path.with_suffix(f".tmp{path.suffix}")
        with style.look():
            figure.savefig(temporary, metadata={"CreationDate": None} if path.suffix == ".pdf" else None)
        temporary.replace(path)
    return paths


def show(figure: Figure, folder: Path, name: str) -> int:
    """`save`, and the paths on stdout; exit code 0."""
    for path in save(figure, folder, name):
        print(path)
    return 0


def main(
    draw: Callable[[pd.DataFrame], Figure],
    name: str,
    arguments: Sequence[str] | None = None,
    *,
    free: Sequence[str] = (),
) -> int:
    """The command line of every figure module that draws records; its exit code. free: columns that may vary."""
    parser = argparse.ArgumentParser(prog=f"python -m figures.{name}")
    parser.add_argument("--records", type=Path, default=Path("outputs/main-run/records.csv"))
    parser.add_argument("--out", type=Path, default=Path("outputs/main-run/figures"), help="folder for PNG and PDF")
    parser.add_argument("--where", action="append", default=[], metavar="COLUMN=VALUE")
    options = parser.parse_args(arguments)

    def body() -> int:
        rows = read_records(options.records, options.where)
        check_one_workload(rows, free)
        return show(draw(rows), options.out, name)

    return exit_code(body)
