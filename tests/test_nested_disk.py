"""Nested experts on disk: a second start has the same experts and codes; damage and other sources are noticed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from specter_core import opening
from specter_core.assembly import build_engine
from specter_core.errors import UserError
from specter_core.nested.disk import CARD, EXPERTS
from specter_core.opening import LoadedModel, open_model
from specter_core.options import EngineOptions
from specter_core.types import Request

MODEL = Path(__file__).resolve().parents[1] / "reference" / "phimoe_mini"


def text(model: LoadedModel) -> list[int]:
    with build_engine(model, EngineOptions(depth=2, context_tokens=32), slots_per_layer=2) as engine:
        return engine.generate([Request("r", tuple(range(5, 12)), 4, ignore_eos=True)]).results[0].tokens


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    folder = tmp_path / "kept"
    with open_model(MODEL, encoding="nested", nested_dir=folder):
        pass
    return folder


def test_a_second_start_reads_what_the_first_encoded(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_model(MODEL, encoding="nested") as first:
        assert first.draft is not None
        entries, codes, wanted = first.store.segment.clone(), first.draft.gate_up.codes.clone(), text(first)
    monkeypatch.setattr(opening, "fill_host_store", None)
    monkeypatch.setattr(opening, "nested_store", None)
    with open_model(MODEL, encoding="nested", nested_dir=kept) as again:
        assert again.draft is not None
        assert torch.equal(again.store.segment, entries) and torch.equal(again.draft.gate_up.codes, codes)
        assert text(again) == wanted


def test_damaged_and_short_files_are_refused_with_the_remedy(kept: Path) -> None:
    path = kept / EXPERTS
    whole = path.read_bytes()
    path.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    with pytest.raises(UserError, match=r"damaged.*delete"):
        open_model(MODEL, encoding="nested", nested_dir=kept)
    path.write_bytes(whole[:-1])
    with pytest.raises(UserError, match=f"{len(whole) - 1} bytes, expected {len(whole)}"):
        open_model(MODEL, encoding="nested", nested_dir=kept)


def test_what_an_older_version_wrote_is_made_anew(kept: Path) -> None:
    card = json.loads((kept / CARD).read_text())
    (kept / CARD).write_text(json.dumps({**card, "version": card["version"] - 1}))
    (kept / EXPERTS).write_bytes(b"another format")
    with open_model(MODEL, encoding="nested", nested_dir=kept):
        pass
    assert json.loads((kept / CARD).read_text()) == card


def test_what_was_made_from_another_draft_is_made_anew(kept: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(MODEL / "draft", draft)
    os.utime(next(draft.glob("*.safetensors")), ns=(1, 1))
    before = json.loads((kept / CARD).read_text())["source"]
    with open_model(MODEL, draft, encoding="nested", nested_dir=kept):
        pass
    assert json.loads((kept / CARD).read_text())["source"] != before
