"""The dataset downloader: sources in order, licences, files that are already on disk."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import dataset_fixtures as made
import pytest
from dataset_fixtures import jsonl, write, write_parquet
from download_helpers import COMMIT, INIT, Ran, leftovers, module, run_download, sha256
from download_server import FileServer

from harness.datasets import load_texts

SHIPPED = json.loads((INIT / "dataset-assets.json").read_text(encoding="utf-8"))
NAMES = [d["name"] for d in SHIPPED["datasets"]]


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    made.everything(tmp_path / "disk")
    return tmp_path / "disk"


def download(out: Path, *more: str) -> Ran:
    fast = ["--backoff-s", "0.001", "--retries", "3", "--timeout-s", "10"]
    return run_download(["--output", str(out), *fast, *more], tool="download_datasets")


def served(server: FileServer, tmp_path: Path) -> list[str]:
    """The shipped manifest with its plain URLs on the local server, its hub there too, all with made-up content."""
    made.everything(tmp_path / "origin")
    raw = json.loads(json.dumps(SHIPPED))
    for dataset in raw["datasets"]:
        for source in dataset["sources"]:
            if source["kind"] == "url":
                body = next((tmp_path / "origin").rglob(source["name"])).read_bytes()
                source["url"] = f"{server.url}/plain/{dataset['name']}/{source['name']}"
                source["bytes"], source["sha256"] = len(body), sha256(body)
                server.put(source["url"].removeprefix(server.url), body)
            else:
                body = hub_body(dataset["name"], tmp_path)
                for revision in ("main", COMMIT):
                    route = f"/datasets/{source['repo']}/resolve/{revision}/{source['path']}"
                    server.put(route, body, headers={"X-Repo-Commit": COMMIT})
    path = tmp_path / "datasets.json"
    path.write_text(json.dumps(raw), encoding="utf-8")
    return ["--manifest", str(path), "--hub-url", server.url]


def hub_body(name: str, tmp_path: Path) -> bytes:
    if name == "c4":
        return next((tmp_path / "origin").rglob("c4-validation*")).read_bytes()
    records = {
        "humaneval": made.humaneval_records(),
        "gsm8k": made.gsm8k_records(),
        "wikitext2": [{"text": line} for line in made.wikitext_lines()],
    }[name]
    return write_parquet(tmp_path / f"origin/{name}.parquet", records).read_bytes()


def test_all_five_datasets_are_downloaded_and_can_be_loaded(server: FileServer, tmp_path: Path, out: Path) -> None:
    ran = download(out, *served(server, tmp_path))
    assert ran.code == 0
    assert sorted(ran.json["datasets"]) == sorted(NAMES)
    assert leftovers(out) == []
    assert {name: len(load_texts(name, out)) for name in NAMES} == {
        "c4": 4,
        "wikitext2": 3,
        "humaneval": 6,
        "gsm8k": 6,
        "gpqa": 5,
    }


def test_licences_are_shown_before_the_first_request_and_left_beside_the_data(
    server: FileServer, tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = served(server, tmp_path)
    ran = download(out, *arguments, "--only", "gsm8k,gpqa")
    assert ran.stderr.index("GSM8K (test split): MIT") < ran.stderr.index("gsm8k/test.jsonl: fetched")
    notice = (out / "datasets/NOTICE.md").read_text(encoding="utf-8")
    assert "CC BY 4.0" in notice and "plain text" in notice and "HumanEval" not in notice
    download(out, *arguments, "--only", "humaneval")
    notice = (out / "datasets/NOTICE.md").read_text(encoding="utf-8")
    assert all(title in notice for title in ("GSM8K", "GPQA", "HumanEval"))


def test_a_source_that_does_not_answer_gives_way_to_the_next_and_says_so(
    server: FileServer, tmp_path: Path, out: Path
) -> None:
    arguments = served(server, tmp_path)
    del server.items["/plain/gsm8k/test.jsonl"]
    server.items["/plain/humaneval/HumanEval.jsonl.gz"].statuses = [(503, {})] * 99
    ran = download(out, *arguments, "--only", "gsm8k,humaneval")
    assert ran.code == 0
    assert ran.stderr.count("the next source is tried") == 2
    parquet = "test-00000-of-00001.parquet"
    assert ran.json["datasets"] == {"humaneval": [parquet], "gsm8k": [parquet]}
    assert json.loads((out / "datasets/gsm8k/download.json").read_text())["commit"] == COMMIT
    assert [t.prompt_id for t in load_texts("gsm8k", out)] == [f"gsm8k-test-{i:05d}" for i in range(6)]


def test_the_last_source_that_does_not_answer_is_the_error(server: FileServer, tmp_path: Path, out: Path) -> None:
    arguments = served(server, tmp_path)
    server.items.clear()
    ran = download(out, *arguments, "--only", "gsm8k")
    assert ran.code == 1
    assert "gsm8k" in ran.error and "404" in ran.error


def test_content_with_another_hash_is_an_error_and_no_reason_for_another_source(
    server: FileServer, tmp_path: Path, out: Path
) -> None:
    arguments = served(server, tmp_path)
    item = server.items["/plain/gsm8k/test.jsonl"]
    item.body = bytes(len(item.body))
    ran = download(out, *arguments, "--only", "gsm8k")
    assert ran.code == 1
    assert "gsm8k/test.jsonl: SHA-256" in ran.error
    assert not (out / "datasets/gsm8k/test.jsonl").exists()


def test_a_second_download_fetches_nothing(server: FileServer, tmp_path: Path, out: Path) -> None:
    arguments = served(server, tmp_path)
    assert download(out, *arguments).code == 0
    asked = len(server.seen)
    again = download(out, *arguments)
    assert again.code == 0
    assert "fetched" not in again.stderr
    assert [s for s in server.seen[asked:] if s.method == "GET"] == []


def test_a_dry_run_shows_origins_and_asks_nothing(server: FileServer, tmp_path: Path, out: Path) -> None:
    ran = download(out, *served(server, tmp_path), "--dry-run")
    assert ran.code == 0
    assert ran.json == {"dry_run": True, "datasets": NAMES}
    assert f"{server.url}/plain/gpqa/dataset.zip" in ran.stderr
    assert server.seen == [] and not out.exists()


def test_files_on_disk_are_found_at_any_depth_and_can_be_loaded(disk: Path, out: Path) -> None:
    ran = download(out, "--from", str(disk))
    assert ran.code == 0
    assert ran.json["datasets"] == {
        "c4": ["c4-validation.00000-of-00008.json.gz"],
        "wikitext2": ["test.txt"],
        "humaneval": ["HumanEval.jsonl.gz"],
        "gsm8k": ["test.jsonl"],
        "gpqa": ["dataset.zip"],
    }
    assert leftovers(out) == []
    assert all(load_texts(name, out) for name in NAMES)
    assert (out / "datasets/NOTICE.md").exists()
    assert "already there" in download(out, "--from", str(disk)).stderr


def test_a_folder_can_be_taken_from_itself(disk: Path) -> None:
    assert download(disk, "--from", str(disk)).code == 0
    before = sorted(disk.rglob("*"))
    assert download(disk, "--from", str(disk)).code == 0
    assert sorted(disk.rglob("*")) == before


def test_a_file_that_only_has_the_right_name_is_not_taken(disk: Path, out: Path) -> None:
    write(disk / "0/test.jsonl", jsonl([{"question": "x"}]))
    write(disk / "0/HumanEval.jsonl.gz", b"not json")
    write(disk / "0/test.txt", b"plain words")
    write(disk / "0/dataset.zip", b"PK\3\4 broken")
    write(disk / "0/c4-validation.1.json.gz", jsonl([{"body": "x"}]))
    assert download(out, "--from", str(disk)).code == 0
    assert (out / "datasets/gsm8k/test.jsonl").read_bytes() == (disk / "b/c/test.jsonl").read_bytes()
    assert [len(load_texts(n, out)) for n in NAMES] == [4, 3, 6, 6, 5]


def test_a_published_hash_wins_over_another_file_of_the_same_name(disk: Path, out: Path, tmp_path: Path) -> None:
    raw = json.loads(json.dumps(SHIPPED))
    body = (disk / "b/c/test.jsonl").read_bytes()
    raw["datasets"][NAMES.index("gsm8k")]["published"] = [{"name": "test.jsonl", "sha256": sha256(body)}]
    path = tmp_path / "datasets.json"
    path.write_text(json.dumps(raw), encoding="utf-8")
    write(disk / "a/test.jsonl", jsonl(made.gsm8k_records(2)))
    ran = download(out, "--manifest", str(path), "--from", str(disk), "--only", "gsm8k")
    assert ran.code == 0
    assert (out / "datasets/gsm8k/test.jsonl").read_bytes() == body
    assert "checked by sha256" in ran.stderr


@pytest.mark.parametrize(
    ("name", "file", "documents"),
    [("gsm8k", "main/test-00000-of-00001.parquet", 6), ("humaneval", "x/test-00000-of-00001.parquet", 6)],
)
def test_parquet_files_are_told_apart_by_their_columns(
    name: str, file: str, documents: int, tmp_path: Path, out: Path
) -> None:
    write_parquet(tmp_path / "hub" / file, made.gsm8k_records() if name == "gsm8k" else made.humaneval_records())
    write_parquet(tmp_path / "hub/a/test-00000-of-00001.parquet", [{"label": 1}])
    ran = download(out, "--from", str(tmp_path / "hub"), "--only", name)
    assert ran.code == 0
    assert len(load_texts(name, out)) == documents


def test_datasets_that_are_not_found_are_named_and_the_others_are_still_taken(disk: Path, out: Path) -> None:
    shutil.rmtree(disk / "gpqa")
    shutil.rmtree(disk / "c4")
    ran = download(out, "--from", str(disk))
    assert ran.code == 2
    assert "c4 (" in ran.error and "gpqa (dataset.zip" in ran.error and "gsm8k (" not in ran.error
    assert (out / "datasets/gsm8k/test.jsonl").exists()


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path, out: Path) -> None:
    ran = download(out, "--from", str(tmp_path / "nowhere"))
    assert ran.code == 2
    assert "nowhere" in ran.error


def test_a_copy_onto_a_full_disk_is_one_line_and_leaves_nothing_behind(
    disk: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Any, target: Any) -> None:
        Path(target).write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module("_local").shutil, "copyfile", full)
    ran = download(out, "--from", str(disk), "--only", "gsm8k")
    assert ran.code == 2
    assert "disk full" in ran.error and "--output" in ran.error
    assert leftovers(out) == [] and not (out / "datasets/gsm8k/test.jsonl").exists()


def test_too_little_space_for_a_copy_is_refused_with_both_numbers(
    disk: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module("_batch"), "free_bytes", lambda folder: 10)
    ran = download(out, "--from", str(disk), "--only", "gsm8k")
    assert ran.code == 2
    assert "10 B are free" in ran.error
    assert not (out / "datasets/gsm8k").exists()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"licenses": "MIT"}, "licenses"),
        ({"sources": []}, "source"),
        ({"known": [{"pattern": "x", "format": "docx", "fields": []}]}, "docx"),
        ({"name": "../up"}, "../up"),
        ({"homepage": "not a url"}, "homepage"),
    ],
)
def test_a_wrong_dataset_entry_is_refused_by_name(change: dict[str, Any], word: str, tmp_path: Path, out: Path) -> None:
    raw = json.loads(json.dumps(SHIPPED))
    raw["datasets"][0].update(change)
    path = tmp_path / "datasets.json"
    path.write_text(json.dumps(raw), encoding="utf-8")
    ran = download(out, "--manifest", str(path), "--dry-run")
    assert ran.code == 2
    assert word in ran.error


@pytest.mark.skipif(made.shared() is None, reason="the real files are not here")
def test_the_real_files_are_recognised_by_their_published_hashes(out: Path) -> None:
    folder = (made.shared() or Path()) / "datasets"
    ran = download(out, "--from", str(folder))
    assert ran.code == 0
    assert ran.stderr.count("checked by sha256") == 5
    listed = dict(reversed(line.split()) for line in (folder / "SHA256SUMS").read_text().splitlines())
    copies = {p.name: sha256(p.read_bytes()) for p in (out / "datasets").rglob("*.*") if p.name != "NOTICE.md"}
    assert len(copies) == 5
    assert set(copies.values()) <= set(listed.values())
