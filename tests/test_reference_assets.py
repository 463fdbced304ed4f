"""reference/ is complete, within its size, and its checksums are current."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

REFERENCE = Path(__file__).resolve().parents[1] / "reference"
MODELS = ("deepseek_v2_mini", "qwen2_moe_mini", "phimoe_mini")


def test_checksums_cover_every_file_and_are_current() -> None:
    listed = dict(
        reversed(line.split(maxsplit=1)) for line in (REFERENCE / "SHA256SUMS").read_text().splitlines() if line
    )
    files = {str(p.relative_to(REFERENCE)) for p in REFERENCE.rglob("*") if p.is_file()} - {"SHA256SUMS"}
    assert set(listed) == files
    for name, expected in listed.items():
        assert hashlib.sha256((REFERENCE / name).read_bytes()).hexdigest() == expected, name


@pytest.mark.parametrize("model", MODELS)
def test_a_model_with_its_draft_is_at_most_16_mb(model: str) -> None:
    size = sum(p.stat().st_size for p in (REFERENCE / model).rglob("*") if p.is_file())
    assert size <= 16_000_000


@pytest.mark.parametrize("model", MODELS)
def test_the_draft_names_its_target_and_its_maker(model: str) -> None:
    card = json.loads((REFERENCE / model / "draft" / "draft_card.json").read_text())
    assert card["method"] == "gptq" and card["gptqmodel_version"] == "7.6.0"
    assert len(card["calibration_sha256"]) == 64
