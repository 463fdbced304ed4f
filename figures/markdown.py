"""Tables of the README from committed records, so that none is typed by hand.

python -m figures.markdown --results results/h200                       prints them
python -m figures.markdown --results results/h200 --update README.md    replaces what stands between their marks
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from figures import redraw, results, stats, style, sweeps
from figures.fig14_tpot import shown

MARK = re.compile(r"(<!-- table: (?P<name>[a-z]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def comparison(found: results.Results) -> str:
    """Per setting: mean TPOT in ms of each system by model and memory setting, its standard error, and the TPOT over
    Specter's on the datasets of both. Empty string without main rows."""
    rows = redraw.gather(found, "main")
    if rows.empty:
        return ""
    absent = _absent(found.all_records(), rows)
    return "\n".join(_comparison(block) for _, block in sweeps.settings(rows)) + (f"\n{absent}\n" if absent else "")


def _absent(every: pd.DataFrame, rows: pd.DataFrame) -> str:
    """What was tried on these models and gave no time, and why."""
    keys = ["system", "model", "memory", "link"]
    columns = set(rows[keys[1:]].itertuples(index=False, name=None))
    beside = [key in columns for key in every[keys[1:]].itertuples(index=False, name=None)]
    bad = style.shown(every[pd.Series(beside, index=every.index, dtype=bool) & (every["status"] != "ok")])
    bad = bad[(bad["B"] == 1) & bad["prefix_len"].isin(rows["prefix_len"])]
    there = set(rows[keys].itertuples(index=False, name=None))
    new = [key not in there for key in bad[keys].itertuples(index=False, name=None)]
    bad = bad[pd.Series(new, index=bad.index, dtype=bool)].drop_duplicates(keys)
    looks = bad.drop_duplicates("system").set_index("system")["system_label"].dropna()
    lines = []
    for (system, status, reason), block in bad.fillna({"reason": ""}).groupby(["system", "status", "reason"]):
        places = [f"{style.model_label(r.model)} {r.memory} {r.link}" for r in block.itertuples()]
        why = reason.removeprefix("not measured").lstrip(":, ") if status == "not_run" else f"{status}: {reason}"
        lines.append(f"- {looks.get(system, system)} ({'; '.join(places)}): {why}")
    return "Not measured:\n\n" + "\n".join(lines) if lines else ""


def _comparison(rows: pd.DataFrame) -> str:
    systems = style.systems(rows)
    cells = [
        (model, memory)
        for model in style.models(rows)
        for memory in style.memories(rows)
        if ((rows["model"] == model) & (rows["memory"] == memory)).any()
    ]
    every = (
        stats.means(rows, ["system", "model", "memory"])
        .set_index(["system", "model", "memory", "label"])["mean"]
        .sort_index()
    )
    table = stats.average(rows, ["system", "model", "memory"]).set_index(["system", "model", "memory"])
    best = table.groupby(["model", "memory"])["mean"].min()
    body = []
    for system in systems:
        line = [system.label]
        for cell in cells:
            key = (system.system, *cell)
            if key not in table.index:
                line.append("–")
                continue
            value = table.loc[key]
            text = shown(value["mean"]) + (f" ± {value['error']:.2g}" if value["error"] > 0 else "")
            text = f"**{text}**" if value["mean"] == best[cell] else text
            own = (sweeps.MAIN, *cell)
            other = system.system != sweeps.MAIN and own in table.index
            line.append(text + (f" ({_multiple(every[key], every[own]):.2f}x)" if other else ""))
        body.append(line)
    head = ["TPOT, ms", *(f"{style.model_label(model)}, {memory}" for model, memory in cells)]
    return f"{grid(head, body)}\n{style.caption(rows)}.\n"


def _multiple(system: pd.Series, own: pd.Series) -> float:
    """TPOT over Specter's on the datasets that both were measured on. system, own: label -> ms, AVG left out."""
    both = pd.DataFrame({"system": system, "own": own}).drop(index="AVG").dropna().mean()
    return float(both["system"] / both["own"])


def batch(found: results.Results) -> str:
    """Per setting: TPOT in ms and tokens/s by batch size. Empty string without rows of a batch sweep."""
    rows = redraw.gather(found, "batch")
    blocks = [_batch(block) for _, block in sweeps.settings(rows, "B")] if len(rows) else []
    return "\n".join(blocks)


def _batch(rows: pd.DataFrame) -> str:
    keys = ["model", "system", "B"]
    tpot, rate = (stats.average(rows, keys, metric).set_index(keys)["mean"] for metric in ("tpot_ms", "throughput"))
    sizes = sorted(rows["B"].unique())
    body = [
        [style.model_label(model), system.label]
        + [
            f"{shown(tpot[model, system.system, b])} / {rate.get((model, system.system, b), float('nan')):.3g}"
            if (model, system.system, b) in tpot.index
            else "–"
            for b in sizes
        ]
        for model in style.models(rows)
        for system in style.systems(rows[rows["model"] == model])
    ]
    return f"{grid(['TPOT ms / tokens/s', '', *(f'B = {b}' for b in sizes)], body)}\n{style.caption(rows)}.\n"


TABLES: dict[str, Callable[[results.Results], str]] = {"comparison": comparison, "batch": batch}


def grid(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *body]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def updated(text: str, found: results.Results) -> str:
    """text with every `<!-- table: NAME -->` … `<!-- end -->` filled anew. SystemExit with one line for an unknown name
    or one without data."""

    def fill(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in TABLES:
            raise SystemExit(f"error: table {name} is unknown; known: {', '.join(TABLES)}")
        made = TABLES[name](found)
        if not made:
            raise SystemExit(f"error: {found.folder} has no rows for table {name}; name another folder")
        return f"{match[1]}{made}{match[3]}"

    return MARK.sub(fill, text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m figures.markdown", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, required=True, help="folder with records.csv below it")
    parser.add_argument("--update", type=Path, help="a Markdown file with marks")
    options = parser.parse_args(arguments)
    found = results.read(options.results)
    if options.update is None:
        print("\n".join(f"{name}\n\n{table}" for name, made in TABLES.items() if (table := made(found))))
        return 0
    text = options.update.read_text(encoding="utf-8")
    new = updated(text, found)
    if new != text:
        temporary = options.update.with_name(options.update.name + ".tmp")
        temporary.write_text(new, encoding="utf-8")
        temporary.replace(options.update)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
