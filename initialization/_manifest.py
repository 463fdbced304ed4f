"""Strict reading of the asset manifests: unknown or missing fields, wrong types, unsafe paths are refused.

Standard library only and Python >= 3.8.
"""

from __future__ import annotations

import json
import re
from pathlib import Path, PurePosixPath
from typing import Any

from _http import UsageError

FORMAT = 1


class Fields:
    """One JSON object of a manifest, read field by field; `done` refuses what nobody asked for."""

    def __init__(self, raw: Any, where: str) -> None:
        if not isinstance(raw, dict):
            raise UsageError(f"{where}: an object is expected, {type(raw).__name__} found")
        self.where = where
        self._raw: dict[str, Any] = raw
        self._known: list[str] = []

    def get(self, name: str, kind: type, required: bool = True, nullable: bool = False) -> Any:
        """The field's value, None where it may be null or absent."""
        self._known.append(name)
        if name not in self._raw:
            if required:
                raise UsageError(f"{self.where}: the field {name!r} is missing")
            return None
        value = self._raw[name]
        if value is None and (nullable or not required):
            return None
        negative = kind is int and isinstance(value, int) and (isinstance(value, bool) or value < 0)
        if not isinstance(value, kind) or negative:
            found = "null" if value is None else repr(value)[:60]
            raise UsageError(f"{self.where}: {name} has to be of type {kind.__name__}, {found} found")
        return value

    def text(self, name: str, required: bool = True, nullable: bool = False) -> Any:
        return self.get(name, str, required, nullable)

    def count(self, name: str) -> int | None:
        """A number of bytes or things; null (or absent) means unknown."""
        value: int | None = self.get(name, int, required=False)
        return value

    def sha256(self, name: str = "sha256") -> str | None:
        value = self.text(name, required=False)
        if value is not None and not re.fullmatch(r"[0-9a-f]{64}", value):
            raise UsageError(f"{self.where}: {name} has to be 64 hexadecimal digits, {value!r} found")
        return None if value is None else str(value)

    def url(self, name: str = "url", nullable: bool = False) -> str | None:
        value = self.text(name, nullable=nullable)
        if value is not None and not re.match(r"https?://[^/\s]+/\S*$", value):
            raise UsageError(f"{self.where}: {name} has to begin with https://host/, {value!r} found")
        return None if value is None else str(value)

    def path(self, name: str) -> str:
        return safe_path(self.text(name), f"{self.where}: {name}")

    def choice(self, name: str, values: tuple[str, ...]) -> str:
        value = self.text(name)
        if value not in values:
            raise UsageError(f"{self.where}: {name}={value!r} is unknown; known: {', '.join(values)}")
        return str(value)

    def texts(self, name: str, required: bool = True) -> list[str]:
        values = self.get(name, list, required) or []
        if not all(isinstance(v, str) for v in values):
            raise UsageError(f"{self.where}: {name} has to be a list of strings")
        return list(values)

    def objects(self, name: str, required: bool = True) -> list[Fields]:
        values = self.get(name, list, required) or []
        return [Fields(value, f"{self.where}: {name}[{i}]") for i, value in enumerate(values)]

    def done(self) -> None:
        unknown = sorted(set(self._raw) - set(self._known))
        if unknown:
            known = ", ".join(sorted(self._known))
            raise UsageError(f"{self.where}: unknown field {unknown[0]!r}; known: {known}")


def safe_path(value: str, where: str) -> str:
    """A relative path that stays below its folder, whatever a manifest or an index says."""
    parts = PurePosixPath(value).parts
    if not parts or value.startswith("/") or ".." in parts or "\\" in value or "\0" in value:
        raise UsageError(f"{where}: {value!r} is not a path below the output folder")
    return value


def read_manifest(path: Path, items: str) -> list[Fields]:
    """The objects under `items` of a manifest file, each to be read by the caller."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the manifest {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not a JSON manifest: {error}") from error
    top = Fields(raw, str(path))
    version = top.get("format", int)
    if version != FORMAT:
        raise UsageError(f"{path}: format {version} is not known to this tool, which reads format {FORMAT}")
    top.text("comment", required=False)
    found = top.objects(items)
    top.done()
    return found


def select(names: list[str], only: list[str], path: Path) -> list[str]:
    """Names picked by --only (repeated or separated by commas), in the manifest's order; all when empty."""
    doubled = sorted({n for n in names if names.count(n) > 1})
    if doubled:
        raise UsageError(f"{path}: two entries are named {doubled[0]!r}")
    wanted = [n for item in only for n in item.split(",") if n]
    for name in wanted:
        if name not in names:
            raise UsageError(f"--only {name}: not in {path}, which has {', '.join(names)}")
    return [n for n in names if n in wanted] if wanted else list(names)
