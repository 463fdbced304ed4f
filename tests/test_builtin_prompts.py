"""The prompts that ship with the repository, and the entries of conf/dataset."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from pathlib import Path

import dataset_fixtures as made
import pytest
import yaml

from harness.datasets import NAMES, PromptText, load_texts
from harness.datasets.builtin import FOLDER, STYLE_LABELS

REPO = Path(__file__).resolve().parents[1]
TEXTS = load_texts("builtin", REPO / "downloads")
STYLES = {style: [t for t in TEXTS if t.label == label] for style, label in STYLE_LABELS.items()}


def words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def test_each_of_the_five_styles_has_at_least_ten_prompts_with_ids_in_order() -> None:
    assert sorted(p.stem for p in FOLDER.glob("*.jsonl")) == sorted(STYLE_LABELS)
    for style, texts in STYLES.items():
        assert len(texts) >= 10
        assert [t.prompt_id for t in texts] == [f"builtin-{style}-{i:02d}" for i in range(1, len(texts) + 1)]
        lines = (FOLDER / f"{style}.jsonl").read_text(encoding="utf-8").splitlines()
        assert all(set(json.loads(line)) == {"id", "text"} for line in lines)


@pytest.mark.parametrize("text", TEXTS, ids=lambda t: t.prompt_id)
def test_every_prompt_is_long_enough_for_prefixes_of_64_tokens(text: PromptText) -> None:
    assert len(text.text.split()) >= 60 or len(text.text) >= 200
    # a BPE tokenizer never merges across these pieces, so their number bounds its tokens from below
    assert len(re.findall(r"[A-Za-z]+|\d|[^\sA-Za-z\d]+", text.text)) >= 64
    assert (text.text == text.text.strip(" ") and text.text.isprintable()) or "\n" in text.text


def test_prompts_do_not_begin_alike() -> None:
    openings = Counter(" ".join(words(t.text)[:5]) for t in TEXTS)
    assert [o for o, n in openings.items() if n > 1] == []


@pytest.mark.parametrize("text", STYLES["code"], ids=lambda t: t.prompt_id)
def test_a_code_prompt_is_the_beginning_of_a_python_file(text: PromptText) -> None:
    last = text.text.rstrip().split("\n")[-1]
    deeper = 4 if last.endswith(":") else 0
    body = text.text + " " * (len(last) - len(last.lstrip()) + deeper) + "pass\n"
    if last.strip() == "try:":
        body += " " * (len(last) - len(last.lstrip())) + "finally: pass\n"
    ast.parse(body)


def test_maths_prompts_end_with_the_question_and_choice_prompts_offer_four_answers() -> None:
    assert all(t.text.endswith("?") and re.search(r"\d", t.text) for t in STYLES["maths"])
    for text in STYLES["choice"]:
        assert re.findall(r"^\(([A-D])\) \S", text.text, flags=re.MULTILINE) == list("ABCD")
        assert text.text.endswith("\n\nAnswer:")


@pytest.mark.skipif(made.shared() is None, reason="the real files are not here")
@pytest.mark.parametrize("name", [n for n in NAMES if n != "builtin"])
def test_no_prompt_shares_ten_consecutive_words_with_the_real_datasets(name: str) -> None:
    def runs(text: str) -> set[tuple[str, ...]]:
        found = words(text)
        return {tuple(found[i : i + 10]) for i in range(len(found) - 9)}

    mine = {run: t.prompt_id for t in TEXTS for run in runs(t.text)}
    documents = load_texts(name, made.shared() or Path())
    if name == "wikitext2":  # every document runs to the end of its article: the first lines are enough
        pieces = [t.text.split("\n", 1)[0] for t in documents]
    else:
        pieces = [t.text for t in documents]
    copied = {mine[run] for piece in pieces for run in runs(piece) & mine.keys()}
    assert copied == set()


@pytest.mark.parametrize("name", NAMES)
def test_each_dataset_has_a_config_that_begins_with_its_command_and_agrees_with_the_manifest(name: str) -> None:
    text = (REPO / f"conf/dataset/{name}.yaml").read_text(encoding="utf-8")
    assert text.startswith(f"# @package datasets.{name}\n# python run.py dataset={name}\n")
    entry = yaml.safe_load(text)
    manifest = json.loads((REPO / "initialization/dataset-assets.json").read_text())["datasets"]
    labels = {d["name"]: [d["label"]] for d in manifest} | {"builtin": ["C4", "WT", "HE", "GK", "GP"]}
    assert entry["labels"] == labels[name]
    assert entry["private"] is (name == "gpqa")
    fetch = None if name == "builtin" else f"python3 initialization/download_datasets.py --only {name}"
    assert entry["fetch"] == fetch


def test_every_config_is_a_known_dataset() -> None:
    assert {p.stem for p in (REPO / "conf/dataset").glob("*.yaml")} == set(NAMES)
