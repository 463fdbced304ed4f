"""A claim, and the verdict that a measured value earns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from harness.claim_cells import Setting

RELATIONS = ("about", "within", "above", "below")


class Verdict(Enum):
    CONFIRMED = "CONFIRMED"
    TREND = "TREND"
    CALIBRATED = "CALIBRATED"
    NOT_CONFIRMED = "NOT CONFIRMED"
    NOT_RUN = "NOT RUN"


@dataclass(frozen=True, slots=True)
class Claim:
    """One line of figures/claims.yaml after `each` is expanded; that file says what the fields mean."""

    id: str
    statement: str
    source: str
    data: str
    value: str
    paper: float | Sequence[float]
    relation: str = "about"
    tolerance: float = 0.1
    trend: str = ""
    unit: str = ""
    needs: Sequence[str] = ()
    stand_in: bool = True
    fitted: bool = False

    def __post_init__(self) -> None:
        assert self.relation in RELATIONS, self.relation
        assert (self.relation == "within") == isinstance(self.paper, list), self.id

    def holds(self, value: float) -> bool:
        """Whether a value is within tolerance of the paper's, or on the stated side of it."""
        if isinstance(self.paper, Sequence):
            low, high = self.paper
            return low * (1 - self.tolerance) <= value <= high * (1 + self.tolerance)
        if self.relation == "above":
            return value > self.paper
        if self.relation == "below":
            return value < self.paper
        return abs(value - self.paper) <= self.tolerance * abs(self.paper) + 1e-9


def load(path: Path) -> list[Claim]:
    """The claims of a YAML file, `each` expanded."""
    claims = []
    for entry in yaml.safe_load(path.read_text()):
        for values in entry.pop("each", [{}]):
            fields = {k: _filled(v, values) for k, v in entry.items()}
            fields |= {k: v for k, v in values.items() if k in Claim.__dataclass_fields__}
            claims.append(Claim(**fields))
    assert len({c.id for c in claims}) == len(claims), "ids repeat"
    return claims


def judge(claim: Claim, value: float, trend: bool, weights: set[str], setting: Setting, *, whole: bool) -> Verdict:
    """trend: whether the same order holds. weights: kinds of the rows used. whole: every setting, model and baseline
    that the statement speaks of was measured, with the paper's models."""
    if claim.fitted and "synthetic" in weights:
        return Verdict.CALIBRATED
    if claim.holds(value):
        native = setting.link in ("", "native")
        full = whole and weights == {"official"} and native and setting.device == "cuda"
        return Verdict.CONFIRMED if full else Verdict.TREND
    return Verdict.TREND if trend else Verdict.NOT_CONFIRMED


def _filled(field: Any, values: Mapping[str, Any]) -> Any:
    if not isinstance(field, str):
        return field
    for name, value in values.items():
        field = field.replace("{" + name + "}", str(value))
    return field
