"""What conf/ offers: the names of each group, and their files as plain dicts, read without composing
anything."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from specter_core.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "conf"
GROUPS = ("model", "dataset", "memory", "system", "sweep", "link", "launcher", "profile")


def names(group: str, conf: Path = CONF) -> list[str]:
    return sorted(p.stem for p in (conf / group).glob("*.yaml"))


def load(group: str, name: str, conf: Path = CONF) -> dict[str, Any]:
    """conf/<group>/<name>.yaml. UserError names the unknown value and the known ones."""
    check(group, name, conf)
    raw = yaml.load((conf / group / f"{name}.yaml").read_text(), _loader())
    return dict(raw or {})


def check(group: str, name: str, conf: Path = CONF) -> None:
    known = names(group, conf)
    if name not in known:
        raise UserError(f"{group}={name} is unknown; known: {', '.join(known)}")


def check_overrides(overrides: Sequence[str], conf: Path = CONF) -> None:
    """Checks every group choice on a command line (`model=a`, `system=[a,b]`) before anything is composed."""
    for override in overrides:
        group, _, value = override.partition("=")
        if group in GROUPS:
            for name in value.strip("[] ").split(","):
                if name or value != "[]":
                    check(group, name.strip(" '\""), conf)


def shown(path: Path) -> str:
    """A path as messages name it: relative to the repository where it lies in it."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def _loader() -> type[yaml.SafeLoader]:
    """YAML 1.1 reads 24.0e9 as text; Hydra reads it as a number, and so does this."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
    )
    return Loader


def headline(group: str, name: str, conf: Path = CONF) -> str:
    """The first comment of a file that is no package line: the command that uses it, and what for."""
    for line in (conf / group / f"{name}.yaml").read_text().splitlines():
        if line.startswith("# ") and not line.startswith("# @package"):
            return line.removeprefix("# ")
    return ""
