"""How each system is drawn: systems.csv of a run, else conf/system; the same colour, order and label in every figure.

Rows whose experts are nested are a system of their own: NAME_nested, labelled "… (nested)". Where a row has no encoding
(older rows of what was not measured) the variant of that name tells. So are rows of the variant `paper`, where a table
has other variants beside it: NAME_paper. What then keeps the name has plain experts, and its label says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

CONF = Path(__file__).resolve().parents[1] / "conf" / "system"
LOOKS = ["label", "colour", "order", "figure"]
NESTED, SUFFIX = "nested", "_nested"
PAPER, PAPER_SUFFIX = "paper", "_paper"
PLAIN = "plain"
COLOURS = {"specter" + SUFFIX: "#661100", "specter" + PAPER_SUFFIX: "#EFA27A"}


def with_systems(rows: pd.DataFrame, systems: Path) -> pd.DataFrame:
    """Rows with system_label, system_colour, system_order, system_figure; systems: a run's systems.csv, which need not
    be there. Systems that neither it nor conf/system knows have these columns empty."""
    known = configured()
    if systems.exists():
        own = pd.read_csv(systems).set_index("system")
        known = own.reindex(columns=LOOKS).combine_first(known)[LOOKS].rename_axis("system")
    rows = rows.drop(columns=[f"system_{name}" for name in LOOKS], errors="ignore")
    rows = rows.merge(known.add_prefix("system_").reset_index(), on="system", how="left")
    return split_nested(split_paper(rows))


def split_nested(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with encoding `nested` under a system name, label and colour of their own, right behind their system."""
    if "encoding" not in rows:
        return rows
    told = rows["encoding"].astype(object).where(rows["encoding"].notna(), rows["variant"])
    return _split(rows, (told == NESTED) & ~rows["system"].str.endswith(SUFFIX), NESTED, 0.5)


def split_paper(rows: pd.DataFrame) -> pd.DataFrame:
    """The same for the variant `paper` of systems that have another variant too."""
    several = rows.groupby("system")["variant"].transform("nunique") > 1
    return _split(rows, (rows["variant"] == PAPER) & several, PAPER, 0.25)


def labels(rows: pd.DataFrame, beside: Iterable[str] = ()) -> dict[str, str]:
    """System -> how it is called. beside: systems that rows need not hold."""
    found = rows.drop_duplicates("system").set_index("system").get("system_label", pd.Series(dtype=object))
    there = {*rows["system"], *beside}
    return {
        str(system): f"{label} ({PLAIN})" if f"{system}{SUFFIX}" in there else str(label)
        for system, label in found.dropna().items()
    }


def _split(rows: pd.DataFrame, own: pd.Series, word: str, behind: float) -> pd.DataFrame:
    if not own.any():
        return rows
    names = rows["system"] + f"_{word}"
    labels = rows["system_label"].fillna(rows["system"]) + f" ({word})"
    return rows.assign(
        system=rows["system"].where(~own, names),
        system_label=rows["system_label"].where(~own, labels),
        system_colour=rows["system_colour"].where(~own, names.map(COLOURS).fillna(rows["system_colour"])),
        system_order=rows["system_order"].where(~own, rows["system_order"] + behind),
    )


def usual_variant(system: str) -> str:
    """The variant that stands for a system: conf/system's."""
    if system.endswith(PAPER_SUFFIX):
        return PAPER
    options = entries().get(system.removesuffix(SUFFIX), {}).get("options", {})
    return str(options.get("named") or options.get("variant", "default"))


@cache
def configured() -> pd.DataFrame:
    """label, colour, order, figure of every file of conf/system, by system."""
    found = entries()
    table = pd.DataFrame([[entry[name] for name in LOOKS] for entry in found.values()], list(found), LOOKS)
    return table.rename_axis("system")


@cache
def entries() -> dict[str, dict[str, Any]]:
    """Every file of conf/system, by system."""
    return {p.stem: {"figure": True} | yaml.safe_load(p.read_text()) for p in sorted(CONF.glob("*.yaml"))}
