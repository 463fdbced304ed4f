"""The paper's claims against a results folder: python -m harness.claims --results DIR [--out FILE]

One line per claim on stdout, everything machine-readable in FILE (default DIR/claims.json); the last line is one
JSON object with the counts. Exit code 0 whatever the verdicts are.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from harness.claim_cells import Cells, Missing, Setting
from harness.claim_data import STAND_INS, Evidence
from harness.claim_rows import Data
from harness.claim_verdict import Claim, Verdict, judge, load
from specter_core.errors import exit_code

results: Any = importlib.import_module("figures.results")

CLAIMS = Path(results.__file__).with_name("claims.yaml")
DRAWS = 300
CONFIDENCE = 0.95
NAN = float("nan")
MAKES = {
    "main": "python run.py",
    "exact": "python run.py",
    "acceptance": "python run.py sweep=depth",
    "working_set": "python run.py sweep=batch",
    "timings": "python run.py and its sweeps",
} | {sweep: f"python run.py sweep={sweep}" for sweep in ("depth", "batch", "kernels", "routing")}
NEEDS = {"depth": "three depths K > 0 of Specter in one setting", "batch": "two batch sizes of one system"}


@dataclass(frozen=True, slots=True)
class Finding:
    """What one claim came to. low, high: 95 % bootstrap interval over prompts (NaN where there is nothing to resample).
    reason: why it was not run, or what narrows it. also: the findings of other settings."""

    claim: Claim
    verdict: Verdict
    value: float = NAN
    low: float = NAN
    high: float = NAN
    weights: str = ""
    link: str = ""
    device: str = ""
    models: str = ""
    reason: str = ""
    also: tuple[Finding, ...] = ()


def evaluate(claims: Sequence[Claim], found: Any, draws: int = DRAWS) -> list[Finding]:
    """One finding per claim: that of the strongest setting (official before synthetic weights, native before paced
    links, CUDA before CPU) in which it can be evaluated. found: a figures.results.Results."""
    data = Data(found)
    return [_strongest(claim, data, draws) for claim in claims]


def _strongest(claim: Claim, data: Data, draws: int) -> Finding:
    findings = []
    reasons: dict[str, None] = {}
    for setting, cells in data.settings(claim.data):
        if "cuda" in claim.needs and setting.device != "cuda":
            reasons[f"needs a CUDA device; rows of {setting.device} say nothing about it"] = None
            continue
        try:
            findings.append(_measure(claim, setting, cells, draws))
        except Missing as missing:
            reasons[str(missing)] = None
    if findings:
        return replace(findings[0], also=tuple(findings[1:]))
    absent = f"no {NEEDS.get(claim.data) or claim.data.replace('_', ' ') + ' data'}; {MAKES[claim.data]} makes it"
    reason = "; ".join(reasons) or absent
    why = data.untold(claim)
    return Finding(claim, Verdict.NOT_RUN, reason=f"{reason}; tried here: {why}" if why else reason)


def _measure(claim: Claim, setting: Setting, cells: Cells, draws: int) -> Finding:
    evidence = Evidence(cells, stand_in=claim.stand_in)
    names = evidence.namespace()
    value = float(_run(claim.value, names))
    trend = bool(_run(claim.trend, names | {"value": value, "paper": claim.paper})) if claim.trend else False
    notes = list(evidence.notes)
    small = sorted(evidence.models_used & set(STAND_INS.values()))
    notes += [f"stand-in {', '.join(small)}"] if small else []
    low, high = _interval(claim.value, evidence, names, draws)
    weights = evidence.weights_used
    return Finding(
        claim,
        judge(claim, value, trend, weights, setting, whole=not notes),
        value,
        low,
        high,
        weights="+".join(sorted(weights)),
        link=setting.link,
        device=setting.device,
        models=", ".join(sorted(evidence.models_used)),
        reason="; ".join(notes),
    )


def _run(expression: str, names: dict[str, object]) -> float:
    """An expression of claims.yaml (our own file) over an Evidence's functions."""
    return float(eval(expression, {"__builtins__": {}} | names))


def _interval(expression: str, evidence: Evidence, names: dict[str, object], draws: int) -> tuple[float, float]:
    """Percentile bootstrap over prompts, paired across systems; NaN where no dataset has two prompts."""
    if draws < 1 or not evidence.resamplable or "exact_share" in expression:
        return NAN, NAN
    rng = np.random.default_rng(0)
    values = []
    for _ in range(draws):
        evidence.resample(rng)
        values.append(_run(expression, names))
    evidence.restore()
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)


def line(finding: Finding) -> str:
    """VERDICT  id  statement: paper …, measured … [low, high]; weights, link, device; reason; other settings."""
    claim = finding.claim
    text = f"{finding.verdict.value:<13} {claim.id}: {claim.statement}: paper {paper_text(claim)}"
    if finding.verdict is not Verdict.NOT_RUN:
        text += f", measured {measured_text(finding)}; weights {finding.weights}"
        text += f", link {finding.link}" if finding.link else ""
        text += f", device {finding.device}"
    text += f"; {finding.reason}" if finding.reason else ""
    return text + "".join(f"; also {also_text(other)}" for other in finding.also)


def also_text(finding: Finding) -> str:
    """What a claim came to in one more setting."""
    where = ", ".join(x for x in (finding.weights, finding.link, finding.device) if x)
    return f"{finding.verdict.value} {with_unit(finding.value, finding.claim.unit)} ({where})"


def paper_text(claim: Claim) -> str:
    if isinstance(claim.paper, Sequence):
        return f"{claim.paper[0]:g}-{with_unit(claim.paper[1], claim.unit)}"
    sign = {"above": "> ", "below": "< "}.get(claim.relation, "")
    return sign + with_unit(claim.paper, claim.unit)


def measured_text(finding: Finding) -> str:
    interval = "" if math.isnan(finding.low) else f" [{finding.low:.4g}, {finding.high:.4g}]"
    return with_unit(finding.value, finding.claim.unit) + interval


def with_unit(value: float, unit: str) -> str:
    if unit == "x":
        return f"{value:.4g}x"
    return f"{value:.4g}" + (f" {unit}" if unit and unit != "share" else "")


def as_json(findings: Sequence[Finding]) -> dict[str, object]:
    """JSON-ready: counts per verdict, and every finding with its claim."""
    counts = Counter(f.verdict.value for f in findings)
    return {"counts": {v.value: counts[v.value] for v in Verdict}, "claims": [_record(f) for f in findings]}


def _record(finding: Finding) -> dict[str, object]:
    record: dict[str, object] = {"id": finding.claim.id, "verdict": finding.verdict.value}
    record |= {k: v for k, v in asdict(finding.claim).items() if k != "id"}
    for name in ("value", "low", "high"):
        number = getattr(finding, name)
        record["measured" if name == "value" else name] = None if math.isnan(number) else number
    record["expression"] = record.pop("value")
    record |= {name: getattr(finding, name) for name in ("weights", "link", "device", "models", "reason")}
    record["also"] = [_record(f) for f in finding.also]
    return record


def write(path: Path, findings: Sequence[Finding]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(as_json(findings), indent=1) + "\n")
    temporary.replace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0."""
    parser = argparse.ArgumentParser(prog="python -m harness.claims", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, required=True, help="folder with records.csv and other tables below it")
    parser.add_argument("--out", type=Path, help="JSON file; default RESULTS/claims.json")
    parser.add_argument("--draws", type=int, default=DRAWS, help="bootstrap draws")
    options = parser.parse_args(arguments)
    found = results.read(options.results)
    for problem in found.problems:
        print(f"skipped       {problem}")
    findings = evaluate(load(CLAIMS), found, options.draws)
    print("\n".join(line(f) for f in findings))
    path = options.out or options.results / "claims.json"
    write(path, findings)
    print(json.dumps({"counts": as_json(findings)["counts"], "claims": len(findings), "out": str(path)}))
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
