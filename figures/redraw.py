"""Every figure and table that a results folder has data for.

python -m figures --results results/h200 --out outputs/figures
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from figures import (
    ablation,
    efficiency,
    fig07_depth,
    fig08_iteration,
    fig09_timeline,
    fig10_kernels,
    fig11_draft_throughput,
    fig12_verification,
    fig13_routing,
    fig14_tpot,
    fig15_batch,
    fig16_working_set,
    io,
    looks,
    memory,
    prefix,
    results,
    sweeps,
    table2_models,
    table3_batch32,
    traces,
)

ROOT = Path(__file__).resolve().parents[1]


class Drawing(NamedTuple):
    """One figure to draw: its file name without suffix, and what draws it."""

    name: str
    draw: Callable[[], Figure]


class Outcome(NamedTuple):
    """A figure drawn (paths) or not (missing: what there is no data of)."""

    figure: str
    name: str
    paths: list[Path]
    missing: str


Plan = Callable[[results.Results], list[Drawing]]


def _records(name: str, draw: Callable[[pd.DataFrame], Figure], sweep: str, free: str | None) -> Plan:
    def plan(found: results.Results) -> list[Drawing]:
        rows = gather(found, sweep)
        blocks = sweeps.settings(rows, free) if len(rows) else iter(())
        return [
            Drawing(name + suffix, lambda block=block: draw(block))
            for suffix, block in blocks
            if sweep == "main" or len(sweeps.SWEEPS[sweep](block))  # one setting alone may be no sweep any more
        ]

    return plan


def gather(found: results.Results, sweep: str) -> pd.DataFrame:
    """The rows of a sweep from every folder of records; a request measured in two folders counts once. Main rows: of
    folders of no sweep if there are any, else those that other sweeps hold at B = 1 and the shortest prefix. Memory
    rows: of sweeps over budgets and of main runs together (sweeps.over_budgets)."""
    if sweep == "main":
        own = [rows for folder, rows in found.records.items() if not sweeps.of_a_sweep(folder)]
        blocks = [sweeps.pooled(own, single=True)]
        if not any((b["system"] == sweeps.MAIN).any() for b in blocks if len(b)):
            blocks = [sweeps.one_workload(rows) for rows in found.records.values()]
    else:
        blocks = [sweeps.SWEEPS[sweep](rows) for rows in found.records.values()]
    blocks = [b for b in blocks if len(b)]
    rows = pd.concat(blocks, ignore_index=True) if blocks else pd.DataFrame()
    if blocks:
        rows = rows.drop_duplicates(["config_hash", "prompt_id", "repeat"], keep="last")
    if sweep == "batch" and blocks:
        return sweeps.asked(rows)
    return sweeps.over_budgets(rows, gather(found, "main")) if sweep == "memory" else rows


def _depth(found: results.Results) -> list[Drawing]:
    """Of folders named after the sweep two depths are enough. Nested experts have a figure of their own."""
    drawings = []
    for system, word in ((sweeps.MAIN, ""), (sweeps.NESTED, f"-{looks.NESTED}")):
        blocks = [
            sweeps.depth(rows, 2 if folder.split("/")[-1].startswith("depth") else 3, system)
            for folder, rows in found.records.items()
        ]
        rows = pd.concat(filled, ignore_index=True) if (filled := [b for b in blocks if len(b)]) else pd.DataFrame()
        for suffix, block in sweeps.settings(rows) if len(rows) else ():
            draw = partial(fig07_depth.figure, block, system)
            drawings.append(Drawing(fig07_depth.NAME + suffix + word, draw))
    return drawings


def budgets(found: results.Results) -> Iterator[tuple[str, pd.DataFrame]]:
    """(suffix, rows) of each memory figure, rows that say what was not measured beside it among them."""
    rows, every = gather(found, "memory"), found.all_records()
    for suffix, block in sweeps.settings(rows) if len(rows) else ():
        bad = memory.beside(every, block)
        yield suffix, pd.concat([block, bad], ignore_index=True) if len(bad) else block


def _memory(found: results.Results) -> list[Drawing]:
    return [Drawing(memory.NAME + suffix, lambda rows=rows: memory.figure(rows)) for suffix, rows in budgets(found)]


def _kernels(name: str, draw: Callable[[pd.DataFrame], Figure], needed: Callable[[pd.DataFrame], pd.DataFrame]) -> Plan:
    def plan(found: results.Results) -> list[Drawing]:
        return list(_by_device(name, draw, needed(found.tables["kernels"])))

    return plan


def routing(found: results.Results) -> pd.DataFrame:
    """Rows of routing.csv; of models that it has none of, the distinct experts that Specter's main rows count."""
    table = found.tables["routing"]
    counted = fig13_routing.counted(gather(found, "main"))
    if counted.empty:
        return table
    there = set(table[["model", "weights", "device"]].itertuples(index=False, name=None))
    new = [key not in there for key in counted[["model", "weights", "device"]].itertuples(index=False, name=None)]
    return pd.concat([t for t in (table, counted[new]) if len(t)], ignore_index=True) if any(new) else table


def _routing(found: results.Results) -> list[Drawing]:
    return list(_by_device(fig13_routing.NAME, fig13_routing.figure, routing(found)))


def _by_device(name: str, draw: Callable[[pd.DataFrame], Figure], rows: pd.DataFrame) -> Iterator[Drawing]:
    blocks = list(rows.groupby(["device", "weights"]))
    for (device, weights), block in blocks:
        suffix = f"-{device}-{weights}" if len(blocks) > 1 else ""
        yield Drawing(name + suffix, lambda block=block: draw(block))


def _traces(name: str, draw: Callable[..., Figure], orders: Sequence[str]) -> Plan:
    def plan(found: results.Results) -> list[Drawing]:
        folders = sorted({p.parent for p in found.traces})
        folders = [f for f in folders if all((f / f"{o}.json").exists() for o in orders)]
        drawings = []
        for number, folder in enumerate(folders):
            paths = [folder / f"{o}.json" for o in orders]
            suffix = f"-{folder.parent.name}" if number else ""
            drawings.append(Drawing(name + suffix, lambda paths=paths: draw(*(traces.events(p) for p in paths))))
        return drawings

    return plan


def _models(found: results.Results) -> list[Drawing]:
    rows = table2_models.models(ROOT / "conf" / "model")
    return [Drawing(table2_models.NAME, lambda: table2_models.figure(rows))] if len(rows) else []


def _efficiency(found: results.Results) -> list[Drawing]:
    blocks = efficiency.settings({name: found.tables[name] for name in results.EFFICIENCY})
    return [
        Drawing(efficiency.NAME + suffix, lambda tables=tables: efficiency.figure(tables)) for suffix, tables in blocks
    ]


def _working_set(found: results.Results) -> list[Drawing]:
    rows = gather(found, "batch")
    blocks = [(s, b) for s, b in sweeps.settings(rows, "B")] if len(rows) else []
    return [
        Drawing(fig16_working_set.NAME + suffix, lambda block=block: fig16_working_set.figure(block))
        for suffix, block in blocks
        if len(fig16_working_set.working_set(block))
    ]


FIGURES: dict[str, tuple[Plan, str]] = {
    fig07_depth.NAME: (
        _depth,
        "records of Specter at three or more depths, two in a folder depth* (python run.py sweep=depth)",
    ),
    fig08_iteration.NAME: (
        _traces(fig08_iteration.NAME, fig08_iteration.figure, ["expertwise"]),
        "traces/expertwise.json (python -m scripts.record_traces)",
    ),
    fig09_timeline.NAME: (
        _traces(fig09_timeline.NAME, fig09_timeline.figure, ["expertwise"]),
        "traces/expertwise.json (python -m scripts.record_traces)",
    ),
    fig10_kernels.NAME: (
        _kernels(fig10_kernels.NAME, fig10_kernels.figure, fig10_kernels.needed),
        "kernels.csv with dense or expert shapes (a GPU bench)",
    ),
    fig11_draft_throughput.NAME: (
        _kernels(fig11_draft_throughput.NAME, fig11_draft_throughput.figure, fig11_draft_throughput.needed),
        "kernels.csv with fused and unfused moe shapes (a GPU bench)",
    ),
    fig12_verification.NAME: (
        _traces(fig12_verification.NAME, fig12_verification.figure, fig12_verification.ORDERS),
        "traces/expertwise.json and tokenwise.json (python -m scripts.record_traces)",
    ),
    fig13_routing.NAME: (
        _routing,
        "routing.csv (python run.py sweep=routing), or records with distinct_experts",
    ),
    fig14_tpot.NAME: (
        _records(fig14_tpot.NAME, fig14_tpot.figure, "main", None),
        "records of two or more systems at one workload (python run.py)",
    ),
    fig15_batch.NAME: (
        _records(fig15_batch.NAME, fig15_batch.figure, "batch", "B"),
        "records at two or more batch sizes (python run.py sweep=batch)",
    ),
    fig16_working_set.NAME: (_working_set, "records of Specter at two or more batch sizes (python run.py sweep=batch)"),
    table2_models.NAME: (_models, "conf/model"),
    table3_batch32.NAME: (
        _records(table3_batch32.NAME, table3_batch32.figure, "batch", "B"),
        "records at two or more batch sizes (python run.py sweep=batch)",
    ),
    ablation.NAME: (
        _records(ablation.NAME, ablation.figure, "ablation", None),
        "records of Specter in three or more variants (python run.py sweep=ablation)",
    ),
    efficiency.NAME: (_efficiency, "efficiency.csv (a run that watches its systems)"),
    memory.NAME: (
        _memory,
        "records at two or more budgets (python run.py sweep=memory)",
    ),
    prefix.NAME: (
        _records(prefix.NAME, prefix.figure, "prefix", "prefix_len"),
        "records at three or more prefix lengths (python run.py sweep=prefix)",
    ),
}


SWEEP_OF = {
    fig07_depth.NAME: "depth",
    fig15_batch.NAME: "batch",
    fig16_working_set.NAME: "batch",
    table3_batch32.NAME: "batch",
    ablation.NAME: "ablation",
    memory.NAME: "memory",
    prefix.NAME: "prefix",
}


def redraw(found: results.Results, out: Path, names: Sequence[str] = ()) -> Iterator[Outcome]:
    """Draws into out as PNG and PDF, one outcome per file drawn, or one that says what a figure misses; `names`: only
    these figures. figures.json in out lists what was drawn."""
    drawn = []
    for figure, (plan, needs) in FIGURES.items():
        if names and figure not in names:
            continue
        drawings = plan(found)
        if not drawings:
            why = found.untold(SWEEP_OF[figure]) if figure in SWEEP_OF else ""
            yield Outcome(figure, figure, [], f"{needs}; tried here: {why}" if why else needs)
        for drawing in drawings:
            outcome = Outcome(figure, drawing.name, io.save(drawing.draw(), out, drawing.name), "")
            drawn.append({"figure": figure, "name": drawing.name, "files": [p.name for p in outcome.paths]})
            yield outcome
    out.mkdir(parents=True, exist_ok=True)
    temporary = out / "figures.json.tmp"
    temporary.write_text(json.dumps(drawn, indent=1) + "\n")
    temporary.replace(out / "figures.json")


def main(arguments: Sequence[str] | None = None) -> int:
    """One line per figure; exit code 0. SystemExit with one line when the results folder does not exist."""
    parser = argparse.ArgumentParser(prog="python -m figures", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, required=True, help="folder with records.csv and other tables below it")
    parser.add_argument("--out", type=Path, default=Path("outputs/figures"), help="folder for PNG and PDF")
    parser.add_argument("--only", action="append", default=[], choices=list(FIGURES), help="draw only this one")
    options = parser.parse_args(arguments)
    found = results.read(options.results)
    for problem in found.problems:
        print(f"skipped  {problem}")
    count = 0
    for outcome in redraw(found, options.out, options.only):
        count += bool(outcome.paths)
        if outcome.paths:
            print(f"drawn    {outcome.name}: {outcome.paths[0]}")
        else:
            print(f"missing  {outcome.name}: {outcome.missing}")
    print(json.dumps({"drawn": count, "out": str(options.out)}))
    return 0
