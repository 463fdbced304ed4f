"""One offline HTML file about a results folder: python -m harness.report --results DIR [--out FILE]

Claims first, then figures and tables (redrawn beside the file), the machine beside the paper's, efficiency, failures,
and how to run each part again. Everything is inside the file: it opens without a network.
"""

from __future__ import annotations

import argparse
import base64
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import pandas as pd
import yaml

from harness import catalogue, claims
from harness.claim_verdict import Verdict, load
from harness.report_environment import environment_lines
from harness.report_tables import Cells, benches, efficiency, failures, reruns, sources, speed, time_by_part
from specter_core.errors import exit_code

redraw: Any = importlib.import_module("figures.redraw")
results: Any = importlib.import_module("figures.results")
table2: Any = importlib.import_module("figures.table2_models")

TEMPLATE = Path(__file__).with_name("report.html.j2")
PLATFORM = catalogue.CONF / "reference_platform.yaml"
TABLES = ("table2_models", "table3_batch32")


class Picture(NamedTuple):
    """A drawn figure, its PNG as a data URI."""

    name: str
    title: str
    uri: str


def write(folder: Path, out: Path, draws: int = claims.DRAWS) -> Path:
    """Redraws the figures of `folder` into out's folder and writes the report; atomically. SystemExit with one line
    when the folder does not exist."""
    found = results.read(folder)
    findings = claims.evaluate(load(claims.CLAIMS), found, draws)
    outcomes = list(redraw.redraw(found, out.parent / "figures"))
    text = render(found, findings, outcomes)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(out.name + ".tmp")
    temporary.write_text(text)
    temporary.replace(out)
    return out


def render(found: Any, findings: Sequence[claims.Finding], outcomes: Sequence[Any]) -> str:
    """The HTML. found: figures.results.Results; outcomes: figures.redraw.Outcome."""
    rows = found.all_records()
    drawn = [picture(o) for o in outcomes if o.paths]
    counts = claims.as_json(findings)["counts"]
    models = table2.models(catalogue.CONF / "model")
    template = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return template.from_string(TEMPLATE.read_text()).render(
        folder=str(found.folder),
        commits=sorted(set(rows["git_commit"].astype(str))) if len(rows) else [],
        cpu=bool(len(rows)) and bool((rows["device"] == "cpu").any()),
        requests=len(rows),
        verdicts=[v.value for v in Verdict],
        counts=counts,
        findings=[_claim(f) for f in findings],
        figures=[p for p in drawn if not p.name.startswith(TABLES)],
        pictures=[p for p in drawn if p.name.startswith(TABLES)],
        missing=[(o.name, o.missing) for o in outcomes if not o.paths],
        problems=found.problems,
        speed=speed(rows),
        efficiency=efficiency(rows),
        parts=time_by_part(found.folder),
        failures=failures(rows),
        aims=_plain(found.tables["aims"]),
        environment=environment_lines(found.environments, yaml.safe_load(PLATFORM.read_text())),
        machines=list(found.environments) or [],
        reruns=reruns(found, models),
        sources=sources(found),
        benches=benches(found),
    )


def picture(outcome: Any) -> Picture:
    """outcome: a drawn figures.redraw.Outcome."""
    module = importlib.import_module(f"figures.{outcome.figure}")
    title = (module.__doc__ or outcome.figure).strip().splitlines()[0]
    setting = outcome.name.removeprefix(outcome.figure).strip("-")
    png = next(p for p in outcome.paths if p.suffix == ".png")
    uri = "data:image/png;base64," + base64.b64encode(png.read_bytes()).decode()
    return Picture(outcome.name, title.rstrip(".") + (f" ({setting})" if setting else ""), uri)


def _claim(finding: claims.Finding) -> dict[str, str]:
    run = finding.verdict is not Verdict.NOT_RUN
    where = ", ".join(x for x in (finding.weights, finding.link, finding.device) if x)
    return {
        "verdict": finding.verdict.value,
        "kind": finding.verdict.name.lower().replace("_", "-"),
        "id": finding.claim.id,
        "statement": finding.claim.statement,
        "source": finding.claim.source,
        "paper": claims.paper_text(finding.claim),
        "measured": claims.measured_text(finding) if run else "",
        "where": where,
        "reason": "; ".join([*filter(None, [finding.reason]), *(f"also {claims.also_text(o)}" for o in finding.also)]),
    }


def _plain(table: pd.DataFrame) -> Cells | None:
    if table.empty:
        return None
    return Cells(list(table.columns), [["" if pd.isna(v) else str(v) for v in row] for row in table.to_numpy()])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.report", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, required=True, help="folder with records.csv and other tables below it")
    parser.add_argument("--out", type=Path, default=Path("outputs/report/report.html"))
    options = parser.parse_args(arguments)
    path = write(options.results, options.out)
    print(json.dumps({"report": str(path), "bytes": path.stat().st_size}))
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
