"""Which encoding Specter's experts have in a cell. `encoding: auto` of conf/system is settled here, before anything is
loaded: hashes, rows and workers know plain and nested only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from harness.entries import ModelEntry, SystemEntry
from harness.system import ModelSpec
from specter_core.options import ENCODINGS, resolve_encoding

OPTION = "encoding"


def settled(
    cells: Iterable[tuple[SystemEntry, int]], device: str, model: ModelEntry, spec: ModelSpec | None
) -> list[tuple[SystemEntry, int]]:
    """(system, K) of one setting with plain or nested in the place of auto; systems without the option as they are.

    spec None: the checkpoint is not here; then conf/model tells, and the draft will be made. A sweep may list the
    variants `plain` and `nested`. Of these only what is not measured anyway stays: nested beside a default that is
    plain, plain beside a default that auto made nested.
    """
    found, defaults = [], {}
    for system, depth in cells:
        wanted = str(system.options.get(OPTION, "plain"))
        if OPTION in system.options:
            chosen = _resolve(wanted, system.options, depth, device, model, spec)
            system = replace(system, options={**system.options, OPTION: chosen})
        if "named" not in system.options:
            defaults[system.name, depth] = system.options, wanted
        found.append((system, depth))
    return [(s, k) for s, k in found if not _needless(s.options, *defaults.get((s.name, k), ({}, "")))]


def _resolve(
    wanted: str, options: Mapping[str, Any], depth: int, device: str, model: ModelEntry, spec: ModelSpec | None
) -> str:
    if spec is None:
        dtype, draft = model.shape.dtype if model.shape else "", True
    else:
        dtype, draft = spec.dtype, spec.draft_path is not None or spec.weights == "synthetic"  # rounded when loaded
    variant = str(options.get("variant", "default"))
    return resolve_encoding(wanted, device=device, dtype=dtype, with_draft=draft and depth > 0, variant=variant)


def _needless(options: Mapping[str, Any], default: Mapping[str, Any], wanted: str) -> bool:
    """Whether a variant is the default in an encoding that nobody needs beside it."""
    name = options.get("named")
    beside = {**default, OPTION: default.get(OPTION, "plain")}
    if name not in ENCODINGS or options != {**beside, OPTION: name, "named": name}:
        return False
    return name == beside[OPTION] or (name == "plain" and wanted != "auto")
