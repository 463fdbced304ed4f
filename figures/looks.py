"""How each system is drawn: systems.csv of a run, else conf/system; the same colour, order and label in every figure.

Rows whose experts are nested are a system of their own: NAME_nested, labelled "… (nested)". Where a row has no encoding
(older rows of what was not measured) the variant of that name tells.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

CONF = Path(__file__).resolve().parents[1] / "conf" / "system"
LOOKS = ["label", "colour", "order", "figure"]
NESTED, SUFFIX = "nested", "_nested"
NESTED_COLOURS = {"specter": "#661100"}


def with_systems(rows: pd.DataFrame, systems: Path) -> pd.DataFrame:
    """Rows with system_label, system_colour, system_order, system_figure; systems: a run's systems.csv, which need not
    be there. Systems that neither it nor conf/system knows have these columns empty."""
    known = configured()
    if systems.exists():
        own = pd.read_csv(systems).set_index("system")
        known = own.reindex(columns=LOOKS).combine_first(known)[LOOKS].rename_axis("system")
    rows = rows.drop(columns=[f"system_{name}" for name in LOOKS], errors="ignore")
    rows = rows.merge(known.add_prefix("system_").reset_index(), on="system", how="left")
    return split_nested(rows)


def split_nested(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with encoding `nested` under a system name, label and colour of their own, right behind their system."""
    if "encoding" not in rows:
        return rows
    told = rows["encoding"].astype(object).where(rows["encoding"].notna(), rows["variant"])
    nested = (told == NESTED) & ~rows["system"].str.endswith(SUFFIX)
    if not nested.any():
        return rows
    names = rows["system"]
    colours = names.map(NESTED_COLOURS).fillna(rows["system_colour"])
    labels = rows["system_label"].fillna(names) + " (nested)"
    return rows.assign(
        system=names.where(~nested, names + SUFFIX),
        system_label=rows["system_label"].where(~nested, labels),
        system_colour=rows["system_colour"].where(~nested, colours),
        system_order=rows["system_order"].where(~nested, rows["system_order"] + 0.5),
    )


def usual_variant(system: str) -> str:
    """The variant that stands for a system: conf/system's."""
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
