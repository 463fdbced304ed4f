"""Assets and logs are found in the workspace that SPECTER_WORK names, else in the checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import assets, catalogue, weights
from harness.config import model_entry
from harness.dataset_source import DatasetSource
from harness.entries import ModelEntry
from harness.environment import git_commit
from specter_core.errors import UserError


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty workspace, and an empty downloads/ in the checkout's stead."""
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("SPECTER_WORK", str(tmp_path / "work"))
    monkeypatch.setattr(assets, "CHECKOUT_DOWNLOADS", tmp_path / "checkout")
    return tmp_path / "work"


def put(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text('{"question": "How many?", "answer": "3"}\n')
    return folder


def deepseek() -> ModelEntry:
    return model_entry("deepseek_v2_lite", catalogue.load("model", "deepseek_v2_lite"))


@pytest.mark.parametrize("value", [None, ""])
def test_without_a_workspace_everything_lies_in_the_checkout(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is None:
        monkeypatch.delenv("SPECTER_WORK", raising=False)
    else:
        monkeypatch.setenv("SPECTER_WORK", value)
    assert assets.roots() == (catalogue.ROOT / "downloads",)
    assert assets.output_option() == ""
    assert assets.worker_logs(Path("outputs/main-run")) == Path("outputs/main-run/workers")


def test_a_workspace_that_is_no_folder_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECTER_WORK", str(tmp_path / "typo"))
    with pytest.raises(UserError, match="typo is no folder; make it with mkdir -p"):
        assets.roots()


def test_a_dataset_is_taken_from_the_first_root_that_has_it(work: Path, tmp_path: Path) -> None:
    line = DatasetSource(prompts=1, seed=0).absent("gsm8k")
    assert line is not None and f"--output {work / 'downloads'}" in line
    for root in (tmp_path / "checkout", work / "downloads", work / "specter-assets"):
        put(root / "datasets" / "gsm8k", "test.jsonl")
        assert assets.dataset_root("gsm8k") == root
    assert DatasetSource(prompts=1, seed=0).absent("gsm8k") is None


def test_a_checkpoint_is_found_under_the_release_s_name_before_the_hub_s(work: Path) -> None:
    line = weights.absent(deepseek())
    assert line is not None
    assert f"--only deepseek_v2_lite --output {work / 'downloads'}" in line
    assert f"--model {work / 'downloads' / 'deepseek_v2_lite' / 'target'}" in line
    for folder in (work / "downloads" / "deepseek_v2_lite" / "target", work / "specter-assets" / "dsv2-target"):
        put(folder, "config.json", "model.safetensors")
        assert weights.absent(deepseek()) is None
        assert assets.checkpoint_folder("downloads/deepseek_v2_lite/target", "dsv2") == folder
    draft = put(work / "specter-assets" / "dsv2-draft", "model.safetensors")
    assert assets.checkpoint_folder("downloads/deepseek_v2_lite/draft", "dsv2") == draft


def test_a_checkpoint_outside_downloads_is_the_checkout_s(work: Path) -> None:
    assert assets.checkpoint_folder("reference/phimoe_mini") == catalogue.ROOT / "reference/phimoe_mini"


def test_logs_go_to_the_workspace(work: Path) -> None:
    assert assets.worker_logs(Path("outputs/depth-run")) == work / "logs" / "depth-run"


def test_a_release_s_source_names_its_commit_without_a_repository(tmp_path: Path) -> None:
    (tmp_path / "SOURCE_COMMIT").write_text("0123456789abcdef0123456789abcdef01234567\n")
    assert git_commit(tmp_path) == "0123456789ab"
