"""depths.json: the K of least mean TPOT per (model, weights, memory, link, device). `sweep=depth` writes it, runs whose
`depths` names it read it."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pandas as pd

from harness.catalogue import ROOT
from harness.cells import DepthKey
from harness.entries import RunConfig
from specter_core.errors import UserError

NAME = "depths.json"
BESIDE = "beside"
DEFAULT = "default"
KEYS = list(DepthKey._fields)


class Choice(NamedTuple):
    """K = argmin of the mean TPOT in ms (ties: the smaller K), K_max the deepest one measured, acceptance the mean over
    all depths, expected = a/(1 - a) draft tokens accepted before the first rejection (infinite at a = 1)."""

    key: DepthKey
    depth: int
    deepest: int
    tpot_ms: float
    acceptance: float
    expected: float

    def line(self) -> str:
        k = self.key
        return (
            f"{k.model} ({k.weights}), {k.memory} memory, link {k.link}, {k.device}: K = {self.depth} "
            f"({self.tpot_ms:.3g} ms), mean acceptance a = {self.acceptance:.4f}, E[A] = a/(1-a) = "
            f"{self.expected:.1f}, K_max = {self.deepest}"
        )


def report(choices: list[Choice]) -> list[str]:
    """One line per choice, and one for the mean over all of them: E[A] motivates K_max, the upper bound of the sweep
    (the paper: 0.9663, 28.7, 32)."""
    rate, deepest = fmean(c.acceptance for c in choices), max(c.deepest for c in choices)
    expected = rate / (1 - rate) if rate < 1 else float("inf")
    fits = "within" if expected <= deepest else "beyond"
    last = f"mean acceptance of all: a = {rate:.4f}, E[A] = {expected:.1f}, {fits} K_max = {deepest}"
    return [*(c.line() for c in choices), last]


def choose(rows: pd.DataFrame) -> list[Choice]:
    """What depths.json is to hold. rows: checked records of a depth sweep, of which those of Specter's default variant
    count; without any those of the only variant there is, and of several others none."""
    variants = _by_variant(rows)
    usual = _usual(variants)
    return _choices(variants[usual]) if usual in variants else []


def beside(rows: pd.DataFrame) -> list[str]:
    """One line per setting of every variant that `choose` leaves out: reported, never written."""
    variants = _by_variant(rows)
    others = {variant: own for variant, own in variants.items() if variant != _usual(variants)}
    return [f"variant {v}, not written: {choice.line()}" for v, own in others.items() for choice in _choices(own)]


def _usual(variants: dict[str, pd.DataFrame]) -> str:
    return DEFAULT if DEFAULT in variants or len(variants) != 1 else next(iter(variants))


def _by_variant(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    rows = rows[(rows["status"] == "ok") & (rows["system"] == "specter") & (rows["K"] > 0) & rows["tpot_ms"].notna()]
    return {str(variant): own for variant, own in rows.groupby("variant")}


def _choices(rows: pd.DataFrame) -> list[Choice]:
    """Of one variant. The mean over the datasets' means (by label) of the prompts' means, as the figure draws it; only
    depths at which every prompt of the setting was measured count."""
    found = []
    for key, block in rows.groupby(KEYS, sort=False):
        prompts = block.groupby(["K", "label", "prompt_id"])["tpot_ms"].mean()
        counts = prompts.groupby("K").size()
        whole = prompts[prompts.index.get_level_values("K").isin(counts[counts == counts.max()].index)]
        means = whole.groupby(["K", "label"]).mean().groupby("K").mean()
        rate = float(block["acceptance"].mean())
        expected = rate / (1 - rate) if rate < 1 else float("inf")
        depths = [int(k) for k in means.index]
        best, deepest = depths[int(means.argmin())], max(depths)
        found.append(Choice(DepthKey(*map(str, key)), best, deepest, float(means.min()), rate, expected))
    return found


def write(path: Path, choices: list[Choice]) -> None:
    """Choices of an earlier run of the same folder stay where this one has none."""
    rows = {tuple(c.key): _row(c) for c in choices}
    if path.exists():
        rows = {tuple(r[k] for k in KEYS): r for r in json.loads(path.read_text())} | rows
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(list(rows.values()), indent=1) + "\n")
    temporary.replace(path)


def chosen_depths(config: RunConfig) -> dict[DepthKey, int]:
    """K by what it holds for; empty where the run asks for none or, with `beside`, where there is no file. UserError
    for a named file that is absent or broken."""
    path = location(config)
    if path is None:
        return {}
    try:
        return {DepthKey(*(str(r[k]) for k in KEYS)): int(r["K"]) for r in json.loads(path.read_text())}
    except OSError as error:
        raise UserError(f"depths={path}: {error.strerror}; python run.py sweep=depth writes one") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"depths={path} is no file of chosen depths; python run.py sweep=depth writes one") from error


def location(config: RunConfig) -> Path | None:
    """The file that a run reads, None where it reads none."""
    if config.depths is None or None not in config.depth:
        return None
    if config.depths != BESIDE:
        return ROOT / config.depths
    path = (ROOT / config.output).parent / "depth-run" / NAME
    return path if path.exists() else None


def _row(choice: Choice) -> dict[str, Any]:
    numbers = {"K": choice.depth, "K_max": choice.deepest, "tpot_ms": round(choice.tpot_ms, 4)}
    numbers |= {"acceptance": round(choice.acceptance, 6)}
    return choice.key._asdict() | numbers
