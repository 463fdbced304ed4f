"""vLLM and llama.cpp on one GPU, full-size shapes, in one command:

    python -m scripts.gpu.run_serving_baselines --system llama_cpp --python PATH --models qwen15_moe \
        --ids .work/prompt_ids/prompts.json --out outputs/serving --limit-s 300

Of every model in each memory setting: the placement (llama.cpp: experts, layers) or offloader (vLLM: uva, prefetch)
that wins as a rule, then everything on the device, then the other one. Rows go to DIR/measured/records.csv as they
come; at the end the faster variant of every cell is in DIR/records.csv and all of them are in DIR/placements.csv.
--limit-s: no request is begun when so much time has passed. Run again with the same --out, it goes on where it
stopped, and measures again what failed.

--tokens FILE: the target's own greedy tokens of a run on the same weights (reference_tokens.jsonl of a comparison), for
exact_match; --report with it fills exact_match of what was measured before there was such a file, on any machine.

A machine without internet gets the engines' packages as files: serving_pack.sh beside this makes them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness import catalogue, environment, gpu_guard
from harness.cells import Skip, expand
from harness.config import run_config
from harness.entries import RunConfig, SystemEntry
from harness.grid import PlannedGroup, RunPlan, _planned, plan_run
from harness.launch import seats
from harness.measure import Measurement
from harness.prompt_ids import IdSource
from harness.records import RecordFile
from harness.reference_tokens import ReferenceTokens
from harness.weights_in_memory import in_memory_spec
from scripts.gpu.serving_report import bring_tokens, report_better
from scripts.gpu.together import Cell, measure_alone, measure_together
from specter_core.errors import UserError

KINDS = {"llama_cpp": ("placement", ("experts", "layers")), "vllm": ("offloader", ("uva", "prefetch"))}
BRIEF_TOKENS, WARMUP_TOKENS = 32, 16


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    out: Path = options.out
    left = None
    try:
        if options.tokens is not None:
            bring_tokens(options.tokens, out / "measured" / "reference_tokens.jsonl")
        if not options.report:
            left = run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        better, everything = report_better(out)
    print(json.dumps({"out": str(out), "left": left, "better": better, "all": everything}))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def names(default: str) -> dict[str, Any]:
        return {"type": lambda text: [t for t in text.split(",") if t], "default": default.split(","), "metavar": "A,B"}

    parser.add_argument("--system", choices=sorted(KINDS), required=True)
    parser.add_argument("--python", help="the engine's interpreter; default: that of .venvs/<system>")
    parser.add_argument("--models", **names("deepseek_v2_lite,qwen15_moe"))
    parser.add_argument("--memories", **names("high,low"))
    parser.add_argument("--kinds", type=lambda text: text.split(","), help="resident and placements; default: all")
    parser.add_argument(
        "--brief", type=lambda text: text.split(","), default=[], help="kinds with one prompt, B = 1, 32 tokens"
    )
    parser.add_argument("--write-off", metavar="REASON", help="a row with this reason for everything not measured")
    parser.add_argument("--only", **names("*"), help="patterns of MODEL/KIND/MEMORY/B")
    parser.add_argument(
        "--together", action="store_true", help="start all engines at once, measure one after the other"
    )
    parser.add_argument("--batch", type=lambda text: [int(t) for t in text.split(",")], default=[1])
    parser.add_argument("--datasets", **names("gsm8k,wikitext2,humaneval"), help="one prompt of each")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--weights", default="synthetic")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON", help="an option of the system")
    parser.add_argument("--ids", type=Path, required=True, help="of scripts/prepare_prompt_ids.py")
    parser.add_argument("--tokens", type=Path, help="reference_tokens.jsonl of an earlier run")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, default=1e9)
    parser.add_argument("--load-timeout-s", type=float, default=240.0)
    parser.add_argument("--report", action="store_true", help="measure nothing, write the two files again")
    parser.add_argument("--no-guard", action="store_true", help="measure although another process may use the card")
    return parser


def entries(options: argparse.Namespace) -> Iterator[SystemEntry]:
    """The system as conf/ has it, once per thing to measure, in the order of their worth."""
    option, kinds = KINDS[options.system]
    given = {key: json.loads(value) for key, _, value in (text.partition("=") for text in options.set)}
    given["python"] = options.python
    for kind in options.kinds or (kinds[0], "resident", *kinds[1:]):
        name = f"{options.system}_resident" if kind == "resident" else options.system
        entry = SystemEntry(name=name, **catalogue.load("system", name))
        own = {} if kind == "resident" else {option: kind}
        yield replace(entry, options={**entry.options, **given, **own})


def run(options: argparse.Namespace) -> int:
    """Measures what is not recorded yet; returns how many rows are left."""
    until = time.monotonic() + options.limit_s
    measured = options.out / "measured"
    measured.mkdir(parents=True, exist_ok=True)
    records = RecordFile(measured / "records.csv", _notice)
    commit = environment.git_commit()
    captured: dict[str, Any] = {}
    cells: list[tuple[int, Cell]] = []
    for model in options.models:
        for rank, entry in enumerate(entries(options)):
            config = _config(options, model, entry)
            source = IdSource(options.ids, prompts=config.prompts)
            plan = _unmeasured(config, source) if options.write_off else plan_run(config, source)
            if not options.write_off:
                captured = captured or _environment(measured / "environment.json", plan.device, commit)
                hashes = {name: spec.weights_hash for name, spec in plan.models.items()}
                environment.write(measured / "environment.json", captured | {"weights": hashes})
            measurement = Measurement(
                config=config, records=records, reference=ReferenceTokens(measured / "reference_tokens.jsonl"),
                logs=measured / "workers", git_commit=commit, notice=_notice, advance=lambda _: None, until=until,
            )  # fmt: skip
            cells += [
                (rank, Cell(measurement, p, source.warmup(p.model, p.group.setting.prefix_tokens)))
                for p in plan.groups
                if measurement.unfinished(p) and wanted(options, p)
            ]
    gpu = seats(plan.device, 1 if plan.device == "cuda" else None)[0]
    if plan.device == "cuda" and not (options.no_guard or options.write_off):
        gpu_guard.check_free(gpu)
    if options.together:
        measure_together([cell for _, cell in sorted(cells, key=lambda ranked: ranked[0])], gpu, _notice)
    for cell in () if options.together else (cell for _, cell in cells):
        if options.write_off:
            for batch in cell.measurement.unfinished(cell.planned):
                cell.measurement.write_off(cell.planned, batch, options.write_off)
        else:
            measure_alone(cell, gpu, _notice)
    return sum(len(set(cell.planned.keys) - records.done) for _, cell in cells)


def _unmeasured(config: RunConfig, source: IdSource) -> RunPlan:
    """The plan of a GPU machine, made on another one: nothing is generated or looked for."""
    specs = {entry.name: in_memory_spec(entry) for entry in config.models}
    here: dict[str, str | None] = dict.fromkeys(config.datasets)
    skips: list[Skip] = []
    blocks = [
        [_planned(group, config, source, specs[group.setting.model.name], "cuda", here, skips) for group in block]
        for block in expand(config, "cuda").blocks
    ]
    return RunPlan("cuda", specs, blocks, skips)


def wanted(options: argparse.Namespace, planned: PlannedGroup) -> bool:
    """Whether --only names the cell."""
    chosen = planned.group.system.options
    kind = "resident" if chosen["variant"] == "resident" else chosen[KINDS[options.system][0]]
    cell = f"{planned.model.name}/{kind}/{planned.memory.label}/{planned.memory.batch}"
    return any(fnmatch(cell, pattern) for pattern in options.only)


def _environment(path: Path, device: str, commit: str) -> dict[str, Any]:
    """That of an earlier call on the same machine, or a new one."""
    if path.exists() and (found := dict(json.loads(path.read_text())))["git_commit"] == commit:
        return found
    return environment.capture(device, None, {}, commit)


def _config(options: argparse.Namespace, model: str, entry: SystemEntry) -> RunConfig:
    """What Hydra would compose from conf/ for these options, for one system."""
    memories = options.memories if entry.budgeted else options.memories[:1]
    brief = entry.options.get(KINDS[options.system][0]) in options.brief
    batch = [1] if brief else options.batch
    raw: dict[str, Any] = catalogue.load("sweep", "main") | {
        "profile": "paper", "threads": None, "seed": 0, "fresh": False, "depths": None, "figures": [], "repeats": 1,
        "warmup_tokens": WARMUP_TOKENS,
        "models": {model: catalogue.load("model", model)},
        "systems": {},
        "memories": {name: catalogue.load("memory", name) for name in memories},
        "links": {"native": catalogue.load("link", "native")},
        "datasets": {n: catalogue.load("dataset", n) for n in options.datasets[: 1 if brief else None]},
        "launcher": catalogue.load("launcher", "local") | {"workers": "system", "restarts": 0},
        "batch": batch, "prompts": max(batch),
        "new_tokens": [BRIEF_TOKENS if brief else options.new_tokens],
        "weights": options.weights, "device": options.device, "output": str(options.out / "measured"),
    }  # fmt: skip
    raw.pop("by_profile", None)
    raw["launcher"]["load_timeout_s"] = options.load_timeout_s
    return replace(run_config(raw), systems=[entry])


def _notice(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
