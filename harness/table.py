"""The summary as a table on stderr."""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

WATERMARK = "CPU run: checks behaviour, not GPU performance"


def print_summary(path: Path, device: str, console: Console | None = None) -> None:
    """summary.csv, one block per setting, systems by mean TPOT. CPU tables carry the watermark."""
    console = console or Console(file=sys.stderr, width=None if sys.stderr.isatty() else 150)
    summary = pd.read_csv(path)
    setting = ["model", "weights", "memory", "link"]
    for key, block in summary.groupby(setting, sort=False):
        table = Table(
            title=", ".join(str(k) for k in key),
            caption=WATERMARK if device == "cpu" else None,
            title_justify="left",
        )
        table.add_column("system")
        for name in (
            "TPOT ms",
            "x Specter [95 %]",
            "accept",
            "tok/win",
            "coverage",
            "acc. hits",
            "H2D MB/tok",
        ):
            table.add_column(name, justify="right")
        table.add_column("exact", justify="right")
        table.add_column("n", justify="right")
        varying = [c for c in ("variant", "B", "prefix_len") if block.groupby("system")[c].nunique().max() > 1]
        for row in block.sort_values("tpot_ms").to_dict("records"):
            interval = f" [{row['ratio_low']:.2f}, {row['ratio_high']:.2f}]" if row["system"] != "specter" else ""
            failed = f" ({row['failed']} failed)" if row["failed"] else ""
            failed += f" (outliers: {row['outliers']})" if row["outliers"] else ""
            table.add_row(
                _name(row, varying),
                _number(row["tpot_ms"], 1),
                "" if math.isnan(row["ratio"]) else f"{row['ratio']:.2f}{interval}",
                _number(row["acceptance"], 3),
                _number(row["tokens_per_window"], 2),
                _number(row["coverage"], 3),
                _number(row["access_hit_rate"], 3),
                _number(row["h2d_mb_per_token"], 2),
                "" if pd.isna(row["exact_share"]) else f"{row['exact_share']:.0%}",
                f"{row['n']}{failed}",
            )
        console.print(table)


def _name(row: dict[Hashable, Any], varying: list[str]) -> str:
    """System and K, and what else tells the lines of a table apart."""
    said = {"variant": f"({row['variant']})", "B": f"B={row['B']}", "prefix_len": f"prefix {row['prefix_len']}"}
    parts = [str(row["system"]), *([f"K={row['K']}"] if row["K"] else []), *(said[c] for c in varying)]
    return " ".join(parts)


def _number(value: float, digits: int) -> str:
    return "" if pd.isna(value) else f"{value:.{digits}f}"
