"""Specter's switches: options of its entry in conf/system, or `systems.specter.options.<name>=<value>` as typed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from specter_core.errors import UserError
from specter_core.options import EngineOptions

VARIANTS = ("default", "paper", "reference")
OWN = ("variant", "named", "encoding")
TYPED = "systems.specter.options."


def overrides(arguments: Sequence[str]) -> list[str]:
    """The arguments, switches marked as Hydra wants them where conf/system does not list them."""
    return [f"++{argument}" if argument.startswith(TYPED) else argument for argument in arguments]


def engine_options(options: Mapping[str, Any]) -> EngineOptions:
    """The EngineOptions that a system's configured options say, published design included. `variant`: default | paper |
    reference; `named` and `encoding` belong to the harness. UserError for an unknown name or a value that does not
    fit."""
    variant = str(options.get("variant", "default"))
    if variant not in VARIANTS:
        raise UserError(f"variant {variant!r} is unknown, known are {', '.join(VARIANTS)}; choose one of these")
    defaults = {f.name: f.default for f in fields(EngineOptions)}
    chosen = {name: value for name, value in options.items() if name not in OWN}
    for name, value in chosen.items():
        if name not in defaults:
            known = ", ".join(sorted({*defaults, *OWN}))
            raise UserError(f"unknown option {name!r}, known are {known}; correct it")
        if not _fits(value, defaults[name]):
            like = type(defaults[name]).__name__
            raise UserError(f"option {name}={value} is no {like}; give one like its default, {defaults[name]}")
    built = EngineOptions(**chosen)
    return built.paper() if variant == "paper" else built


def _fits(value: Any, default: Any) -> bool:
    if isinstance(default, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is type(default)
