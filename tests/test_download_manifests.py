"""Manifests, arguments, progress, and what the tools need to run."""

from __future__ import annotations

import ast
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from download_helpers import (
    INIT,
    REPO,
    archive,
    arguments,
    checkpoint_entry,
    hub,
    manifest,
    module,
    random_bytes,
    run_download,
    tiny_checkpoint,
)
from download_server import FileServer

TOOL = INIT / "download_models.py"
ALL_MODULES = sorted(p for p in INIT.glob("*.py") if p.name.startswith(("_", "download_")))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sha265": "00"}, ["sha265", "unknown field"]),
        ({"sha256": "xyz"}, ["sha256", "xyz"]),
        ({"sha256": None}, ["sha256", "bytes"]),
        ({"bytes": "12"}, ["bytes", "12"]),
        ({"bytes": -1}, ["bytes", "-1"]),
        ({"bytes": True}, ["bytes", "True"]),
        ({"url": "ftp://host/a"}, ["url", "ftp"]),
        ({"file": "../a"}, ["file", "../a"]),
        ({"kind": "torrent"}, ["kind", "torrent", "archive"]),
        ({"name": None}, ["name", "null"]),
    ],
)
def test_a_manifest_entry_that_is_wrong_is_refused_by_name_before_any_transfer(
    change: dict[str, Any],
    words: list[str],
    server: FileServer,
    tmp_path: Path,
    out: Path,
) -> None:
    ran = run_download(arguments(manifest(tmp_path, archive(server, "a.tgz", b"x", **change)), out))
    assert ran.code == 2
    assert all(word in ran.error for word in words), ran.error
    assert server.seen == [] and not out.exists()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "JSON"),
        ("[]", "object"),
        ('{"format": 2, "assets": []}', "format 2"),
        ('{"format": 1, "assets": [], "extra": 1}', "extra"),
        ('{"format": 1}', "assets"),
        ('{"format": 1, "assets": [3]}', "assets[0]"),
    ],
)
def test_a_manifest_that_is_no_manifest_is_one_line(text: str, word: str, tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(text)
    ran = run_download(["--manifest", str(path), "--output", str(tmp_path / "out")])
    assert ran.code == 2
    assert word in ran.error


def test_a_manifest_that_is_absent_is_one_line(tmp_path: Path) -> None:
    ran = run_download(["--manifest", str(tmp_path / "none.json"), "--output", str(tmp_path)])
    assert ran.code == 2
    assert "none.json" in ran.error


@pytest.mark.parametrize(
    ("more", "word"),
    [
        (["--only", "nothing"], "nothing"),
        (["--jobs", "0"], "--jobs"),
        (["--jobs", "many"], "--jobs"),
        (["--retries", "0"], "--retries"),
        (["--timeout-s", "0"], "--timeout-s"),
        (["--unheard-of"], "--unheard-of"),
    ],
)
def test_a_wrong_argument_is_one_line(
    more: list[str], word: str, server: FileServer, tmp_path: Path, out: Path
) -> None:
    ran = run_download(arguments(manifest(tmp_path, archive(server, "a.tgz", b"x")), out, None, *more))
    assert ran.code == 2
    assert word in ran.error
    assert server.seen == []


def test_only_picks_assets_and_without_it_the_default_ones_are_fetched(
    server: FileServer, tmp_path: Path, out: Path
) -> None:
    entries = [archive(server, f"{n}.tgz", n.encode(), default=n == "b") for n in ("a", "b", "c")]
    path = manifest(tmp_path, *entries)
    assert run_download(arguments(path, out)).code == 0
    assert sorted(p.name for p in out.glob("*.tgz")) == ["b.tgz"]
    assert run_download(arguments(path, out, None, "--only", "a,c")).code == 0
    assert sorted(p.name for p in out.glob("*.tgz")) == ["a.tgz", "b.tgz", "c.tgz"]


def test_a_dry_run_neither_asks_nor_writes(server: FileServer, tmp_path: Path, out: Path) -> None:
    path = manifest(tmp_path, archive(server, "a.tgz", b"x" * 2000), checkpoint_entry())
    ran = run_download(arguments(path, out, server, "--dry-run"))
    assert ran.code == 0
    assert ran.json == {"dry_run": True, "assets": ["a", "tiny"], "bytes": 2000}
    assert "2 kB" in ran.stderr and "1 file(s) of unknown size" in ran.stderr
    assert server.seen == [] and not out.exists()


def test_an_archive_without_url_says_what_to_do_instead(tmp_path: Path, out: Path) -> None:
    ran = run_download(["--output", str(out)])
    assert ran.code == 2
    assert "specter-ae-dsv2-target.tar.gz" in ran.error and "quantize_draft.py" in ran.error
    assert "--only deepseek_v2_lite" in ran.error
    assert not out.exists()


def test_the_shipped_manifest_states_known_facts_and_no_invented_ones() -> None:
    assets = {a["name"]: a for a in json.loads((INIT / "model-assets.json").read_text())["assets"]}
    sizes = {n: (a["tensor_bytes"], a["tensors"]) for n, a in assets.items() if a["kind"] == "hub"}
    assert sizes == {
        "deepseek_v2_lite": (2 * 15_706_484_224, 5291),
        "qwen15_moe": (2 * 14_315_784_192, 4659),
        "phi35_moe": (2 * 41_873_153_344, 1957),
        "qwen15_moe_chat": (2 * 14_315_784_192, 4659),
        "qwen15_moe_chat_gptq": (None, None),
    }
    shards = [f["path"] for f in assets["deepseek_v2_lite"]["files"]][1:]
    assert shards == [f"model-0000{n}-of-000004.safetensors" for n in (1, 2, 3, 4)]
    for asset in assets.values():
        digests = [asset.get("sha256"), *(f["sha256"] for f in asset.get("files", []))]
        assert digests == [None] * len(digests)
        assert asset.get("revision", "main") == "main"


def test_every_asset_of_the_shipped_manifest_can_be_planned_without_network(tmp_path: Path) -> None:
    assets = json.loads((INIT / "model-assets.json").read_text())["assets"]
    hub_names = [a["name"] for a in assets if a["kind"] == "hub"]
    for name in hub_names:
        ran = run_download(["--output", str(tmp_path), "--only", name, "--dry-run"])
        assert ran.json is None or ran.json["assets"] == [name]
        assert ran.code == (0 if ran.json else 2)


def test_every_model_of_the_catalogue_is_fetched_to_the_place_where_it_is_looked_for() -> None:
    assets = {a["name"]: a for a in json.loads((INIT / "model-assets.json").read_text())["assets"]}
    entries = [yaml.safe_load(p.read_text()) for p in sorted((REPO / "conf/model").glob("*.yaml"))]
    official = [e for e in entries if "download" in e]
    assert len(official) == 3
    for entry in official:
        asset = assets[entry["download"]["name"]]
        assert asset["repo"] == entry["download"]["repo"]
        assert asset["tensor_bytes"] == entry["download"]["target_bytes"]
        assert "downloads/" + asset["directory"] == entry["weights"]["official"]["path"]


@pytest.mark.parametrize("path", ALL_MODULES, ids=lambda p: p.name)
def test_the_tools_are_python_38_and_import_nothing_but_the_standard_library(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 8))
    siblings = {p.stem for p in ALL_MODULES}
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or "."] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            assert name.split(".")[0] in sys.stdlib_module_names | siblings, name


def old_python() -> str | None:
    found = shutil.which("python3.8")
    candidates = [found] if found else []
    candidates += [str(p) for p in sorted(Path.home().glob(".pyenv/versions/3.8*/bin/python"))]
    for candidate in candidates:
        if subprocess.run([candidate, "-c", "import ssl"], capture_output=True).returncode == 0:
            return candidate
    return None


@pytest.mark.skipif(old_python() is None, reason="no Python 3.8 here")
def test_python_38_itself_resumes_and_verifies(server: FileServer, tmp_path: Path, out: Path) -> None:
    files = tiny_checkpoint()
    hub(server, files)
    body = random_bytes(300_000)
    path = manifest(tmp_path, archive(server, "a.tgz", body), checkpoint_entry(tensors=3))
    server.items["/a.tgz"].cuts = [100_000]
    done = subprocess.run(
        [str(old_python()), "-B", str(TOOL), *arguments(path, out, server)],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": os.environ["PATH"], "no_proxy": "127.0.0.1"},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["files"] == 6
    assert (out / "a.tgz").read_bytes() == body


def test_the_bar_counts_restarts_down_and_estimates_the_time_left_from_received_bytes() -> None:
    progress = module("_progress").Progress(io.StringIO())
    progress.expect("a", 3_000_000)
    progress.expect("b", 1_000_000)
    progress.at("a", 1_000_000)
    progress._samples[0] = (100.0, 0)
    assert "ETA unknown" in progress.line(101.0)
    progress.received(1_000_000)
    progress.at("a", 2_000_000)
    line = progress.line(102.0)
    assert (
        " 50%" in line and "2 MB of 4 MB" in line and "0.5 MB/s" in line and "ETA 0:04" in line and "0/2 files" in line
    )
    progress.at("a", 0)
    assert "0 B of 4 MB" in progress.line(102.0)
    progress.finish("b")
    assert "1/2 files" in progress.line(102.0)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (44_877, "44.9 kB"), (31_412_968_448, "31.4 GB"), (2.5e12, "2,500 GB")],
)
def test_sizes_are_decimal(count: float, text: str) -> None:
    assert module("_progress").human_bytes(count) == text
