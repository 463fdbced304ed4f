"""What a sweep sets in each profile (`by_profile` of conf/sweep), as arguments that the command line overrides."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from harness import catalogue


def with_defaults(arguments: Sequence[str], conf: Path = catalogue.CONF) -> list[str]:
    """The arguments, and one for everything that the chosen sweep sets in the chosen profile and that no argument
    sets. named_models=true when a model was named. UserError for an unknown sweep or profile."""
    typed = {a.lstrip("+").partition("=")[0]: a.partition("=")[2] for a in arguments}
    sweep, profile = typed.get("sweep", "main"), typed.get("profile", "reference")
    for group, name in (("sweep", sweep), ("profile", profile)):
        catalogue.check(group, name, conf)
    chosen = catalogue.load("sweep", sweep, conf).get("by_profile", {}).get(profile, {})
    own = [f"{key}={_text(value)}" for key, value in chosen.items() if key not in typed]
    return [*arguments, *own, *(["named_models=true"] if "model" in typed else [])]


def _text(value: object) -> str:
    """A number or a list of names or numbers as Hydra reads it."""
    return json.dumps(value, separators=(",", ":")).replace('"', "")
