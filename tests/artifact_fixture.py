"""A results folder in which every claim of the paper holds, with official weights on a GPU: made-up measurements
around the paper's numbers, for tests of figures, claims and the report."""

from __future__ import annotations

import csv
import itertools
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from records_fixture import LABELS, row

from figures.results import AIMS, KERNELS, ROUTING, TIMINGS
from harness import efficiency
from harness.columns import NAMES
from harness.records import cell

MODELS = ("deepseek_v2_lite", "qwen15_moe", "phi35_moe")
DEPTH = {"deepseek_v2_lite": 16, "qwen15_moe": 8, "phi35_moe": 16}
ACCEPTANCE = {"deepseek_v2_lite": 0.985, "qwen15_moe": 0.955, "phi35_moe": 0.959}
EXPERTS = {"deepseek_v2_lite": 64, "qwen15_moe": 60, "phi35_moe": 16}
SYSTEMS = ("specter", "specmoeoff", "mo_sm", "mo_sc", "transformers", "autoregressive", "vllm", "llama_cpp")
LABELS_OF = {
    "specter": "Specter",
    "specmoeoff": "SpecMoEOff (adapted)",
    "mo_sm": "MO-SM",
    "mo_sc": "MO-SC",
    "transformers": "Transformers",
    "autoregressive": "Autoregressive (K = 0)",
    "vllm": "vLLM",
    "llama_cpp": "llama.cpp",
}
COLOURS = ("#D55E00", "#E69F00", "#0072B2", "#56B4E9", "#009E73", "#999999", "#CC79A7", "#F0E442")
HIGH = {
    "deepseek_v2_lite": (72.2, 99.0, 104.0, 110.0, 344.9, 130.0, 160.0, 120.0),
    "qwen15_moe": (35.3, 66.4, 74.2, 80.0, 258.2, 90.0, 176.6, 110.0),
    "phi35_moe": (163.3, 292.1, 295.1, 300.0, 960.6, 330.0, 297.5, 310.0),
}
LOW = {
    "deepseek_v2_lite": (100.0, 132.0, 138.0, 140.0, 420.0, 160.0, 200.0, 150.0),
    "qwen15_moe": (55.0, 74.0, 80.0, 88.0, 300.0, 100.0, 190.0, 120.0),
    "phi35_moe": (260.0, 346.0, 350.0, 355.0, 1100.0, 370.0, 352.0, 352.0),
}
BATCHES = (1, 2, 4, 8, 16, 32)
TPOT_GROWTH = {"deepseek_v2_lite": (1, 1.62, 1.63, 1.64, 1.645, 1.65), "qwen15_moe": (1, 3.05, 4.0, 5.0, 6.2, 7.37)}
RATE_GROWTH = {"deepseek_v2_lite": (1, 1.3, 2.5, 4.5, 7.0, 9.41), "qwen15_moe": (1, 1.2, 1.7, 2.3, 2.9, 3.54)}
SET_GROWTH = {"deepseek_v2_lite": (1, 1.31, 1.5, 1.65, 1.75, 1.8), "qwen15_moe": (1, 1.52, 1.8, 2.0, 2.2, 2.3)}
LEAD_TPOT, LEAD_RATE = (1.37, 2.0, 3.0, 4.0, 5.0, 6.02), (1.4, 2.0, 2.6, 3.2, 3.89, 3.5)
DIFFICULTY = dict(zip(LABELS, (0.92, 1.06, 0.97, 1.08, 0.97), strict=True))


def base(model: str, system: str, memory: str, label: str, number: int, noise: random.Random) -> dict[str, Any]:
    """A row of the paper's workload with its TPOT (about 1 % noise)."""
    tpot = dict(zip(SYSTEMS, (HIGH if memory == "high" else LOW)[model], strict=True))[system]
    tpot *= DIFFICULTY[label] * noise.uniform(0.99, 1.01)
    depth = DEPTH[model] if system in ("specter", "specmoeoff") else 0
    return row(
        system=system,
        model=model,
        weights="official",
        memory=memory,
        label=label,
        dataset=label.lower(),
        prompt_id=f"{label}-{number}",
        K=depth,
        M=20.0,
        budget_bytes=24_000_000_000 if memory == "high" else 18_000_000_000,
        new_tokens=128,
        ttft_ms=6 * tpot,
        tpot_ms=tpot,
        throughput=1000 / tpot,
        acceptance=min(1.0, ACCEPTANCE[model] * noise.uniform(0.997, 1.003)) if depth else None,
        coverage=0.5,
        coverage_ceiling=0.625,
        access_hit_rate=0.6,
        prefetch_precision=0.9,
        link_utilisation=0.8,
        stall_ms=20 * tpot,
        energy_j=400.0,
        exact_match=True if system == "specter" else None,
        link="native",
        link_rate_bytes_per_s=None,
        device="cuda",
        config_hash=f"{system}-{model}-{memory}",
    )


def main_rows(prompts: int = 2) -> Iterator[dict[str, Any]]:
    noise = random.Random(1)
    for model, memory, system, label in itertools.product(MODELS, ("high", "low"), SYSTEMS, LABELS):
        for number in range(prompts):
            yield base(model, system, memory, label, number, noise)


def depth_rows() -> Iterator[dict[str, Any]]:
    """A parabola over log K with its least value at the paper's K."""
    noise = random.Random(2)
    depths = (2, 4, 6, 8, 12, 16, 20, 24, 32)
    for model, depth, label in itertools.product(MODELS, depths, LABELS):
        own = base(model, "specter", "high", label, 0, noise)
        away = depths.index(depth) - depths.index(DEPTH[model])
        slow = 1 + 0.04 * away**2
        yield own | {"K": depth, "tpot_ms": own["tpot_ms"] * slow, "config_hash": f"depth-{model}-{depth}"}


def batch_rows() -> Iterator[dict[str, Any]]:
    noise = random.Random(3)
    for model, (place, size), label in itertools.product(MODELS[:2], enumerate(BATCHES), LABELS):
        distinct = 12 * SET_GROWTH[model][place]
        for system in ("specter", "specmoeoff", "mo_sm", "transformers"):
            specter = base(model, "specter", "high", label, 0, noise)
            tpot = specter["tpot_ms"] * TPOT_GROWTH[model][place]
            rate = 1000 / specter["tpot_ms"] * RATE_GROWTH[model][place]
            lead = {"specter": 0, "specmoeoff": 1, "mo_sm": 1.2, "transformers": 2}[system]
            if lead:
                weaker = 1 if model == "deepseek_v2_lite" else 0.4
                tpot *= 1 + (LEAD_TPOT[place] - 1) * lead * weaker
                rate /= 1 + (LEAD_RATE[place] - 1) * lead * weaker
            yield specter | {
                "system": system,
                "K": specter["K"] if lead in (0, 1) else 0,
                "B": size,
                "M": 8.0,
                "tpot_ms": tpot,
                "throughput": rate,
                "coverage_ceiling": 8.0 / distinct if system == "specter" else None,
                "distinct_experts": distinct if system == "specter" else None,
                "config_hash": f"batch-{system}-{model}-{size}",
            }


def swept(column: str, values: Iterable[Any], slow: Iterable[float], name: str) -> Iterator[dict[str, Any]]:
    """Specter and MO-SM over another axis, on the first model."""
    noise = random.Random(4)
    for (value, factor), system, label in itertools.product(
        zip(values, slow, strict=True), ("specter", "mo_sm"), LABELS
    ):
        own = base(MODELS[0], system, "high", label, 0, noise)
        tpot = own["tpot_ms"] * factor
        memory = f"{value / 1e9:g} GB" if column == "budget_bytes" else "high"
        yield own | {column: value, "memory": memory, "tpot_ms": tpot, "config_hash": f"{name}-{system}-{value}"}


def ablation_rows() -> Iterator[dict[str, Any]]:
    noise = random.Random(5)
    slow = {
        "default": 1.0,
        "no_prefetch": 1.4,
        "no_fused_kernel": 1.7,
        "no_graphs": 1.5,
        "tokenwise": 1.9,
        "no_hit_first": 1.1,
        "private_kv": 1.03,
    }
    for model, (variant, factor), label in itertools.product(MODELS[:2], slow.items(), LABELS):
        own = base(model, "specter", "high", label, 0, noise)
        yield own | {
            "variant": variant,
            "tpot_ms": own["tpot_ms"] * factor,
            "config_hash": f"ablation-{model}-{variant}",
        }


def kernel_rows() -> Iterator[dict[str, Any]]:
    common = dict.fromkeys(KERNELS) | {"device": "cuda", "weights": "synthetic", "variant": "", "launches": 1}
    tokens = (1, 4, 16, 64, 256)
    speedup = {
        "dense 4096x14336": (3.4, 3.2, 2.6, 1.5, 1.15),
        "dense 8192x8192": (3.5, 3.3, 2.7, 1.6, 1.2),
        "expert 2048x1408": (0.9, 0.95, 1.0, 1.1, 1.1),
        "expert 4096x6400": (1.3, 1.3, 1.25, 1.15, 1.1),
    }
    fp16 = {"dense 4096x14336": 40.0, "dense 8192x8192": 46.0, "expert 2048x1408": 6.0, "expert 4096x6400": 19.0}
    for shape, gains in speedup.items():
        for count, gain in zip(tokens, gains, strict=True):
            us = fp16[shape] * (1 + count / 200)
            yield common | {"shape": shape, "tokens": count, "backend": "fp16", "us": us}
            yield common | {"shape": shape, "tokens": count, "backend": "marlin", "us": us / gain}
    for model, count in itertools.product(MODELS, (1, 2, 4, 8)):
        for variant, us in (("fused", 22.0), ("unfused", 95.0)):
            yield common | {
                "shape": f"moe {model}",
                "tokens": count,
                "backend": "marlin",
                "variant": variant,
                "launches": 2 if variant == "fused" else 12,
                "us": us * (1 + count / 12),
            }


def routing_rows() -> Iterator[dict[str, Any]]:
    noise = random.Random(6)
    common = dict.fromkeys(ROUTING) | {"weights": "official", "device": "cuda"}
    for model in MODELS:
        for (place, label), number in itertools.product(enumerate(LABELS), range(6)):
            value = EXPERTS[model] * (0.45 + 0.03 * place) * noise.uniform(0.98, 1.02)
            yield common | {
                "model": model,
                "kind": "distinct",
                "dataset": label,
                "layer": number,
                "window": 17,
                "value": value,
            }
        for one, other in itertools.combinations_with_replacement(LABELS, 2):
            value = (0.01 if one == other else 0.12 + 0.02 * LABELS.index(other)) * noise.uniform(0.95, 1.05)
            yield common | {"model": model, "kind": "divergence", "dataset": one, "other": other, "value": value}


def timing_rows() -> Iterator[dict[str, Any]]:
    common = {"model": MODELS[0], "weights": "official", "link": "native", "device": "cuda", "git_commit": "unknown"}
    for sweep, minutes in (("main", 20.5), ("depth", 25), ("prefix", 22)):
        yield common | {"sweep": sweep, "minutes": minutes}


def aim_rows() -> Iterator[dict[str, Any]]:
    yield {"aim": "link utilisation", "value": 0.81, "unit": "", "target": ">= 0.7", "met": "true", "git_commit": "abc"}


def trace(order: str) -> dict[str, Any]:
    """Three windows of four draft steps and two MoE layers."""
    rows: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": i, "args": {"name": n}}
        for i, n in enumerate(("compute", "link"))
    ]

    def add(name: str, tid: int, start: float, ms: float, **args: Any) -> None:
        rows.append({"name": name, "ph": "X", "pid": 0, "tid": tid, "ts": start * 1e3, "dur": ms * 1e3, "args": args})

    at = 0.0
    for _ in range(3):
        for token in range(1, 5):
            add("draft step", 0, at, 4.0, token=token)
            at += 4.2
            if token in (2, 3):
                add("plan", 0, at, 0.2, drafted=token)
                add("prefetch 0.1", 1, at, 3.5, priority="prefetch", layer=0, expert=token, bytes=100)
                at += 0.2
        start, calls = at, (1 if order == "expertwise" else 5)
        for layer in (0, 1):
            add(f"attention {layer}", 0, at, 1.0)
            at += 1.1
            for call in range(calls):
                add(f"experts {layer}", 0, at, 6.0, hits=1, late=0, misses=1)
                add(f"demand {layer}.{call}", 1, at, 4.0, priority="demand", layer=layer, expert=call, bytes=100)
                at += 6.1
        add("verify", 0, start - 0.01, at - start, rows=5)
        at += 0.5
    windows = [{"drafted": 4, "tested": 4, "accepted": 4, "committed": 5}] * 2
    windows.append({"drafted": 4, "tested": 3, "accepted": 2, "committed": 3})
    about = {"model": MODELS[0], "weights": "official", "device": "cuda", "depth": 4, "verify": order}
    return {"traceEvents": rows, "otherData": about | {"windows": windows, "link": "native", "slots": 20}}


def write_records(folder: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """folder/records.csv and systems.csv."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "records.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(NAMES)
        writer.writerows([cell(r[name]) for name in NAMES] for r in rows)
    with (folder / "systems.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["system", "label", "colour", "order", "figure"])
        writer.writerows([s, LABELS_OF[s], COLOURS[n], n, True] for n, s in enumerate(SYSTEMS))
    return folder / "records.csv"


def write_table(path: Path, columns: Iterable[str], rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def write_efficiency(folder: Path) -> None:
    """efficiency.csv and its two companions as harness/efficiency.py writes them."""
    lines = []
    for model, memory in itertools.product(MODELS[:2], ("high", "low")):
        own = base(model, "specter", memory, "GK", 0, random.Random(7))
        common = {name: own[name] for name in (*efficiency.KEYS, *efficiency.NAMES)}
        common |= dict.fromkeys(("draft_ms", "verify_ms", "router_wait_ms", "link_busy_ms", "bound_ms"), 10.0)
        common |= {"windows": 8, "committed": 128, "slots": 20.0, "decode_ms": 30.0, "stall_ms": {"miss": 2.0}}
        common |= {"moved": 900, "needed": 5000, "absent": 800, "misses": 90, "late": 40, "lru": 2000, "belady": 1000}
        common |= {"entry_bytes": 17_301_760}
        common |= {"by_layer": [[40, 36, 50], [40, 30, 60]], "by_horizon": {"4": [50, 40, 110], "12": [80, 70, 110]}}
        lines.append(json.dumps(common))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / efficiency.FILE).write_text("\n".join(lines) + "\n")
    efficiency.write(folder)


def write_all(folder: Path) -> Path:
    """Everything that figures and claims read."""
    write_records(folder / "main", main_rows())
    write_records(folder / "depth", depth_rows())
    write_records(folder / "batch", batch_rows())
    budgets = (16e9, 18e9, 20e9, 24e9)
    write_records(folder / "memory", swept("budget_bytes", map(int, budgets), (1.8, 1.4, 1.2, 1.0), "memory"))
    write_records(folder / "prefix", swept("prefix_len", (16, 128, 1024, 4096), (1.0, 1.02, 1.1, 1.3), "prefix"))
    write_records(folder / "ablation", ablation_rows())
    write_table(folder / "kernels.csv", KERNELS, kernel_rows())
    write_table(folder / "routing.csv", ROUTING, routing_rows())
    write_table(folder / "timings.csv", TIMINGS, timing_rows())
    write_table(folder / "aims.csv", AIMS, aim_rows())
    write_efficiency(folder / "main")
    (folder / "traces").mkdir(exist_ok=True)
    for order in ("expertwise", "tokenwise"):
        (folder / "traces" / f"{order}.json").write_text(json.dumps(trace(order)))
    environment = {"device": "cuda", "git_commit": "unknown", "weights": dict.fromkeys(MODELS, "0" * 16)}
    (folder / "main" / "environment.json").write_text(json.dumps(environment))
    return folder
