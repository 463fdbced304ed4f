"""Figure 14 on one GPU with synthetic full-size weights, in one command:

    python -m scripts.gpu.run_fig14 --ids .work/prompt_ids/prompts.json --out outputs/comparison --limit-s 500

{deepseek_v2_lite, qwen15_moe} x {high, low} x {specter, mo_sc, mo_sm, specmoeoff, transformers}, one prompt of each
dataset, 128 tokens, native link and 25 GB/s. Run it again with the same --out and it goes on where it stopped. --sweep
NAME measures a sweep of conf/sweep instead. Needs neither hydra nor pandera; the rows are those of `python run.py` and
pass `python run.py validate DIR`. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness import catalogue, environment, gpu_guard
from harness.config import run_config
from harness.entries import RunConfig
from harness.grid import PlannedGroup, RunPlan, plan_run, reference_system
from harness.launch import seats
from harness.lease import Part, run_model, write_off
from harness.measure import Measurement
from harness.prompt_ids import DATASETS, IdSource
from harness.records import RecordFile
from harness.reference_tokens import ReferenceTokens
from harness.shared_store import shared_store
from specter_core.errors import exit_code

MODELS = ("deepseek_v2_lite", "qwen15_moe")
SYSTEMS = ("specter", "mo_sc", "mo_sm", "specmoeoff", "transformers")
SLOW = "transformers"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    print(json.dumps(_run(options)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def names(default: Sequence[str]) -> dict[str, Any]:
        return {"type": lambda text: [t for t in text.split(",") if t], "default": list(default), "metavar": "A,B"}

    parser.add_argument("--models", **names(MODELS))
    parser.add_argument("--memories", **names(("high", "low")))
    parser.add_argument("--links", **names(("native", "pcie4")))
    parser.add_argument("--systems", **names(SYSTEMS))
    parser.add_argument("--datasets", **names(DATASETS))
    parser.add_argument("--encoding", **names(("plain",)), help="of Specter's experts: plain, nested")
    parser.add_argument("--sweep", default="main", help="a sweep of conf/sweep; its axes replace the ones above")
    parser.add_argument(
        "--also", action="append", default=[], metavar="SYSTEM=JSON",
        help='a variant: its options, with "named": what its rows are called',
    )  # fmt: skip
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON", help="any field of the configuration")
    parser.add_argument("--prompts", type=int, default=1, help="per dataset")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--slow-tokens", type=int, default=6, help=f"new tokens for {SLOW}")
    parser.add_argument("--slow-prompts", type=int, default=1, help=f"datasets for {SLOW}")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--weights", default="synthetic")
    parser.add_argument("--ids", type=Path, required=True, help="of scripts/prepare_prompt_ids.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, default=1e9, help="stop between requests when so much time has passed")
    parser.add_argument("--paced-prompts", type=int, default=10**6, help="datasets with a paced link")
    parser.add_argument("--paced-systems", **names(SYSTEMS), help="systems with a paced link")
    parser.add_argument("--warmup-tokens", type=int, help="new tokens of the prompt that is not measured; default: all")
    parser.add_argument("--write-off", metavar="REASON", help="a row with this reason for everything not measured")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--no-guard", action="store_true", help="measure although another process may use the card")
    return parser


def compose(options: argparse.Namespace, changes: Mapping[str, Any]) -> RunConfig:
    """What Hydra would compose from conf/ for these options."""
    sweep = catalogue.load("sweep", options.sweep)
    by_profile = sweep.pop("by_profile", {}).get("paper", {}) if options.sweep != "main" else {}
    chosen: dict[str, Any] = {
        "model": options.models, "system": options.systems, "memory": options.memories, "link": options.links,
    } | {k: v for k, v in by_profile.items() if k not in ("repeats", "prompts")}  # fmt: skip
    chosen |= {"model": options.models, **changes}
    groups = {"model": "models", "system": "systems", "memory": "memories", "link": "links"}
    raw: dict[str, Any] = {
        "threads": None, "seed": 0, "fresh": False, "prompts": options.prompts, "repeats": options.repeats,
        "new_tokens": [options.new_tokens],
    } | sweep  # fmt: skip
    raw |= {key: value for key, value in chosen.items() if key not in groups}
    raw |= {groups[g]: {name: catalogue.load(g, name) for name in chosen[g]} for g in groups}
    if (specter := raw["systems"].get("specter")) is not None:
        specter["options"] = specter["options"] | {"encoding": "plain"}  # the others: --encoding
    raw |= {
        "profile": "paper", "weights": options.weights, "device": options.device, "output": str(options.out),
        "datasets": {name: catalogue.load("dataset", name) for name in chosen.get("dataset", options.datasets)},
        "launcher": catalogue.load("launcher", "local") | {"workers": "system", "parallel": None},
        "depths": None, "figures": [],
    }  # fmt: skip
    raw.pop("dataset", None)
    encodings = {name: {"encoding": name} for name in options.encoding if name != "plain"}
    raw["variants"] = {k: v for k, v in (raw.get("variants") or {}).items() if k != "plain"} | encodings
    config = run_config(raw)
    config = replace(config, warmup_tokens=options.warmup_tokens)
    also = [_setting(text) for text in options.also]
    plain = {s.name: s for s in reversed(config.systems)}
    more = [replace(plain[n], options={**plain[n].options, **changed}) for n, changed in also if n in plain]
    return replace(config, systems=[*config.systems, *more])


def configurations(options: argparse.Namespace) -> list[RunConfig]:
    """Systems that take 128 tokens in seconds, then the slow one with fewer."""
    changes = dict(_setting(text) for text in options.set)
    whole = compose(options, changes)
    fast = [s for s in whole.systems if s.name != SLOW]
    slow = [s for s in whole.systems if s.name == SLOW]
    found = [replace(whole, systems=fast)] if fast else []
    if slow:
        datasets = dict(list(whole.datasets.items())[: options.slow_prompts])
        native = [link for link in whole.links if link.name == "native"]
        found.append(
            replace(
                whole,
                systems=slow,
                new_tokens=[options.slow_tokens],
                datasets=datasets,
                links=native,
                prompts=1,
                warmup_tokens=1,
            )
        )
    return found


def _setting(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    return key, json.loads(value)


def _run(options: argparse.Namespace) -> dict[str, Any]:
    start = time.monotonic()
    until = start + options.limit_s
    out: Path = options.out
    records = RecordFile(out / "records.csv", _notice)
    reference = ReferenceTokens(out / "reference_tokens.jsonl")
    commit = environment.git_commit()
    configs = configurations(options)
    source = IdSource(options.ids, prompts=options.prompts)
    plans = [(config, _chosen(plan_run(config, source), options)) for config in configs]
    device = plans[0][1].device
    place = seats(device, 1 if device == "cuda" else None)[0]
    if device == "cuda" and not options.no_guard:
        gpu_guard.check_free(place)
    noting = threading.Thread(target=_environment, args=(out, device, plans, commit))  # while the store is filled
    noting.start()
    loads: list[dict[str, Any]] = []
    measurements = [
        Measurement(
            config=config, records=records, reference=reference, logs=out / "workers", git_commit=commit,
            notice=_notice, advance=lambda _: None, until=until, loads=loads,
            guard=not options.no_guard,
        )
        for config in configs
    ]  # fmt: skip
    missing = 0
    for plan in (plan for _, plan in plans):
        for skip in plan.skips:
            _notice(f"skipped: {skip.what}: {skip.reason}")
    for name in options.models:
        parts = [
            Part(measurement, [g for g in plan.groups if g.model.name == name])
            for measurement, (_, plan) in zip(measurements, plans, strict=True)
        ]
        parts = [p for p in parts if p.groups]
        if not parts:
            continue
        run_model(
            parts[0].groups[0].model, parts, source=source, reference=reference_system(), store=shared_store,
            device=device, gpu=place, until=until, seed=0, notice=_notice,
        )  # fmt: skip
        if options.write_off:
            missing += sum(write_off(part, options.write_off) for part in parts)
    noting.join()
    if loads:
        (out / "loads.json").write_text(json.dumps(loads, indent=1) + "\n")
    wanted = {key for _, plan in plans for planned in plan.groups for key in planned.keys}
    done = len(wanted & records.done)
    return {"out": str(out), "rows": done, "left": len(wanted) - done, "written_off": missing,
            "seconds": round(time.monotonic() - start, 1)}  # fmt: skip


def _chosen(plan: RunPlan, options: argparse.Namespace) -> RunPlan:
    """Fewer datasets and systems where the link is paced, as far as the options say so."""

    def kept(planned: PlannedGroup) -> PlannedGroup:
        if planned.memory.link_rate_bytes_per_s is None:
            return planned
        wanted = options.paced_prompts if planned.group.system.name in options.paced_systems else 0
        return planned._replace(prompts=dict(list(planned.prompts.items())[:wanted]))

    blocks = [[p for p in map(kept, block) if p.requests] for block in plan.blocks]
    return replace(plan, blocks=[block for block in blocks if block])


def _environment(out: Path, device: str, plans: Sequence[tuple[RunConfig, RunPlan]], commit: str) -> None:
    hashes = {name: spec.weights_hash for _, plan in plans for name, spec in plan.models.items()}
    path = out / "environment.json"
    if path.exists():  # a run that goes on, on the same machine: the link has been measured
        known = json.loads(path.read_text())
        environment.write(path, known | {"weights": hashes})
    else:
        environment.write(path, environment.capture(device, None, hashes, commit))


def _notice(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(exit_code(main))
