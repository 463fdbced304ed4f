"""Specter as a system of the harness: speculation on, or off (K = 0), or the resident reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from harness.switches import engine_options
from harness.systems.engine_system import EngineSystem


def create(options: Mapping[str, Any]) -> EngineSystem:
    """options: `variant` (default | paper | reference), `named` (what the rows call it, if not that), `encoding` (of
    the experts: plain | nested; harness/encodings.py has settled auto) and any field of EngineOptions, `depth` too."""
    variant = str(options.get("variant", "default"))
    chosen = engine_options(options)
    if "encoding" in options:
        chosen = replace(chosen, experts_encoding=str(options["encoding"]))
    return EngineSystem(chosen, variant=str(options.get("named") or variant), resident=variant == "reference")
