"""Checkpoints from a hub: commit, index, digests, record."""

from __future__ import annotations

import json
import urllib.request
from email.message import Message
from pathlib import Path

import pytest
from download_helpers import (
    COMMIT,
    OTHER,
    arguments,
    checkpoint_entry,
    hub,
    manifest,
    module,
    run_download,
    safetensors,
    sha256,
    tiny_checkpoint,
)
from download_server import FileServer


def test_shards_are_discovered_from_the_index_and_every_file_is_checked_by_the_hubs_digest(
    server: FileServer, tmp_path: Path, out: Path
) -> None:
    files = tiny_checkpoint()
    hub(server, files)
    ran = run_download(arguments(manifest(tmp_path, checkpoint_entry(tensors=3)), out, server))
    assert ran.code == 0
    folder = out / "tiny/target"
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "download.json"} == files
    assert ran.json["checks"] == {"git sha1 (hub)": 3, "sha256 (hub)": 2}
    assert "tiny/LICENSE: not published" in ran.stderr
    assert "licence: MIT" in ran.stderr
    record = json.loads((folder / "download.json").read_text())
    assert record["commit"] == COMMIT and record["complete"] is True
    assert {n: e["sha256"] for n, e in record["files"].items()} == {n: sha256(b) for n, b in files.items()}


def test_content_is_asked_for_at_the_commit_and_not_at_the_branch(
    server: FileServer, tmp_path: Path, out: Path
) -> None:
    hub(server, tiny_checkpoint())
    assert run_download(arguments(manifest(tmp_path, checkpoint_entry()), out, server)).code == 0
    bodies = {s.path for s in server.seen if s.method == "GET" and s.path.startswith("/org")}
    assert len(bodies) == 5
    assert all(f"/resolve/{COMMIT}/" in path for path in bodies)


def test_a_complete_checkpoint_is_checked_without_network_and_a_damaged_shard_is_found(
    server: FileServer, tmp_path: Path, out: Path
) -> None:
    files = tiny_checkpoint()
    hub(server, files)
    path = manifest(tmp_path, checkpoint_entry())
    assert run_download(arguments(path, out, server)).code == 0
    asked = len(server.seen)
    assert run_download(arguments(path, out, server)).json["fetched_files"] == 0
    assert len(server.seen) == asked
    shard = out / "tiny/target/model-2.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    assert run_download(arguments(path, out, server)).json["fetched_files"] == 1
    assert shard.read_bytes() == files["model-2.safetensors"]


def test_a_shard_that_differs_from_the_hubs_digest_is_refused(server: FileServer, tmp_path: Path, out: Path) -> None:
    files = tiny_checkpoint()
    hub(server, files)
    server.items[f"/cdn/{COMMIT}/model-2.safetensors"].body = files["model-2.safetensors"][:-1] + b"!"
    ran = run_download(arguments(manifest(tmp_path, checkpoint_entry()), out, server))
    assert ran.code == 1
    assert "tiny/model-2.safetensors" in ran.error and "SHA-256" in ran.error
    assert not (out / "tiny/target/model-2.safetensors").exists()


def test_a_small_file_that_differs_from_the_hubs_blob_id_is_refused(
    server: FileServer, tmp_path: Path, out: Path
) -> None:
    hub(server, tiny_checkpoint())
    item = server.items[f"/org/tiny/resolve/{COMMIT}/config.json"]
    item.body = item.body.replace(b"tiny", b"tuny")
    ran = run_download(arguments(manifest(tmp_path, checkpoint_entry()), out, server))
    assert ran.code == 1
    assert "tiny/config.json: git SHA-1" in ran.error
    assert not (out / "tiny/target/config.json").exists()


def test_a_redirect_from_https_to_http_is_refused() -> None:
    http = module("_http")
    request = urllib.request.Request("https://hub.example/a")
    request.hub_headers = {}  # type: ignore[attr-defined]
    with pytest.raises(http.FetchError, match="from HTTPS to http://cdn"):
        http._Redirects().redirect_request(request, None, 302, "", Message(), "http://cdn.example/a")


def test_a_server_that_announces_nothing_is_checked_by_size_and_says_so(
    server: FileServer, tmp_path: Path, out: Path
) -> None:
    for path, body in tiny_checkpoint().items():
        server.put(f"/org/tiny/resolve/main/{path}", body)
    ran = run_download(arguments(manifest(tmp_path, checkpoint_entry()), out, server))
    assert ran.code == 0
    assert ran.json["checks"] == {"size only": 5}
    assert "size only" in ran.stderr and "names no commit" in ran.stderr
    again = run_download(arguments(manifest(tmp_path, checkpoint_entry()), out, server))
    assert again.json["checks"] == {"sha256 (record)": 5}


def test_a_branch_that_moves_in_between_does_not_mix_two_commits(server: FileServer, tmp_path: Path, out: Path) -> None:
    files = tiny_checkpoint()
    hub(server, files)
    path = manifest(tmp_path, checkpoint_entry())
    server.items[f"/cdn/{COMMIT}/model-2.safetensors"].cuts = [30_000] + [0] * 20
    assert run_download(arguments(path, out, server)).code == 1
    newer = {**files, "config.json": b'{"model_type": "newer"}', "model-2.safetensors": safetensors(["d"], 9)}
    hub(server, newer, commit=OTHER)
    hub(server, files, commit=COMMIT, branch=False)
    assert run_download(arguments(path, out, server)).code == 0
    assert (out / "tiny/target/config.json").read_bytes() == files["config.json"]
    assert (out / "tiny/target/model-2.safetensors").read_bytes() == files["model-2.safetensors"]
    assert server.gets(f"/cdn/{COMMIT}/model-2.safetensors")[-1] == "bytes=30000-"


def test_a_pinned_revision_that_the_hub_answers_with_another_commit_has_moved(
    server: FileServer, tmp_path: Path, out: Path
) -> None:
    hub(server, tiny_checkpoint(), commit=OTHER)
    for path in list(server.items):
        server.items[path.replace(f"/resolve/{OTHER}/", f"/resolve/{COMMIT}/")] = server.items[path]
    ran = run_download(arguments(manifest(tmp_path, checkpoint_entry(revision=COMMIT)), out, server))
    assert ran.code == 1
    assert "revision moved" in ran.error and COMMIT in ran.error and OTHER in ran.error


def test_a_pinned_revision_that_is_gone_has_moved(server: FileServer, tmp_path: Path, out: Path) -> None:
    hub(server, tiny_checkpoint())
    for item in server.items.values():
        item.statuses = [(404, {"X-Error-Code": "RevisionNotFound"})] * 9
    ran = run_download(arguments(manifest(tmp_path, checkpoint_entry(revision=COMMIT)), out, server))
    assert ran.code == 1
    assert "revision moved" in ran.error and COMMIT in ran.error and "download.json" in ran.error


def test_a_checkpoint_without_index_is_one_file(server: FileServer, tmp_path: Path, out: Path) -> None:
    hub(server, {"config.json": b"{}", "model.safetensors": safetensors(["a"], 10)})
    ran = run_download(arguments(manifest(tmp_path, checkpoint_entry(tensors=1, tensor_bytes=20)), out, server))
    assert ran.code == 0
    assert (out / "tiny/target/model.safetensors").exists()


def test_shards_named_in_the_manifest_are_fetched_even_when_no_index_exists(
    server: FileServer, tmp_path: Path, out: Path
) -> None:
    files = {k: v for k, v in tiny_checkpoint().items() if not k.endswith("index.json")}
    hub(server, files)
    named = [{"path": name} for name in ("config.json", "model-1.safetensors", "model-2.safetensors")]
    assert run_download(arguments(manifest(tmp_path, checkpoint_entry(files=named)), out, server)).code == 0
    assert (out / "tiny/target/model-2.safetensors").exists()


def test_a_required_file_that_is_missing_is_named(server: FileServer, tmp_path: Path, out: Path) -> None:
    hub(server, {k: v for k, v in tiny_checkpoint().items() if k != "config.json"})
    ran = run_download(arguments(manifest(tmp_path, checkpoint_entry()), out, server))
    assert ran.code == 1
    assert "tiny/config.json" in ran.error and "404" in ran.error


@pytest.mark.parametrize("shard", ["../evil.safetensors", "/etc/evil", "a/../../evil"])
def test_an_index_cannot_write_outside_its_folder(shard: str, server: FileServer, tmp_path: Path, out: Path) -> None:
    hub(
        server,
        {
            "config.json": b"{}",
            "model.safetensors.index.json": json.dumps({"weight_map": {"a": shard}}).encode(),
        },
    )
    ran = run_download(arguments(manifest(tmp_path, checkpoint_entry()), out, server))
    assert ran.code == 2
    assert shard in ran.error


@pytest.mark.parametrize("index", [b"not json", b"[]", b'{"weight_map": 3}'])
def test_a_broken_index_is_one_line(index: bytes, server: FileServer, tmp_path: Path, out: Path) -> None:
    hub(server, {"config.json": b"{}", "model.safetensors.index.json": index})
    ran = run_download(arguments(manifest(tmp_path, checkpoint_entry()), out, server))
    assert ran.code == 1
    assert "index" in ran.error


def test_a_tensor_count_that_contradicts_a_fact_is_an_error_and_a_computed_one_a_note(
    server: FileServer, tmp_path: Path, out: Path
) -> None:
    hub(server, tiny_checkpoint())
    fact = run_download(arguments(manifest(tmp_path, checkpoint_entry(tensors=4)), out, server))
    assert fact.code == 1
    assert "tensors is 3, the manifest expects 4" in fact.error
    computed = checkpoint_entry(tensors=4, computed=["tensors"])
    noted = run_download(arguments(manifest(tmp_path, computed), out, server))
    assert noted.code == 0
    assert "note: tiny: tensors is 3, the manifest expects 4" in noted.stderr


def test_a_truncated_safetensors_file_is_an_error_although_its_size_was_announced(
    server: FileServer, tmp_path: Path, out: Path
) -> None:
    files = tiny_checkpoint()
    hub(server, {**files, "model-2.safetensors": files["model-2.safetensors"][:-5]})
    ran = run_download(arguments(manifest(tmp_path, checkpoint_entry()), out, server))
    assert ran.code == 1
    assert "model-2.safetensors" in ran.error


def test_a_damaged_record_is_one_line(server: FileServer, tmp_path: Path, out: Path) -> None:
    (out / "tiny/target").mkdir(parents=True)
    (out / "tiny/target/download.json").write_text('{"repo": "org/tiny"')
    ran = run_download(arguments(manifest(tmp_path, checkpoint_entry()), out, server))
    assert ran.code == 2
    assert "download.json" in ran.error and "delete it" in ran.error
