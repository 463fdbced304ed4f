"""Loaders of the five datasets in their official formats, and the selection of prompts."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dataset_fixtures as made
import pytest
from dataset_fixtures import SECRET, gpqa_csv, gpqa_zip, jsonl, write, write_parquet

from harness.datasets import NAMES, PromptText, absent, dataset_files, load_texts, select_prompts
from specter_core.errors import UserError

GPQA_FORMS: dict[str, Callable[[bytes], bytes]] = {
    "dataset.zip": gpqa_zip,
    "gpqa_main.csv.zip": lambda raw: gpqa_zip(raw, member="gpqa_main.csv"),
    "gpqa_main.csv": lambda raw: raw,
}


def letters(text: str) -> list[int]:
    return [ord(c) for c in text]


def documents(count: int, dataset: str = "gsm8k", label: str = "GK", length: int = 40) -> list[PromptText]:
    return [PromptText(f"{dataset}-{i}", f"{i:04d}" * (length // 4), dataset, label) for i in range(count)]


def test_humaneval_and_gsm8k_read_the_same_from_the_original_and_from_parquet(tmp_path: Path) -> None:
    write(tmp_path / "a/datasets/humaneval/HumanEval.jsonl.gz", jsonl(made.humaneval_records()))
    write_parquet(tmp_path / "b/datasets/humaneval/test-00000-of-00001.parquet", made.humaneval_records())
    write(tmp_path / "a/datasets/gsm8k/test.jsonl", jsonl(made.gsm8k_records()))
    write_parquet(tmp_path / "b/datasets/gsm8k/test-00000-of-00001.parquet", made.gsm8k_records())
    for name, label, first in (("humaneval", "HE", "HumanEval/0"), ("gsm8k", "GK", "gsm8k-test-00000")):
        original, parquet = (load_texts(name, tmp_path / side) for side in "ab")
        assert original == parquet
        assert [(t.text, t.label) for t in original] == [(t.text, label) for t in parquet]
        assert (len(original), original[0].prompt_id) == (6, first)


def test_wikitext_reads_the_same_from_the_text_and_from_parquet(tmp_path: Path) -> None:
    write(tmp_path / "a/wikitext2/test.txt", made.WIKITEXT.encode())
    write_parquet(tmp_path / "b/wikitext2/test-00000-of-00001.parquet", [{"text": t} for t in made.wikitext_lines()])
    text, parquet = (load_texts("wikitext2", tmp_path / side) for side in "ab")
    assert text == parquet
    assert [t.text for t in text] == [t.text for t in parquet]


def test_a_wikitext_document_runs_from_a_paragraph_to_the_end_of_its_article(tmp_path: Path) -> None:
    write(tmp_path / "wikitext-2-v1/test.txt", made.WIKITEXT.encode())
    texts = load_texts("wikitext2", tmp_path)
    assert [t.text for t in texts] == [
        "One paragraph , with @-@ marks and <unk> words .\n= = Section = =\nAnother one .",
        "Another one .",
        "The last paragraph .",
    ]
    lines = made.WIKITEXT.split("\n")
    for text in texts:
        number = int(text.prompt_id.rsplit("-", 1)[1])
        assert lines[number].strip() == text.text.split("\n")[0]


def test_c4_prefers_the_official_shards_and_keeps_every_document_of_them(tmp_path: Path) -> None:
    folder = tmp_path / "datasets/c4"
    write(folder / "c4.jsonl", jsonl({"prefix": f"cut {i}"} for i in range(4)))
    assert [t.text for t in load_texts("c4", tmp_path)] == ["cut 2", "cut 3"]
    for shard in (1, 0):
        name = f"c4-validation.{shard:05d}-of-00008.json.gz"
        write(folder / name, jsonl({"text": f"page {shard}.{i}", "url": "u", "timestamp": "2019"} for i in range(3)))
    texts = load_texts("c4", tmp_path)
    assert [t.text for t in texts] == [f"page {s}.{i}" for s in (0, 1) for i in range(3)]
    assert texts[4].prompt_id == "c4-validation.00001-of-00008-000001"


def test_prompts_of_a_c4_prefix_file_come_from_its_second_half_alone(tmp_path: Path) -> None:
    write(tmp_path / "c4/c4.jsonl", jsonl({"prefix": str(i), "gold_completion": ""} for i in range(11)))
    assert [t.prompt_id for t in load_texts("c4", tmp_path)] == [f"c4-{i:06d}" for i in range(5, 11)]


@pytest.mark.parametrize("form", GPQA_FORMS)
def test_gpqa_reads_the_same_from_every_form_in_memory(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for variable in ("HOME", "TMPDIR", "HF_HOME"):
        (tmp_path / variable).mkdir()
        monkeypatch.setenv(variable, str(tmp_path / variable))
    path = write(tmp_path / "datasets/gpqa" / form, GPQA_FORMS[form](gpqa_csv()))
    texts = load_texts("gpqa", tmp_path)
    write(tmp_path / "plain/gpqa/gpqa_main.csv", gpqa_csv())
    assert texts == load_texts("gpqa", tmp_path / "plain")
    assert [t.prompt_id for t in texts] == [f"gpqa-rec{i:03d}" for i in range(5)]
    prompts = select_prompts(texts, letters, count=5, prefix_len=16, seed=0)
    assert all(p.private for p in prompts)
    written = [p for p in tmp_path.rglob("*") if p.is_file() and "plain" not in p.parts]
    assert written == [path]
    shown = capfd.readouterr()
    assert SECRET not in shown.out + shown.err + repr(texts) + repr(prompts)
    assert "token_ids" not in repr(prompts)


def test_gpqa_choices_have_an_order_that_the_record_id_fixes_and_that_differs_between_records(tmp_path: Path) -> None:
    write(tmp_path / "gpqa/gpqa_main.csv", gpqa_csv(40))
    texts = load_texts("gpqa", tmp_path)
    assert [t.text for t in texts] == [t.text for t in load_texts("gpqa", tmp_path)]
    right = [re.search(rf'\(([A-D])\) {SECRET} "Correct Answer"', t.text) for t in texts]
    places = [match.group(1) for match in right if match]
    assert len(places) == 40
    assert set(places) == set("ABCD")
    assert all(t.text.endswith("\n\nAnswer:") and t.text.startswith(SECRET) for t in texts)


def refused(load: Callable[[], Any]) -> str:
    """The one line of the UserError, which never has the secret in it or behind it."""
    with pytest.raises(UserError) as caught:
        load()
    line = str(caught.value)
    assert "\n" not in line
    error: BaseException | None = caught.value
    while error is not None:
        assert SECRET not in str(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return line


def test_a_gpqa_archive_with_another_password_is_refused_in_one_line(tmp_path: Path) -> None:
    lines = set()
    for seed in range(3000):  # one salt in 256 passes the format's one-byte check and fails later
        if len(lines) == 2:
            break
        path = write(tmp_path / "gpqa/dataset.zip", gpqa_zip(gpqa_csv(1), password=b"other", seed=seed))
        lines.add(refused(lambda: load_texts("gpqa", tmp_path)).replace(str(path), "PATH"))
    assert len(lines) == 2
    assert all("password" in line and "extract gpqa_main.csv" in line for line in lines)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"no zip at all", "damaged"),
        (gpqa_zip(gpqa_csv(), member="dataset/other.csv"), "gpqa_main.csv"),
        (gpqa_zip(gpqa_csv(), method=99), "AES"),
        (gpqa_zip(gpqa_csv())[:-3000], "damaged"),
        (gpqa_zip(b"\xff\xfe not utf-8 " + SECRET.encode()), "CSV"),
        (gpqa_zip(b""), "CSV"),
    ],
)
def test_a_broken_gpqa_archive_is_refused_in_one_line(body: bytes, word: str, tmp_path: Path) -> None:
    path = write(tmp_path / "gpqa/dataset.zip", body)
    line = refused(lambda: load_texts("gpqa", tmp_path))
    assert str(path) in line and word in line


def test_missing_gpqa_columns_are_named(tmp_path: Path) -> None:
    columns = tuple(c for c in made.GPQA_COLUMNS if c not in ("Question", "Incorrect Answer 2"))
    write(tmp_path / "gpqa/gpqa_main.csv", gpqa_csv(columns=columns))
    line = refused(lambda: load_texts("gpqa", tmp_path))
    assert "Question" in line and "Incorrect Answer 2" in line and "Correct Answer," not in line


def test_gpqa_rows_without_question_or_choice_are_left_out_and_none_left_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "gpqa/gpqa_main.csv", gpqa_csv(5, **{"Question": [1], "Incorrect Answer 3": [4]}))
    assert [t.prompt_id for t in load_texts("gpqa", tmp_path)] == ["gpqa-rec000", "gpqa-rec002", "gpqa-rec003"]
    write(tmp_path / "gpqa/gpqa_main.csv", gpqa_csv(2, Question=[0, 1]))
    assert "no usable document" in refused(lambda: load_texts("gpqa", tmp_path))


def test_a_tokenizer_that_fails_does_not_show_private_text(tmp_path: Path) -> None:
    write(tmp_path / "gpqa/gpqa_main.csv", gpqa_csv())

    def failing(text: str) -> list[int]:
        raise RuntimeError(f"cannot encode {text}")

    texts = load_texts("gpqa", tmp_path)
    line = refused(lambda: select_prompts(texts, failing, count=1, prefix_len=4, seed=0))
    assert "gpqa-rec" in line and "RuntimeError" in line


@pytest.mark.parametrize("name", [n for n in NAMES if n != "builtin"])
def test_an_absent_dataset_is_one_line_with_the_command_that_fetches_it(name: str, tmp_path: Path) -> None:
    line = refused(lambda: load_texts(name, tmp_path))
    assert line == absent(name, tmp_path)
    assert f"download_datasets.py --only {name} --output {tmp_path}" in line
    assert dataset_files(name, tmp_path) == []
    default = absent(name, Path(__file__).resolve().parents[1] / "downloads")
    assert default is None or default.endswith(f"--only {name}")


def test_an_unknown_dataset_is_one_line_with_the_known_ones(tmp_path: Path) -> None:
    line = refused(lambda: load_texts("imagenet", tmp_path))
    assert "imagenet" in line and all(name in line for name in NAMES)


@pytest.mark.parametrize(
    ("name", "file", "body", "word"),
    [
        ("gsm8k", "test.jsonl", b'{"question": ', "cannot be read"),
        ("gsm8k", "test.jsonl", jsonl([{"query": "?"}]), "question"),
        ("gsm8k", "test.jsonl", jsonl([{"question": " "}]), "no usable document"),
        ("gsm8k", "test-0.parquet", b"PAR1 broken PAR1", "cannot be read"),
        ("humaneval", "HumanEval.jsonl", jsonl([{"prompt": "def"}]), "task_id"),
        ("c4", "c4.jsonl", jsonl([{"body": "x"}]), "text nor a prefix"),
        ("wikitext2", "test.txt", b"\xff\xfe\xff", "UTF-8"),
        ("wikitext2", "test.txt", b" \n = Title only = \n", "no usable document"),
    ],
)
def test_a_broken_file_is_one_line_that_names_it(name: str, file: str, body: bytes, word: str, tmp_path: Path) -> None:
    path = write(tmp_path / "datasets" / name / file, body)
    line = refused(lambda: load_texts(name, tmp_path))
    assert str(path) in line and word in line


def test_a_truncated_gzip_is_one_line(tmp_path: Path) -> None:
    path = write(tmp_path / "humaneval/HumanEval.jsonl.gz", jsonl(made.humaneval_records(200)))
    path.write_bytes(path.read_bytes()[:-40])
    assert str(path) in refused(lambda: load_texts("humaneval", tmp_path))


def test_selection_depends_on_the_seed_and_the_ids_but_not_on_the_order_of_the_documents() -> None:
    texts = documents(50)
    chosen = select_prompts(texts, letters, count=10, prefix_len=16, seed=3)
    assert chosen == select_prompts(texts[::-1], letters, count=10, prefix_len=16, seed=3)
    assert chosen != select_prompts(texts, letters, count=10, prefix_len=16, seed=4)
    assert chosen[:4] == select_prompts(texts, letters, count=4, prefix_len=16, seed=3)
    fewer = [t for t in texts if t.prompt_id != chosen[2].prompt_id]
    assert select_prompts(fewer, letters, count=9, prefix_len=16, seed=3) == chosen[:2] + chosen[3:]


def test_every_prompt_is_the_first_tokens_of_its_document_and_short_documents_are_passed_over() -> None:
    texts = documents(20, length=40) + documents(5, length=8)
    texts = [PromptText(f"{t.prompt_id}/{len(t.text)}", t.text, t.dataset, t.label) for t in texts]
    by_id = {t.prompt_id: t for t in texts}
    chosen = select_prompts(texts, letters, count=20, prefix_len=12, seed=0)
    assert len({p.prompt_id for p in chosen}) == 20
    for prompt in chosen:
        assert prompt.token_ids == tuple(letters(by_id[prompt.prompt_id].text)[:12])
        assert (prompt.dataset, prompt.label, prompt.private) == ("gsm8k", "GK", False)


def test_too_few_documents_of_the_length_are_an_error_with_both_numbers() -> None:
    texts = documents(6, length=40) + documents(3, length=8)
    line = refused(lambda: select_prompts(texts, letters, count=8, prefix_len=16, seed=0))
    assert "gsm8k has 6 documents of >= 16 tokens, count asks for 8" in line


@pytest.mark.parametrize(("count", "prefix_len"), [(0, 16), (-1, 16), (1, 0)])
def test_a_count_or_prefix_below_one_is_an_error(count: int, prefix_len: int) -> None:
    line = refused(lambda: select_prompts(documents(3), letters, count=count, prefix_len=prefix_len, seed=0))
    assert str(count) in line and str(prefix_len) in line


def test_no_documents_are_an_error() -> None:
    refused(lambda: select_prompts([], letters, count=1, prefix_len=1, seed=0))


def test_the_built_in_set_gives_its_count_for_each_of_the_five_styles(tmp_path: Path) -> None:
    texts = load_texts("builtin", tmp_path)
    chosen = select_prompts(texts, letters, count=3, prefix_len=16, seed=0)
    assert [p.label for p in chosen] == [label for label in ("C4", "WT", "HE", "GK", "GP") for _ in range(3)]
    assert {p.dataset for p in chosen} == {"builtin"} and not any(p.private for p in chosen)


@pytest.mark.skipif(shutil.which("unzip") is None, reason="no unzip here")
def test_the_archive_made_for_these_tests_is_one_that_unzip_opens(tmp_path: Path) -> None:
    path = write(tmp_path / "dataset.zip", gpqa_zip(gpqa_csv()))
    command = ["unzip", "-n", "-q", "-P", made.PASSWORD.decode(), str(path), "-d", str(tmp_path)]
    assert subprocess.run(command, capture_output=True, timeout=20).returncode == 0
    assert (tmp_path / "dataset/gpqa_main.csv").read_bytes() == gpqa_csv()


@pytest.mark.skipif(made.shared() is None, reason="the real files are not here")
@pytest.mark.parametrize(
    ("name", "count", "first", "last"),
    [
        ("humaneval", 164, "HumanEval/0", "HumanEval/163"),
        ("gsm8k", 1319, "gsm8k-test-00000", "gsm8k-test-01318"),
        ("wikitext2", 2185, "wikitext2-test-00003", "wikitext2-test-04356"),
        ("c4", 740, "c4-000740", "c4-001479"),
        ("gpqa", 448, None, None),
    ],
)
def test_the_real_files_have_their_published_numbers_of_documents(
    name: str, count: int, first: str | None, last: str | None
) -> None:
    texts = load_texts(name, made.shared() or Path())
    ids = [t.prompt_id for t in texts]
    assert (len(ids), len(set(ids))) == (count, count)
    assert first is None or (ids[0], ids[-1]) == (first, last)
    chosen = select_prompts(texts, letters, count=25, prefix_len=64, seed=0)
    assert {p.private for p in chosen} == {name == "gpqa"}
    assert {len(p.token_ids) for p in chosen} == {64}
