"""What a sweep sets in each profile (`by_profile` of conf/sweep), as arguments that the command line overrides."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import yaml

from harness import catalogue
from harness.isolated import missing_environment


def with_defaults(arguments: Sequence[str], conf: Path = catalogue.CONF) -> list[str]:
    """The arguments, and one for everything that the chosen sweep sets in the chosen profile and that no argument
    sets. named_models=true when a model was named. UserError for an unknown sweep or profile."""
    typed = {a.lstrip("+").partition("=")[0]: a.partition("=")[2] for a in arguments}
    sweep, profile = typed.get("sweep", "main"), typed.get("profile", "reference")
    for group, name in (("sweep", sweep), ("profile", profile)):
        catalogue.check(group, name, conf)
    chosen = catalogue.load("sweep", sweep, conf).get("by_profile", {}).get(profile, {})
    own = [f"{key}={_text(value)}" for key, value in chosen.items() if key not in typed]
    if sweep == "main" and "system" not in typed and (extra := installed(profile, conf)):
        own.append(f"system={_text([*default_systems(conf), *extra])}")
    return [*arguments, *own, *(["named_models=true"] if "model" in typed else [])]


def default_systems(conf: Path = catalogue.CONF) -> list[str]:
    """Those of conf/config.yaml."""
    listed = yaml.safe_load((conf / "config.yaml").read_text())["defaults"]
    return list(next(entry["system"] for entry in listed if isinstance(entry, dict) and "system" in entry))


def installed(profile: str, conf: Path = catalogue.CONF) -> list[str]:
    """Systems with an environment of their own that the main run takes along where that is here: llama.cpp, and on a
    GPU (profile=paper) vLLM."""
    found = []
    for name in ("vllm", "llama_cpp") if profile == "paper" else ("llama_cpp",):
        entry = catalogue.load("system", name, conf)
        if missing_environment(entry["environment"], entry["make"]) is None:
            found.append(name)
    return found


def _text(value: object) -> str:
    """A number or a list of names or numbers as Hydra reads it."""
    return json.dumps(value, separators=(",", ":")).replace('"', "")
