"""Tables and figures of the README from committed records, so that none is typed by hand.

python -m figures.markdown --results results/h200                       prints the tables
python -m figures.markdown --results results/h200 --update README.md    replaces what stands between their marks, and
                                                                        draws figures into docs/ beside the page
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from figures import looks, memory, redraw, results, stats, style, sweeps
from figures.io import exit_code
from figures.scale import shown

MARK = re.compile(r"(?P<mark><!-- (?P<kind>table|figure): (?P<name>[a-z]+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)
IMAGES = "docs"


def comparison(found: results.Results) -> str:
    """Per setting: mean TPOT in ms of each system by model and memory setting, its standard error, and the TPOT over
    Specter's (geometric mean over the prompts of both, 95 % interval of a paired bootstrap). What was not measured, and
    what exceeded its budget or differs from the target, stands below. Empty string without main rows."""
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
    called = looks.labels(bad, rows["system"])
    lines = []
    for (system, status, reason), block in bad.fillna({"reason": ""}).groupby(["system", "status", "reason"]):
        places = [f"{style.model_label(r.model)} {r.memory} {r.link}" for r in block.itertuples()]
        why = reason.removeprefix("not measured").lstrip(":, ") if status == "not_run" else f"{status}: {reason}"
        lines.append(f"- {called.get(system, system)} ({'; '.join(places)}): {why}")
    return "Not measured:\n\n" + "\n".join(lines) if lines else ""


def _comparison(rows: pd.DataFrame) -> str:
    systems = style.systems(rows)
    cells = [
        (model, memory)
        for model in style.models(rows)
        for memory in style.memories(rows)
        if ((rows["model"] == model) & (rows["memory"] == memory)).any()
    ]
    prompts = {key: stats.per_prompt(own) for key, own in rows.groupby(["system", "model", "memory"])}
    table = stats.average(rows, ["system", "model", "memory"]).set_index(["system", "model", "memory"])
    best = table.groupby(["model", "memory"])["mean"].min()
    base = sweeps.MAIN if sweeps.MAIN in set(rows["system"]) else sweeps.NESTED
    body, both = [], False
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
            own = (base, *cell)
            other = system.system != base and own in table.index
            both |= other
            line.append(text + (_multiple(prompts[key], prompts[own]) if other else ""))
        body.append(line)
    head = ["TPOT, ms", *(f"{style.model_label(model)}, {memory}" for model, memory in cells)]
    label = looks.labels(rows).get(base, base)
    whose = f"{label}'s" if label.isalpha() else f"that of {label}"
    multiple = f" (…x): TPOT over {whose}, geometric mean over common prompts, 95 % interval." if both else ""
    return f"{grid(head, body)}\n{style.caption(rows)}.{multiple}{_remarks(rows)}\n"


def _multiple(system: pd.Series, own: pd.Series) -> str:
    """TPOT over Specter's, " (1.35x [1.21, 1.50])"; no interval below two common prompts. system, own: prompt -> ms."""
    mean, low, high = stats.paired_ratio(system, own)
    if pd.isna(mean):
        return ""
    interval = "" if pd.isna(low) else f" [{low:.2f}, {high:.2f}]"
    return f" ({mean:.2f}x{interval})"


def _remarks(rows: pd.DataFrame) -> str:
    """Cells that exceeded their budget, with the most that they used, and cells with a token of another than the
    target's; a sentence each, or nothing."""
    said = {"beyond its budget": rows["within_budget"].eq(False), "not exact": rows["exact_match"].eq(False)}
    sentences = []
    called = looks.labels(rows)
    for what, flagged in said.items():
        cells = []
        for (system, model, setting), own in rows[flagged].groupby(["system", "model", "memory"], sort=False):
            most = own["peak_device_bytes"].max() / 1e9
            used = f", {most:.1f} of {own['budget_bytes'].max() / 1e9:g} GB" if what.startswith("beyond") else ""
            cells.append(f"{called.get(system, system)} ({style.model_label(model)}, {setting}{used})")
        if cells:
            sentences.append(f" {what[0].upper()}{what[1:]}: {'; '.join(cells)}.")
    return "".join(sentences)


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


def over_budgets(found: results.Results) -> pd.DataFrame:
    """Rows of the memory figure with the native link, else of its first setting."""
    blocks = [rows for _, rows in redraw.budgets(found)]
    native = [rows for rows in blocks if (rows["link"] == "native").any()]
    return next(iter([*native, *blocks]), pd.DataFrame())


def _image(name: str, found: results.Results) -> str:
    figure = FIGURES[name]
    return f"![{figure.title}]({IMAGES}/{name}.png)\n" if len(figure.rows(found)) else ""


class Picture(NamedTuple):
    """A figure of the page."""

    title: str
    rows: Callable[[results.Results], pd.DataFrame]
    draw: Callable[[pd.DataFrame], Figure]


FIGURES = {"memory": Picture("TPOT of every system against the device memory budget", over_budgets, memory.figure)}
TABLES: dict[str, Callable[[results.Results], str]] = {"comparison": comparison, "batch": batch}


def grid(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *body]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def updated(text: str, found: results.Results) -> str:
    """text with every `<!-- table: NAME -->` (or figure) … `<!-- end -->` filled anew. SystemExit with one line for an
    unknown name or one without data."""

    def fill(match: re.Match[str]) -> str:
        kind, name = match["kind"], match["name"]
        known = TABLES if kind == "table" else FIGURES
        if name not in known:
            raise SystemExit(f"error: {kind} {name} is unknown; known: {', '.join(known)}")
        made = TABLES[name](found) if kind == "table" else _image(name, found)
        if not made:
            raise SystemExit(f"error: {found.folder} has no rows for {kind} {name}; name another folder")
        return f"{match['mark']}{made}{match['end']}"

    return MARK.sub(fill, text)


def draw_image(name: str, found: results.Results, folder: Path) -> Path:
    """FOLDER/NAME.png, the same bytes for the same rows."""
    folder.mkdir(parents=True, exist_ok=True)
    path, temporary = folder / f"{name}.png", folder / f"{name}.tmp.png"
    figure = FIGURES[name]
    with style.look():
        figure.draw(figure.rows(found)).savefig(temporary, metadata={"Software": None})
    temporary.replace(path)
    return path


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
    for match in MARK.finditer(text):
        if match["kind"] == "figure":
            draw_image(match["name"], found, options.update.parent / IMAGES)
    if new != text:
        temporary = options.update.with_name(options.update.name + ".tmp")
        temporary.write_text(new, encoding="utf-8")
        temporary.replace(options.update)
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
