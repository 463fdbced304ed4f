"""Chrome traces as tables: what figures 8, 9 and 12 are drawn from."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures import style

COLUMNS = ["name", "track", "start_ms", "ms", "layer", "expert", "priority", "token", "drafted", "rows", "misses"]
COLOURS = {"prefetch": "#0072B2", "demand": style.MISS, "draft": "#56B4E9", "verify": "#009E73", "plan": "black"}
COLOURS |= {"attention": "#555555", "stall": "#F0E442"}


def events(path: Path) -> pd.DataFrame:
    """One row per event, times in ms from the first; `.attrs` holds the trace's otherData. `layer` is the MoE layer of
    transfers and of expert computation. SystemExit with one line on a file that is no trace."""
    try:
        raw = json.loads(path.read_text())
        tracks = {e["tid"]: e["args"]["name"] for e in raw["traceEvents"] if e["ph"] == "M"}
        found = [_row(e, tracks) for e in raw["traceEvents"] if e["ph"] == "X"]
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"error: {path} is no trace of specter_core ({error}); record it again") from error
    table = pd.DataFrame(found, columns=COLUMNS).sort_values("start_ms").reset_index(drop=True)
    table.attrs = dict(raw.get("otherData", {}))
    return table


def _row(event: dict, tracks: dict[int, str]) -> dict:
    args = event.get("args", {})
    kind, _, number = event["name"].partition(" ")
    row = {c: args.get(c) for c in COLUMNS}
    row |= {"name": event["name"], "track": tracks[event["tid"]]}
    row |= {"start_ms": event["ts"] / 1e3, "ms": event["dur"] / 1e3}
    if kind in ("experts", "stall"):
        row["layer"] = int(number)
    return row


def computed(table: pd.DataFrame, kind: str) -> pd.DataFrame:
    """Events of the compute track whose name starts so; a GPU's trace has host events of the same names elsewhere."""
    return table[(table["track"] == "compute") & table["name"].str.startswith(kind)]


def windows(table: pd.DataFrame) -> pd.DataFrame:
    """Columns start_ms, draft_end_ms, verify_ms, end_ms, steps: one row per window with a draft."""
    steps = computed(table, "draft step")
    passes = table[table["name"] == "verify"]
    rows = []
    for verify in passes.itertuples():
        before = rows[-1]["end_ms"] if rows else -1.0
        own = steps[(steps["start_ms"] > before) & (steps["start_ms"] < verify.start_ms)]
        if len(own):
            last = own.iloc[-1]
            rows.append(
                {
                    "start_ms": own["start_ms"].iloc[0],
                    "draft_end_ms": last["start_ms"] + last["ms"],
                    "verify_ms": verify.start_ms,
                    "end_ms": verify.start_ms + verify.ms,
                    "steps": len(own),
                }
            )
    return pd.DataFrame(rows, columns=["start_ms", "draft_end_ms", "verify_ms", "end_ms", "steps"])


def full_window(table: pd.DataFrame) -> int:
    """Index of the window to show: the one of median length among those of full depth, the first window apart."""
    found = windows(table)
    if found.empty:
        raise SystemExit("error: the trace holds no window with a draft; record it with --depth of at least 1")
    full = found[found["steps"] == found["steps"].max()]
    full = full.iloc[1:] if len(full) > 1 else full
    lengths = (full["end_ms"] - full["start_ms"]).sort_values(kind="stable")
    return int(lengths.index[(len(lengths) - 1) // 2])


def numbered(table: pd.DataFrame, index: int) -> int:
    """A window's number in its run, from 1; a trace that was cut begins with a later one."""
    return index + 1 + int(table.attrs.get("first_window", 0))


def between(table: pd.DataFrame, start_ms: float, end_ms: float) -> pd.DataFrame:
    """Events that begin in [start, end), times from start."""
    own = table[(table["start_ms"] >= start_ms) & (table["start_ms"] < end_ms)]
    return own.assign(start_ms=own["start_ms"] - start_ms)


def bars(axis: Axes, rows: pd.DataFrame, y: float, colour: str | Sequence[str], height: float = 0.62) -> None:
    """One box per event on line y. White edges part wide boxes; narrow ones would vanish behind them."""
    if rows.empty:
        return
    length = (rows["start_ms"] + rows["ms"]).max() - rows["start_ms"].min()
    for wide, edge in ((True, "white"), (False, colour)):
        own = rows[(rows["ms"] > 0.008 * length) == wide]
        spans = list(zip(own["start_ms"], own["ms"], strict=True))
        axis.broken_barh(spans, (y - height / 2, height), facecolors=colour, edgecolor=edge, linewidth=0.3)


def caption(table: pd.DataFrame, which: str) -> str:
    """What was run, from the trace's otherData; whatever it lacks is left out."""
    about = table.attrs
    parts = [f"one request, {which}"]
    for name, label in (
        ("model", "model"),
        ("weights", "weights"),
        ("variant", "variant"),
        ("slots", "slots per layer"),
        ("depth", "K"),
        ("link", "link"),
        ("device", "device"),
    ):
        if about.get(name) is not None:
            value = style.model_label(Path(str(about[name])).name) if name == "model" else about[name]
            parts.append(f"{label} {value}")
    return "; ".join(parts)


def on_cpu(table: pd.DataFrame) -> bool:
    return table.attrs.get("device", "cpu") == "cpu"


def main(draw: Callable[..., Figure], name: str, orders: Sequence[str] = ("expertwise",)) -> int:
    """The command line of a trace figure; its exit code."""
    import argparse

    from figures.io import exit_code, show

    parser = argparse.ArgumentParser(prog=f"python -m figures.{name}")
    parser.add_argument("--traces", type=Path, required=True, help="folder with expertwise.json and tokenwise.json")
    parser.add_argument("--out", type=Path, required=True, help="folder for PNG and PDF")
    options = parser.parse_args()

    def body() -> int:
        for order in orders:
            if not (options.traces / f"{order}.json").exists():
                raise SystemExit(f"error: {options.traces} holds no {order}.json; run python -m scripts.record_traces")
        return show(draw(*(events(options.traces / f"{o}.json") for o in orders)), options.out, name)

    return exit_code(body)
