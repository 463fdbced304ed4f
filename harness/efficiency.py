"""efficiency.jsonl: what systems did with their time and their link, a line per measured batch; and tables from it.

A batch's line names its row of records.csv and adds the numbers of harness/systems/probe.py: times of the whole batch
in ms, loads in experts.
"""

from __future__ import annotations

import csv
import fcntl
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.system import NAN

FILE = "efficiency.jsonl"
KEYS = ("model", "weights", "memory", "link", "device", "B", "prefix_len", "system", "variant", "encoding")
NAMES = ("config_hash", "dataset", "prompt_id", "repeat", "K", "new_tokens", "tpot_ms", "energy_j")


def append(path: Path, row: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """One line, whole or not at all. row: of records.csv; found: RequestRecord.efficiency."""
    line = {name: row[name] for name in (*KEYS, *NAMES)} | dict(found)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(line) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """Every whole line, the last one of each (config_hash, prompt_id, repeat)."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        found[line["config_hash"], line["prompt_id"], line["repeat"]] = line
    return list(found.values())


def cells(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One line per cell (KEYS and K): sums over its requests, then shares and figures per committed token.

    bound_share: the bound's time over the time taken. *_ms: per committed token, by part: draft; router (the host waits
    for the target's routers, that is for the device); demand, prefetch and slot (waiting for loads that nobody had
    planned, for planned ones under way, for a slot); launch: the rest of verification, planning and launching on the
    host; between: what lies between windows. *_loads: experts per committed token, all layers together, beside what
    LRU and Belady with the same slots would have loaded on the same trace. expert_mb: what one of them takes on the
    link and in a slot, by encoding; moved_mb: megabytes (1e6) per committed token.
    """
    return [dict(zip((*KEYS, "K"), key, strict=True)) | _cell(group) for key, group in _cells(lines).items()]


def by_layer(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Precision and recall of the plans per cell and MoE layer."""
    return _tallies(lines, "layer", lambda line: enumerate(line.get("by_layer", ())))


def by_horizon(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Precision and recall of the M most wanted experts after so many draft tokens, per cell."""
    return _tallies(lines, "drafted", lambda line: ((int(t), v) for t, v in line.get("by_horizon", {}).items()))


def write(folder: Path) -> list[Path]:
    """efficiency.csv, prefetch_by_layer.csv and prefetch_by_horizon.csv from the folder's efficiency.jsonl; those that
    would be empty are left out."""
    lines = read(folder / FILE)
    tables = {
        "efficiency": cells(lines),
        "prefetch_by_layer": by_layer(lines),
        "prefetch_by_horizon": by_horizon(lines),
    }
    written = []
    for name, rows in tables.items():
        if rows:
            path = folder / f"{name}.csv"
            temporary = path.with_suffix(".tmp")
            with temporary.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
                writer.writeheader()
                writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in r.items()} for r in rows)
            temporary.replace(path)
            written.append(path)
    return written


def _cells(lines: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    """Lines by KEYS and K. A system that chooses K itself is one cell, at its mean K: no prompt was measured twice."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for line in lines:
        groups.setdefault(tuple(line[k] for k in KEYS), []).append(line)
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for key, group in groups.items():
        prompts = {(line["dataset"], line["prompt_id"], line["repeat"]) for line in group}
        mean = round(sum(line["K"] for line in group) / len(group))
        for line in group:
            depth = mean if len(prompts) == len(group) else line["K"]
            found.setdefault((*key, depth), []).append(line)
    return found


def _cell(group: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def total(name: str) -> float:
        return float(sum(line[name] for line in group))

    def stall(cause: str) -> float:
        return float(sum(line["stall_ms"].get(cause, 0.0) for line in group))

    tokens, decode = max(1.0, total("committed")), total("decode_ms")
    stalls = {cause: stall(cause) for cause in ("miss", "late", "slot")}
    launch = total("verify_ms") - total("router_wait_ms") - sum(stalls.values())
    layers = max((len(line.get("by_layer", ())) for line in group), default=0)
    per_token = {
        "tpot_ms": decode, "draft_ms": total("draft_ms"), "router_ms": total("router_wait_ms"),
        "demand_ms": stalls["miss"], "prefetch_ms": stalls["late"], "slot_ms": stalls["slot"], "launch_ms": launch,
        "between_ms": decode - total("draft_ms") - total("verify_ms"), "link_busy_ms": total("link_busy_ms"),
        "bound_ms": total("bound_ms"),
    }  # fmt: skip
    loads = {f"{name}_loads": total(name) / tokens for name in ("needed", "moved", "misses", "late", "lru", "belady")}
    planned = [t for line in group for t in line.get("by_layer", ())]
    predicted, right, needed = (sum(t[i] for t in planned) for i in range(3))
    energy = [line["energy_j"] for line in group if line["energy_j"] == line["energy_j"]]
    return {
        "requests": len(group), "committed": int(tokens), "slots": group[0]["slots"], "layers": layers,
        "bound_share": total("bound_ms") / decode if decode else NAN,
        **{name: value / tokens for name, value in per_token.items()},
        **loads, "expert_mb": group[0]["entry_bytes"] / 1e6,
        "moved_mb": sum(line["moved"] * line["entry_bytes"] for line in group) / tokens / 1e6,
        "moved_over_lru": total("moved") / total("lru") if total("lru") else NAN,
        "moved_over_belady": total("moved") / total("belady") if total("belady") else NAN,
        "precision": right / predicted if predicted else NAN, "recall": right / needed if needed else NAN,
        "j_per_token": sum(energy) / sum(line["new_tokens"] for line in group) if len(energy) == len(group) else NAN,
    }  # fmt: skip


def _tallies(
    lines: Sequence[Mapping[str, Any]],
    name: str,
    items: Callable[[Mapping[str, Any]], Iterable[tuple[int, Sequence[int]]]],
) -> list[dict[str, Any]]:
    sums: dict[tuple[Any, ...], list[int]] = {}
    for cell, group in _cells(lines).items():
        for place, tally in (pair for line in group for pair in items(line)):
            key = (*cell, place)
            sums[key] = [a + b for a, b in zip(sums.get(key, [0, 0, 0]), tally, strict=True)]
    return [
        dict(zip((*KEYS, "K", name), key, strict=True))
        | {"planned": p, "right": r, "needed": n, "precision": r / p if p else NAN, "recall": r / n if n else NAN}
        for key, (p, r, n) in sums.items()
    ]
