"""A release from small stand-ins: the paper's appendix from end to end, the same bytes twice, no plain GPQA."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from download_server import FileServer, file_server
from release_fixture import GPQA, PASSWORD, REPO, Inputs, build, call, git, make_inputs, put, refused
from zipcrypto import encrypted_zip

from harness import assets, catalogue, weights
from harness.config import model_entry

TOOLS = [name for name in ("bash", "git", "sha256sum", "tar", "unzip") if shutil.which(name) is None]
pytestmark = pytest.mark.skipif(bool(TOOLS), reason=f"not here: {', '.join(TOOLS)}")

FOUR = ("v1.tar.gz", "wheels.tar.gz", "datasets.tar.gz", "v1.manifest.json")
MODELS = ("dsv2-target.tar.gz", "dsv2-draft.tar.gz")
FIRST_HALF = """
mkdir -p "$SPECTER_WORK/downloads" "$SPECTER_WORK/logs"
cd "$SPECTER_WORK/downloads"
sha256sum --ignore-missing -c SHA256SUMS
cd ..
tar -xzf downloads/specter-ae-v1.tar.gz
cd specter
python3 -B initialization/download_models.py \
    --manifest initialization/model-assets.json \
    --output "$SPECTER_WORK/downloads"
cd ../downloads
sha256sum -c SHA256SUMS
cd ..
"""
SECOND_HALF = """
for f in wheels datasets dsv2-target dsv2-draft
do
    tar -xzf "downloads/specter-ae-$f.tar.gz"
done
unzip -n -P deserted-untie-orchid \
    specter-assets/datasets/gpqa/gpqa_main.csv.zip \
    -d specter-assets/datasets/gpqa/
"""


@pytest.fixture(scope="module")
def server() -> Iterator[FileServer]:
    with file_server() as running:
        yield running


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def release(inputs: Inputs, server: FileServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A built release, whose two model archives the server has."""
    output = tmp_path_factory.mktemp("release")
    done = build(inputs, output, f"{server.url}/models")
    assert done.returncode == 0, done.stderr
    for name in MODELS:
        server.put(f"/models/specter-ae-{name}", (output / f"specter-ae-{name}").read_bytes())
    return output


@pytest.fixture
def copy(inputs: Inputs, tmp_path: Path) -> Inputs:
    """Inputs that a test may spoil; the repository is shared."""
    folders = {n: tmp_path / "in" / n for n in ("wheels", "datasets", "target", "draft")}
    for name, folder in folders.items():
        shutil.copytree(getattr(inputs, name), folder)
    return Inputs(source=inputs.source, gpqa_sha256=inputs.gpqa_sha256, **folders)


def workspace(release: Path, work: Path) -> Path:
    """The five files of the record, placed by hand."""
    for name in (*(f"specter-ae-{n}" for n in FOUR), "SHA256SUMS"):
        put(work / "downloads" / name, (release / name).read_bytes())
    return work


def shell(script: str, work: Path) -> subprocess.CompletedProcess[str]:
    return call(["bash", "-euo", "pipefail", "-c", script], SPECTER_WORK=str(work), LC_ALL="C.UTF-8")


def test_a_build_makes_the_six_files_and_their_sums_in_order(release: Path) -> None:
    names = [f"specter-ae-{n}" for n in (*FOUR, *MODELS)]
    assert sorted(p.name for p in release.iterdir()) == sorted([*names, "SHA256SUMS"])
    lines = (release / "SHA256SUMS").read_text().splitlines()
    assert lines == [f"{hashlib.sha256((release / n).read_bytes()).hexdigest()}  {n}" for n in names]


def test_the_appendix_s_sequence_ends_with_everything_in_its_place(
    release: Path, inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = workspace(release, tmp_path / "specter work")
    done = shell(FIRST_HALF + SECOND_HALF, work)
    assert done.returncode == 0, done.stderr
    checked = [line for line in done.stdout.splitlines() if line.endswith(": OK")]
    assert [line.split(": ")[0] for line in checked] == [
        f"specter-ae-{n}" for n in (*FOUR, *FOUR, *MODELS)
    ]  # four, then six
    assert sorted(p.name for p in work.iterdir()) == ["downloads", "logs", "specter", "specter-assets"]
    extracted = work / "specter-assets"
    assert (extracted / "datasets" / "gpqa" / "gpqa_main.csv").read_bytes() == GPQA
    for name in ("target", "draft"):
        for file in getattr(inputs, name).iterdir():
            assert (extracted / f"dsv2-{name}" / file.name).read_bytes() == file.read_bytes()
    monkeypatch.setenv("SPECTER_WORK", str(work))
    assert assets.dataset_root("gsm8k") == extracted
    assert weights.absent(model_entry("deepseek_v2_lite", catalogue.load("model", "deepseek_v2_lite"))) is None
    installed = call(["bash", str(work / "specter/initialization/install.sh"), "--dry-run"], SPECTER_WORK=str(work))
    assert installed.returncode == 0, installed.stderr
    assert installed.stderr.count(": OK") == 2


def test_two_builds_are_the_same_bytes(release: Path, inputs: Inputs, server: FileServer, tmp_path: Path) -> None:
    for file in inputs.target.iterdir():
        file.touch()
    (inputs.target / "config.json").chmod(0o600)
    assert build(inputs, tmp_path / "again", f"{server.url}/models").returncode == 0
    for file in release.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name


def test_a_tampered_archive_is_caught_by_either_check(release: Path, tmp_path: Path) -> None:
    work = workspace(release, tmp_path)
    archive = work / "downloads" / "specter-ae-datasets.tar.gz"
    body = bytearray(archive.read_bytes())
    body[len(body) // 2] ^= 1
    archive.write_bytes(body)
    done = shell(FIRST_HALF, work)
    assert done.returncode != 0
    assert "specter-ae-datasets.tar.gz: FAILED" in done.stdout
    assert not (work / "specter").exists()


def test_a_model_archive_that_was_replaced_on_the_server_is_not_kept(
    release: Path, server: FileServer, tmp_path: Path
) -> None:
    good = server.items["/models/specter-ae-dsv2-draft.tar.gz"].body
    server.items["/models/specter-ae-dsv2-draft.tar.gz"].body = bytes(len(good))
    try:
        done = shell(FIRST_HALF, workspace(release, tmp_path))
    finally:
        server.items["/models/specter-ae-dsv2-draft.tar.gz"].body = good
    assert done.returncode == 1 and "dsv2-draft" in done.stderr
    assert not (tmp_path / "downloads" / "specter-ae-dsv2-draft.tar.gz").exists()


def test_entries_are_sorted_and_carry_no_trace_of_the_builder(release: Path) -> None:
    for path in release.glob("*.tar.gz"):
        assert path.read_bytes()[4:8] == bytes(4), "time in the gzip header"
        with tarfile.open(path) as tar:
            members = tar.getmembers()
        assert [m.name for m in members] == sorted((m.name for m in members), key=str.encode)
        assert {(m.uid, m.gid, m.uname, m.gname, m.mtime) for m in members} == {(0, 0, "", "", 1577836800)}
        assert {m.mode for m in members} <= {0o644, 0o755}
        root = "specter" if "v1" in path.name else "specter-assets"
        assert {m.name.split("/")[0] for m in members} == {root}


def test_v1_is_the_commit_and_not_the_working_tree(inputs: Inputs, server: FileServer, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(inputs.source, source)
    put(source / "untracked.txt", "x")
    put(source / "constraints.txt", "changed after the commit\n")
    changed = Inputs(source, inputs.wheels, inputs.datasets, inputs.target, inputs.draft, inputs.gpqa_sha256)
    done = build(changed, tmp_path / "out", f"{server.url}/models")
    assert "1 changed file(s)" in done.stderr
    with tarfile.open(tmp_path / "out" / "specter-ae-v1.tar.gz") as tar:
        names = tar.getnames()
        pins = tar.extractfile("specter/constraints.txt")
        assert pins is not None and b"torch==2.13.0" in pins.read()
    assert "specter/a folder/ümlaut.txt" in names
    assert not {"specter/untracked.txt", "specter/ignored", "specter/SHA256SUMS"} & set(names)
    git(source, "rm", "-q", "--cached", "initialization/model-assets.json")
    git(source, "commit", "-q", "-m", "without the manifest")
    assert "has no initialization/model-assets.json" in refused(build(changed, tmp_path / "other", "http://h/x"))


def test_the_manifest_names_commit_and_every_file_s_hash(release: Path, inputs: Inputs) -> None:
    manifest = json.loads((release / "specter-ae-v1.manifest.json").read_text())
    head = call(["git", "-C", str(inputs.source), "rev-parse", "HEAD"]).stdout.strip()
    assert manifest["commit"] == head
    assert [a["name"] for a in manifest["archives"]] == ["v1", "wheels", "datasets", "dsv2-target", "dsv2-draft"]
    for archive in manifest["archives"]:
        assert (release / archive["file"]).stat().st_size == archive["bytes"]
        with tarfile.open(release / archive["file"]) as tar:
            for file in archive["files"]:
                stream = tar.extractfile(file["path"])
                assert stream is not None and hashlib.sha256(stream.read()).hexdigest() == file["sha256"]
            assert sorted(tar.getnames()) == sorted(f["path"] for f in archive["files"])


def test_gpqa_is_released_encrypted_only(release: Path, copy: Inputs, tmp_path: Path) -> None:
    put(copy.datasets / "gpqa" / "gpqa_main.csv", GPQA)  # what a reader of the appendix has extracted
    done = build(copy, tmp_path / "out", "http://h/x")
    assert "not gpqa_main.csv" in done.stderr
    for folder in (release, tmp_path / "out"):
        with tarfile.open(folder / "specter-ae-datasets.tar.gz") as tar:
            assert [n for n in tar.getnames() if "gpqa" in n] == ["specter-assets/datasets/gpqa/gpqa_main.csv.zip"]
            stream = tar.extractfile("specter-assets/datasets/gpqa/gpqa_main.csv.zip")
            assert stream is not None
            packed = put(tmp_path / folder.name / "gpqa_main.csv.zip", stream.read())
        assert GPQA[:10] not in packed.read_bytes()
        with zipfile.ZipFile(packed) as opened:
            assert [(i.filename, i.flag_bits & 1) for i in opened.infolist()] == [("gpqa_main.csv", 1)]
            assert opened.read("gpqa_main.csv", pwd=PASSWORD) == GPQA


def test_an_unencrypted_or_unpinned_gpqa_is_refused(copy: Inputs, tmp_path: Path) -> None:
    folder = copy.datasets / "gpqa"
    put(folder / "gpqa_main.csv.zip", encrypted_zip({"gpqa_main.csv": GPQA}, PASSWORD, seed=5))
    assert "is not pinned" in refused(build(copy, tmp_path / "out", "http://h/x"))
    pin = hashlib.sha256((folder / "gpqa_main.csv.zip").read_bytes()).hexdigest()
    assert build(copy, tmp_path / "out", "http://h/x", "--gpqa-sha256", pin, "--dry-run").returncode == 0
    with zipfile.ZipFile(folder / "gpqa_main.csv.zip", "w") as plain:
        plain.writestr("gpqa_main.csv", GPQA)
    pin = hashlib.sha256((folder / "gpqa_main.csv.zip").read_bytes()).hexdigest()
    line = refused(build(copy, tmp_path / "out", "http://h/x", "--gpqa-sha256", pin))
    assert "is not encrypted" in line and "Invented" not in line
    shutil.rmtree(folder)
    assert "fetch it with download_datasets.py --only gpqa" in refused(build(copy, tmp_path / "out", "http://h/x"))
    put(copy.datasets / "c4" / "gpqa_main.csv", GPQA)
    shutil.copytree(folder.parent / "c4", folder)
    assert "GPQA belongs in gpqa/" in refused(build(copy, tmp_path / "out", "http://h/x"))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda c: shutil.rmtree(c.wheels), "no such folder"),
        (lambda c: [p.unlink() for p in c.wheels.glob("*")], "no .whl file"),
        (lambda c: put(c.wheels / "SHA256SUMS", f"{'0' * 64}  torch-9.9+test-py3-none-any.whl\n"), "should be 000"),
        (lambda c: (c.target / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda c: (c.draft / "model.safetensors").unlink(), "has no .safetensors file"),
        (lambda c: put(c.target / "model-2.safetensors.part", b""), "unfinished download"),
        (lambda c: (c.target / "link").symlink_to("nowhere"), "broken link"),
        (lambda c: put(c.datasets / "surprise" / "x", b""), "no dataset of the manifest"),
        (lambda c: (c.datasets / "NOTICE.md").unlink(), "licences"),
    ],
)
def test_a_bad_input_is_one_line_before_anything_is_written(spoil, words, copy: Inputs, tmp_path: Path) -> None:
    spoil(copy)
    assert words in refused(build(copy, tmp_path / "out", "http://h/x"))
    assert not (tmp_path / "out").exists()


def test_bad_arguments_are_one_line(copy: Inputs, tmp_path: Path) -> None:
    assert "--base-url" in refused(build(copy, tmp_path / "out", "zenodo.org"))
    assert "64 hexadecimal" in refused(build(copy, tmp_path / "out", "http://h/x", "--gpqa-sha256", "12"))
    put(tmp_path / "out" / "holiday.jpg", b"")
    assert "holiday.jpg" in refused(build(copy, tmp_path / "out", "http://h/x"))


def test_a_draft_inside_the_target_s_folder_is_packed_once(copy: Inputs, tmp_path: Path) -> None:
    shutil.move(copy.draft, copy.target / "draft")
    inside = Inputs(copy.source, copy.wheels, copy.datasets, copy.target, copy.target / "draft", copy.gpqa_sha256)
    assert build(inside, tmp_path / "out", "http://h/x").returncode == 0
    with tarfile.open(tmp_path / "out" / "specter-ae-dsv2-target.tar.gz") as tar:
        assert not [name for name in tar.getnames() if "draft" in name.removeprefix("specter-assets/dsv2-target")]


def test_too_little_space_is_refused_with_both_numbers(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [str(REPO / "scripts"), str(REPO / "initialization"), *sys.path])
    import _batch
    import build_release

    monkeypatch.setattr(_batch, "free_bytes", lambda folder: 1000)
    assert build_release.main(inputs.arguments(tmp_path / "out", "http://h/x")) == 2
    assert "1 kB are free" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


def test_the_repository_s_own_sums_are_those_of_a_release_or_absent() -> None:
    manifest = json.loads((REPO / "initialization" / "model-assets.json").read_text())
    known = {a["file"]: a["sha256"] for a in manifest["assets"] if a["kind"] == "archive"}
    assert sorted(known) == sorted(f"specter-ae-{n}" for n in MODELS)
    sums = REPO / "SHA256SUMS"
    if not sums.exists():
        assert set(known.values()) == {None}, "a release exists: its SHA256SUMS belongs at the top"
        return
    lines = [line.split("  ") for line in sums.read_text().splitlines()]
    assert [name for _, name in lines] == [f"specter-ae-{n}" for n in (*FOUR, *MODELS)]
    assert all(known[name] in (None, digest) for digest, name in lines if name in known)
