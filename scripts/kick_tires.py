"""Every code path once, in under ten minutes on a CPU: python scripts/kick_tires.py [--out outputs/kick-tires]

Lists and plans, decodes one prompt, checks exactness, runs every system that can run here and every sweep in tiny form,
records traces, draws every figure that there is data for, checks the claims and writes the report. A table of the steps
with their times goes to stderr as they end; the last line on stdout is one JSON object. Exit code 1 when a step fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
MODEL = "deepseek_v2_mini"
TINY = ["prompts=1", "repeats=1", "new_tokens=[8]"]
ONE = [f"model=[{MODEL}]", *TINY]
SYSTEMS = "specter,autoregressive,specmoeoff,mo_sm,mo_sc,transformers,llama_cpp"
LIMIT_MIN = 10


class Step(NamedTuple):
    """arguments of the interpreter; shows: what the step touches."""

    name: str
    shows: str
    arguments: list[str]


def steps(out: Path) -> Iterator[Step]:
    def sweep(name: str, shows: str, *more: str) -> Step:
        return Step(name, shows, ["run.py", f"sweep={name}", f"output={out}/{name}-run", "link=scaled", *more])

    yield Step("doctor", "what this machine has", ["scripts/doctor.py"])
    yield Step("list", "models, datasets, systems", ["run.py", "list"])
    yield Step("plan", "cells, minutes, memory", ["run.py", "plan"])
    prompt = ["--prompt", "The history of the town", "--max-new-tokens", "12", "--depth", "4", "--slots", "3"]
    yield Step(
        "generate",
        "the engine from the command line",
        ["-m", "specter_core", "generate", "--model", f"reference/{MODEL}", *prompt],
    )
    check = ["--model", f"reference/{MODEL}", "--depths", "4", "--slots", "2", "--batches", "2", "--prompts", "2"]
    yield Step(
        "exactness", "Specter against the plain target", ["scripts/check_exactness.py", *check, "--tokens", "12"]
    )
    yield sweep("depth", "figure 7, chosen K", *ONE, "depth=[2,4,8]")
    yield sweep("main", "every system, every family (figure 14)", *TINY, "memory=[high]", f"system=[{SYSTEMS}]")
    yield sweep("baselines", "the memory settings of the appendix", *ONE)
    yield sweep("prefix", "prefix lengths", *ONE, "prefix_tokens=[16,32,64,4096]", "system=[specter]")
    yield sweep("batch", "figures 15 and 16, table 3", *ONE, "batch=[1,2,4]", "system=[specter,mo_sm]", "memory=[wide]")
    yield sweep("ablation", "each mechanism off", *ONE)
    yield sweep("memory", "budgets, nested experts", *ONE, "budgets_gb=[0.0075,0.0095,0.013]", "system=[specter,mo_sm]")
    yield sweep("routing", "figure 13", f"model=[{MODEL}]", "prompts=2", "new_tokens=[16]")
    yield sweep("kernels", "figures 10 and 11 (on a GPU)")
    yield Step(
        "traces",
        "figures 8, 9 and 12",
        ["-m", "scripts.record_traces", "--out", str(out), "--new-tokens", "24"],
    )
    yield Step("validate", "a results folder", ["run.py", "validate", str(out / "main-run")])
    yield Step("figures", "every figure", ["-m", "figures", "--results", str(out), "--out", str(out / "figures")])
    claims = ["--results", str(out), "--out", str(out / "claims.json"), "--draws", "50"]
    yield Step("claims", "every claim of the paper", ["-m", "harness.claims", *claims])
    yield Step("tables", "tables of the README", ["-m", "figures.markdown", "--results", str(out)])
    report = ["--results", str(out), "--out", str(out / "report.html")]
    yield Step("report", "one HTML file", ["-m", "harness.report", *report])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("outputs/kick-tires"))
    parser.add_argument("--only", action="append", default=[], help="only this step (repeatable)")
    args = parser.parse_args(argv)
    out = args.out if args.out.is_absolute() else ROOT / args.out
    (out / "logs").mkdir(parents=True, exist_ok=True)
    chosen = [s for s in steps(out) if not args.only or s.name in args.only]
    start, failed = time.monotonic(), []
    print(f"{'step':<12} {'seconds':>7}  touches (logs: {args.out}/logs)", file=sys.stderr)
    for step in chosen:
        begun = time.monotonic()
        log = out / "logs" / f"{step.name}.log"
        env = dict(os.environ, HF_HUB_OFFLINE="1", PYTHONPATH=str(ROOT))
        with log.open("w") as file:
            done = subprocess.run([sys.executable, *step.arguments], cwd=ROOT, stdout=file, stderr=file, env=env)
        said = f"FAILED with exit code {done.returncode}: {last_line(log)}" if done.returncode else step.shows
        failed += [step.name] if done.returncode else []
        print(f"{step.name:<12} {time.monotonic() - begun:>7.1f}  {said}", file=sys.stderr, flush=True)
    minutes = (time.monotonic() - start) / 60
    if minutes > LIMIT_MIN:
        print(f"took {minutes:.1f} minutes; a machine with two free cores takes less than {LIMIT_MIN}", file=sys.stderr)
    summary = {
        "steps": len(chosen),
        "failed": failed,
        "minutes": round(minutes, 2),
        "report": f"{args.out}/report.html",
    }
    print(json.dumps(summary))
    return 1 if failed else 0


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it printed nothing"


if __name__ == "__main__":
    sys.exit(main())
