"""The report's tables, as text cells."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from harness import catalogue
from harness.summary import summarise

redraw: Any = importlib.import_module("figures.redraw")
sweeps: Any = importlib.import_module("figures.sweeps")

MADE_BY = {
    "main": "figure 14",
    "depth": "figure 7",
    "batch": "figures 15 and 16, table 3",
    "kernels": "figures 10 and 11",
    "routing": "figure 13",
    "ablation": "ablation",
    "memory": "memory",
    "prefix": "prefix",
    "baselines": "figure 14, the baselines alone",
}


REFERENCE_MINUTES = {
    "main": 6,
    "depth": 31,
    "prefix": 8,
    "baselines": 13,
    "batch": 16,
    "routing": 2,
    "ablation": 17,
    "memory": 22,
}
"""What `python run.py plan sweep=NAME` estimates for the reference models on two cores."""
PARTS = {
    "tpot_ms": "ms per token",
    "draft_ms": "draft",
    "router_ms": "waiting for the device",
    "demand_ms": "for demand loads",
    "prefetch_ms": "for prefetches",
    "slot_ms": "for slots",
    "launch_ms": "planning, launching, end of pass",
    "between_ms": "between windows",
    "bound_share": "share of the bound",
    "needed_loads": "experts needed",
    "moved_loads": "moved",
    "lru_loads": "LRU",
    "belady_loads": "Belady",
    "expert_mb": "MB per expert",
    "moved_mb": "MB moved",
    "precision": "plan precision",
    "recall": "plan recall",
    "j_per_token": "J/token",
}
"""Columns of efficiency.csv that the report shows, and their heads."""


BENCH_LINES = 60


class Cells(NamedTuple):
    head: list[str]
    body: list[list[str]]


def speed(rows: pd.DataFrame) -> Cells | None:
    """Means per system and setting, and TPOT over Specter's with its interval."""
    if rows.empty:
        return None
    head = ["model", "memory", "weights, link, device", "B", "prefix", "system", "variant", "K", "n", "failed"]
    head += ["TPOT ms", "over Specter [95 %]", "TTFT ms", "tokens/s", "acceptance", "exact"]
    body = []
    for r in summarise(rows).to_dict("records"):
        ratio = "" if pd.isna(r["ratio"]) else f"{r['ratio']:.3g}"
        if ratio and not pd.isna(r["ratio_low"]) and r["system"] != "specter":
            ratio += f" [{r['ratio_low']:.3g}, {r['ratio_high']:.3g}]"
        line = [str(r["model"]), str(r["memory"]), f"{r['weights']}, {r['link']}, {r['device']}"]
        line += [str(r[c]) for c in ("B", "prefix_len")]
        line += [str(r[c]) for c in ("system", "variant", "K", "n", "failed")]
        line += [_number(r["tpot_ms"]), ratio, _number(r["ttft_ms"]), _number(r["throughput"])]
        body.append([*line, _number(r["acceptance"]), "" if pd.isna(r["exact_share"]) else f"{r['exact_share']:.0%}"])
    return Cells(head, body)


def efficiency(rows: pd.DataFrame) -> Cells | None:
    """What moving experts cost: bytes, link, cache, prefetch, stalls, energy. Coverage also over its ceiling."""
    ok = rows[(rows["status"] == "ok") & rows["h2d_bytes"].notna()] if len(rows) else rows
    if ok.empty:
        return None
    head = ["model", "memory", "weights, link, device", "B", "system", "K", "H2D MB/token", "used", "link utilisation"]
    head += ["access hits", "coverage", "of its ceiling", "prefetch precision", "recall", "stall ms/token", "J/token"]
    keys = ["model", "memory", "where", "B", "system", "K"]
    tokens = ok["new_tokens"].clip(lower=1)
    ok = ok.assign(
        where=ok["weights"] + ", " + ok["link"] + ", " + ok["device"],
        mb=ok["h2d_bytes"] / tokens / 1e6,
        used=ok["h2d_bytes_used"] / ok["h2d_bytes"].where(ok["h2d_bytes"] > 0),
        share=ok["coverage"] / ok["coverage_ceiling"],
        stall=ok["stall_ms"] / tokens / ok["B"],
        joules=ok["energy_j"].astype("float64") / tokens / ok["B"],
    )
    columns = ["mb", "used", "link_utilisation", "access_hit_rate", "coverage", "share"]
    columns += ["prefetch_precision", "prefetch_recall", "stall", "joules"]
    means = ok.groupby(keys, sort=False)[columns].mean()
    body = [
        [str(k) for k in key] + [_number(v) for v in line]
        for key, line in zip(means.index, means.to_numpy(), strict=True)
    ]
    return Cells(head, body)


def sources(found: Any) -> Cells:
    """One line per folder of the results: what it holds, and where it was measured. found: figures.results.Results."""
    body = []
    for name in sorted({*found.records, *found.others}):
        rows = found.records.get(name, pd.DataFrame())
        ok = rows[rows["status"] == "ok"] if len(rows) else rows
        files = ([f"{len(ok)} of {len(rows)} requests ok"] if len(rows) else []) + found.others.get(name, [])
        columns = ("model", "system", "weights", "link", "device", "git_commit")
        said = [", ".join(sorted(set(ok[c].dropna().astype(str)))) if len(ok) else "" for c in columns]
        env = found.environments.get(name, {})
        said[-2] = said[-2] or str(env.get("device", ""))
        said[-1] = said[-1] or str(env.get("git_commit", ""))
        body.append([name, "; ".join(files), *said])
    return Cells(["folder", "holds", "models", "systems", "weights", "link", "device", "commit"], body)


def time_by_part(folder: Path) -> Cells | None:
    """Every efficiency.csv below folder (harness/efficiency.py): ms and loads per committed token, by cell."""
    found = [pd.read_csv(path) for path in sorted(folder.glob("**/efficiency.csv"))]
    if not found:
        return None
    table = pd.concat(found, ignore_index=True)
    where = table["weights"] + ", " + table["link"] + ", " + table["device"]
    body = []
    for place, r in zip(where, table.to_dict("records"), strict=True):
        encoding = f", {r['encoding']}" if r["encoding"] not in ("plain", r["variant"]) else ""
        name = f"{r['system']} ({r['variant']}{encoding})"
        line = [str(r["model"]), str(r["memory"]), place, str(r["B"]), name, str(r["K"])]
        line += [_number(r.get(part)) for part in PARTS]
        body.append(line)
    head = ["model", "memory", "weights, link, device", "B", "system", "K", *(PARTS[name] for name in PARTS)]
    return Cells(head, body)


def benches(found: Any) -> list[tuple[str, Cells, int]]:
    """Every other CSV of the results: (path, its first lines, how many it has). found: figures.results.Results."""
    tables = []
    for folder, names in sorted(found.others.items()):
        for name in names:
            path = found.folder / folder / name
            if path.suffix != ".csv" or path.stem in (*found.tables, "claims") or path.stem.endswith("_aims"):
                continue
            try:
                table = pd.read_csv(path)
            except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError):
                continue
            numbers = table.select_dtypes("float").columns
            shown = table.head(BENCH_LINES).astype(object)
            for column in numbers:
                shown[column] = [_number(v) for v in table[column].head(BENCH_LINES)]
            body = [["" if pd.isna(v) else str(v) for v in line] for line in shown.to_numpy()]
            tables.append((f"{folder}/{name}", Cells(list(map(str, table.columns)), body), len(table)))
    return tables


def failures(rows: pd.DataFrame) -> Cells | None:
    """Requests that were not measured, counted by status and reason."""
    bad = rows[rows["status"] != "ok"] if len(rows) else rows
    if bad.empty:
        return None
    counts = bad.fillna({"reason": ""}).groupby(["system", "model", "memory", "link", "status", "reason"]).size()
    return Cells(
        ["system", "model", "memory", "link", "status", "reason", "requests"],
        [[*map(str, key), str(n)] for key, n in counts.items() if isinstance(key, tuple)],
    )


def reruns(found: Any, models: pd.DataFrame) -> Cells:
    """One line per sweep of conf/sweep and per bench. Minutes: of timings.csv where it has the sweep, else the summed
    generation time of this folder's rows of it (loading not included). GiB: 16-bit weights of the largest model in
    them, which host memory and disk hold. A sweep without rows has the reference models' estimate."""
    names = catalogue.names("sweep")
    sizes = models.set_index("model")["model_bytes"] / 2**30
    timings = found.tables["timings"]
    body = []
    for name in names:
        own = redraw.gather(found, name) if name in sweeps.SWEEPS else pd.DataFrame()
        timed = timings[timings["sweep"] == name]["minutes"]
        minutes = f"{timed.mean():.3g}" if len(timed) else _generation_minutes(own)
        if not minutes:
            known = REFERENCE_MINUTES.get(name)
            minutes = f"about {known} (reference models, two cores)" if known else "a few, on a GPU"
        gib = "" if own.empty else f"{sizes.reindex(own['model'].unique()).max():.3g}"
        command = catalogue.headline("sweep", name).split("        ")[0]
        body.append([name, MADE_BY.get(name, ""), command, minutes, gib])
    body += [
        ["traces", "figures 8, 9 and 12", "python -m scripts.record_traces --out outputs/traces-run", "", ""],
        ["figures", "everything that there is data for", "make figures RESULTS=DIR", "", ""],
        ["claims", "the first section", "make verify-claims RESULTS=DIR", "", ""],
        ["report", "this file", "make report RESULTS=DIR", "", ""],
    ]
    return Cells(["part", "makes", "command", "minutes", "GiB"], body)


def _generation_minutes(rows: pd.DataFrame) -> str:
    if rows.empty:
        return ""
    ok = rows[(rows["status"] == "ok") & rows["tpot_ms"].notna()]
    ms = (ok["ttft_ms"] + ok["tpot_ms"] * (ok["new_tokens"] - 1)) / ok["B"]
    return f"{ms.sum() / 60_000:.3g} (generation)"


def _number(value: Any) -> str:
    return "" if pd.isna(value) else f"{value:.4g}"
