"""docs/: what the pages name exists, and the release's page shows the commands that its test runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
MAP = (ROOT / "docs" / "PAPER_MAP.md").read_text(encoding="utf-8")
TOP = {p.name for p in ROOT.iterdir()}


def named_paths(text: str) -> list[str]:
    """`code` that begins with a name at the top of the repository and is a path."""
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [s for s in spans if " " not in s and s.split("/")[0] in TOP and ("/" in s or "." in s)]


def claims() -> set[str]:
    text = (ROOT / "figures" / "claims.yaml").read_text(encoding="utf-8")
    return {name.strip().strip('"') for name in re.findall(r"^- id: (.*)$", text, re.MULTILINE)}


def test_the_map_names_paths_and_every_one_exists() -> None:
    paths = named_paths(MAP)
    assert len(paths) > 60
    assert [p for p in paths if not (ROOT / p).exists()] == []
    cells = re.findall(r"`([^`\n]+)`", MAP)
    unknown = [c for c in cells if "/" in c and " " not in c and c not in paths and "{" not in c]
    assert unknown == [], "a path whose first folder does not exist"


@pytest.mark.parametrize("page", DOCS, ids=lambda p: p.name)
def test_local_links_and_paths_of_a_page_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [t for t in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in t]
    assert [t for t in links if not (page.parent / t).exists()] == []
    made = ("downloads/", "SHA256SUMS")  # by a user, by a release
    assert [p for p in named_paths(text) if not p.startswith(made) and not (ROOT / p).exists()] == []


def test_every_figure_and_table_is_on_the_map() -> None:
    modules = [p for pattern in ("fig[0-9]*.py", "table*.py") for p in (ROOT / "figures").glob(pattern)]
    assert len(modules) >= 12
    assert [p.name for p in modules if f"figures/{p.name}" not in MAP] == []


def test_the_map_has_every_claim_and_no_other() -> None:
    cells = [row.split("|")[4] for row in MAP.splitlines() if row.startswith("|") and row.count("|") >= 5]
    named = {c for cell in cells for c in re.findall(r"`([^`]+)`", cell)}
    assert named == claims()


def test_the_release_page_has_the_lines_that_are_tested() -> None:
    def lines(text: str) -> list[str]:
        joined = re.sub(r"\\\n\s*", "", text)
        return [line.split("  #")[0].strip() for line in joined.splitlines() if line.strip()]

    source = (ROOT / "tests" / "test_release.py").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "RELEASE.md").read_text(encoding="utf-8")
    tested = [
        m
        for name in ("FIRST_HALF", "SECOND_HALF")
        for m in re.findall(rf'^{name} = """\n(.*?)"""', source, re.M | re.S)
    ]
    shown = re.findall(r"```sh\n(export SPECTER_WORK.*?)```", page, re.DOTALL)
    assert len(tested) == 2 and len(shown) == 1
    assert lines(shown[0])[1:] == lines("".join(tested))
