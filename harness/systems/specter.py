"""Specter as a system of the harness: speculation on, or off (K = 0), or the resident reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from harness.systems.engine_system import EngineSystem, engine_options
from specter_core.errors import UserError

_VARIANTS = ("default", "paper", "reference")


def create(options: Mapping[str, Any]) -> EngineSystem:
    """options: `variant` (default | paper | reference), `named` (what the rows call it, if not that), `encoding` (of
    the experts: plain | nested; harness/encodings.py has settled auto) and any field of EngineOptions, `depth` too."""
    variant = str(options.get("variant", "default"))
    if variant not in _VARIANTS:
        raise UserError(f"variant {variant!r} is unknown, known are {', '.join(_VARIANTS)}; choose one of these")
    own = {name: value for name, value in options.items() if name != "encoding"}
    chosen = engine_options(own, own=("variant", "named"))
    if variant == "paper":
        chosen = chosen.paper()
    if "encoding" in options:
        chosen = replace(chosen, experts_encoding=str(options["encoding"]))
    return EngineSystem(chosen, variant=str(options.get("named") or variant), resident=variant == "reference")
