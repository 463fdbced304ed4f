"""Model families, one file each. A file is found by its being here; adding one touches nothing else."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from typing import Any, cast

from specter_core.errors import UserError
from specter_core.model.family import Family


@cache
def all_families() -> tuple[Family, ...]:
    """Every family in this folder, by file name."""
    modules = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return tuple(cast(Family, importlib.import_module(f"{__name__}.{name}").FAMILY) for name in modules)


def family_named(name: str) -> Family:
    """The family that a ModelConfig names."""
    return next(family for family in all_families() if family.name == name)


def family_for(raw: Mapping[str, Any]) -> Family:
    """The family of a `config.json`: by architecture, else by model_type. UserError lists the known ones."""
    architectures = raw.get("architectures") or []
    for family in all_families():
        if any(architecture in family.architectures for architecture in architectures):
            return family
    if not architectures:
        for family in all_families():
            if raw.get("model_type") in family.model_types:
                return family
    known = ", ".join(name for family in all_families() for name in family.architectures)
    given = ", ".join(map(str, architectures)) or raw.get("model_type")
    raise UserError(f"architecture {given} is not supported, known: {known}; choose one of these models")
