"""What a folder of rows needs before it is committed or drawn from: python -m harness.closing DIR

DIR is a folder with records.csv, or one with such folders below it.

Checks records.csv against the schema and writes summary.csv (means, ratios with 95 % intervals), systems.csv (labels
and colours of the plots) and the tables of efficiency.jsonl. For runs that were made where pandera is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from harness import catalogue, efficiency, frame
from harness.config import system_entry
from harness.runner import write_csv, write_systems
from harness.summary import summarise
from specter_core.errors import UserError, exit_code


def close(folder: Path) -> dict[str, int]:
    """Returns the number of rows, of ok rows and of files written. UserError for rows that break the schema."""
    rows = frame.load(folder / "records.csv")
    write_csv(folder / "summary.csv", summarise(rows))
    names = [n for n in catalogue.names("system") if n in set(rows["system"])]
    write_systems(folder / "systems.csv", [system_entry(n, catalogue.load("system", n)) for n in names])
    tables = efficiency.write(folder)
    return {"rows": len(rows), "ok": int((rows["status"] == "ok").sum()), "files": 2 + len(tables)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.closing", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR")
    folder: Path = parser.parse_args(arguments).folder
    found = [folder] if (folder / "records.csv").exists() else sorted(p.parent for p in folder.glob("**/records.csv"))
    if not found:
        raise UserError(f"{folder} has no records.csv in it or below; a run writes it (python run.py)")
    totals = {"rows": 0, "ok": 0, "files": 0}
    for each in found:
        closed = close(each)
        print(f"{each}: {closed['ok']} of {closed['rows']} rows ok", file=sys.stderr)
        totals = {name: totals[name] + closed[name] for name in totals}
    print(json.dumps(totals))
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
