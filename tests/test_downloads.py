"""The downloader against a local server with every fault that it has to survive or report."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from download_helpers import (
    INIT,
    archive,
    arguments,
    leftovers,
    manifest,
    module,
    random_bytes,
    run_download,
    sha256,
)
from download_server import FileServer, file_server

TOOL = INIT / "download_models.py"


def test_an_archive_arrives_whole_and_a_second_run_asks_for_nothing(
    server: FileServer, tmp_path: Path, out: Path
) -> None:
    body = random_bytes(3_000_000)
    path = manifest(tmp_path, archive(server, "a.tar.gz", body))
    first = run_download(arguments(path, out))
    assert first.code == 0
    assert (out / "a.tar.gz").read_bytes() == body
    assert first.json["fetched_files"] == 1
    assert first.json["checks"] == {"sha256": 1}
    assert leftovers(out) == []
    asked = len(server.seen)
    second = run_download(arguments(path, out))
    assert second.json["fetched_files"] == 0
    assert len(server.seen) == asked


def test_a_cut_connection_is_continued_by_range_from_the_byte_it_reached(
    server: FileServer, tmp_path: Path, out: Path
) -> None:
    body = random_bytes(400_000)
    path = manifest(tmp_path, archive(server, "a.tar.gz", body))
    server.items["/a.tar.gz"].cuts = [100_000, 0, 150_000]
    assert run_download(arguments(path, out)).code == 0
    assert (out / "a.tar.gz").read_bytes() == body
    assert server.gets("/a.tar.gz") == ["", "bytes=100000-", "bytes=100000-", "bytes=250000-"]


def test_a_server_without_ranges_makes_it_start_again_and_still_end_whole(
    server: FileServer, tmp_path: Path, out: Path
) -> None:
    body = random_bytes(400_000)
    path = manifest(tmp_path, archive(server, "a.tar.gz", body))
    server.items["/a.tar.gz"].ranges = False
    server.items["/a.tar.gz"].cuts = [100_000, 300_000]
    ran = run_download(arguments(path, out))
    assert ran.code == 0
    assert (out / "a.tar.gz").read_bytes() == body
    assert "ignores ranges" in ran.stderr


def test_attempts_without_progress_are_bounded_and_the_error_names_file_and_remedy(
    server: FileServer, tmp_path: Path, out: Path
) -> None:
    body = random_bytes(400_000)
    path = manifest(tmp_path, archive(server, "a.tar.gz", body))
    server.items["/a.tar.gz"].cuts = [50_000] + [0] * 50
    ran = run_download(arguments(path, out))
    assert ran.code == 1
    assert "a:" in ran.error and "4 attempts" in ran.error and "run the same command again" in ran.error
    assert len(server.gets("/a.tar.gz")) == 4
    assert (out / "a.tar.gz.part").stat().st_size == 50_000
    server.items["/a.tar.gz"].cuts = []
    assert run_download(arguments(path, out)).code == 0
    assert server.gets("/a.tar.gz")[-1] == "bytes=50000-"
    assert (out / "a.tar.gz").read_bytes() == body


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_passing_refusal_is_tried_again(status: int, server: FileServer, tmp_path: Path, out: Path) -> None:
    path = manifest(tmp_path, archive(server, "a.tar.gz", b"body"))
    server.items["/a.tar.gz"].statuses = [(status, {"Retry-After": "0"})] * 2
    assert run_download(arguments(path, out)).code == 0
    assert len(server.gets("/a.tar.gz")) == 3


@pytest.mark.parametrize(("status", "word"), [(401, "gated"), (403, "gated"), (404, "manifest"), (451, "HTTP 451")])
def test_a_lasting_refusal_is_reported_at_once(
    status: int, word: str, server: FileServer, tmp_path: Path, out: Path
) -> None:
    path = manifest(tmp_path, archive(server, "a.tar.gz", b"body"))
    server.items["/a.tar.gz"].statuses = [(status, {})] * 9
    ran = run_download(arguments(path, out))
    assert ran.code == 1
    assert word in ran.error and f"HTTP {status}" in ran.error
    assert len(server.gets("/a.tar.gz")) == 1


def test_a_server_that_is_gone_is_a_network_error(tmp_path: Path, out: Path) -> None:
    with file_server() as gone:
        entry = archive(gone, "a.tar.gz", b"body")
    ran = run_download(arguments(manifest(tmp_path, entry), out))
    assert ran.code == 1
    assert "refused" in ran.error


def test_a_wrong_hash_leaves_no_file_and_no_part(server: FileServer, tmp_path: Path, out: Path) -> None:
    path = manifest(tmp_path, archive(server, "a.tar.gz", b"x" * 1000, sha256=sha256(b"something else")))
    ran = run_download(arguments(path, out))
    assert ran.code == 1
    assert sha256(b"x" * 1000) in ran.error and sha256(b"something else") in ran.error
    assert [p.name for p in out.iterdir()] == [".download.lock"]


def test_a_size_that_differs_from_the_manifest_is_refused_before_the_content(
    server: FileServer, tmp_path: Path, out: Path
) -> None:
    path = manifest(tmp_path, archive(server, "a.tar.gz", b"x" * 1000, bytes=999))
    ran = run_download(arguments(path, out))
    assert ran.code == 1
    assert "1,000" in ran.error and "999" in ran.error
    assert not (out / "a.tar.gz").exists()


def test_foreign_bytes_in_a_part_file_cost_one_full_restart_and_no_more(
    server: FileServer, tmp_path: Path, out: Path
) -> None:
    body = random_bytes(200_000)
    path = manifest(tmp_path, archive(server, "a.tar.gz", body))
    out.mkdir()
    (out / "a.tar.gz.part").write_bytes(b"z" * 70_000)
    (out / "a.tar.gz.part.tag").write_text(f'"{hashlib.md5(body).hexdigest()}"')
    ran = run_download(arguments(path, out))
    assert ran.code == 0
    assert (out / "a.tar.gz").read_bytes() == body
    assert server.gets("/a.tar.gz") == ["bytes=70000-", ""]
    assert "fetched again from the start" in ran.stderr


def test_a_part_of_another_version_is_not_continued(server: FileServer, tmp_path: Path, out: Path) -> None:
    body = random_bytes(200_000)
    path = manifest(tmp_path, archive(server, "a.tar.gz", body))
    out.mkdir()
    (out / "a.tar.gz.part").write_bytes(body[:70_000])
    (out / "a.tar.gz.part.tag").write_text('"an older version"')
    assert run_download(arguments(path, out)).code == 0
    assert server.gets("/a.tar.gz") == ["bytes=70000-", ""]


@pytest.mark.parametrize("size", [200_000, 200_001, 250_000])
def test_a_part_of_full_length_or_more_ends_whole(size: int, server: FileServer, tmp_path: Path, out: Path) -> None:
    body = random_bytes(200_000)
    path = manifest(tmp_path, archive(server, "a.tar.gz", body))
    out.mkdir()
    (out / "a.tar.gz.part").write_bytes((body + b"z" * 100_000)[:size])
    assert run_download(arguments(path, out)).code == 0
    assert (out / "a.tar.gz").read_bytes() == body
    assert len(server.gets("/a.tar.gz")) == (0 if size == 200_000 else 1)


def test_a_damaged_file_on_disk_is_found_and_replaced(server: FileServer, tmp_path: Path, out: Path) -> None:
    path = manifest(tmp_path, archive(server, "a.tar.gz", b"x" * 1000))
    out.mkdir()
    (out / "a.tar.gz").write_bytes(b"y" * 1000)
    ran = run_download(arguments(path, out))
    assert ran.code == 0
    assert "fails its check" in ran.stderr
    assert (out / "a.tar.gz").read_bytes() == b"x" * 1000


def test_transfers_run_in_parallel(server: FileServer, tmp_path: Path, out: Path) -> None:
    together = threading.Barrier(3)
    entries = []
    for name in ("a.tgz", "b.tgz", "c.tgz"):
        entries.append(archive(server, name, random_bytes(1000)))
        server.items[f"/{name}"].meet = together
    assert run_download(arguments(manifest(tmp_path, *entries), out, None, "--jobs", "3")).code == 0
    assert not together.broken


def test_one_failing_file_does_not_stop_the_others(server: FileServer, tmp_path: Path, out: Path) -> None:
    bad = archive(server, "a.tgz", b"x" * 1000, sha256=sha256(b""))
    ran = run_download(arguments(manifest(tmp_path, bad, archive(server, "b.tgz", b"good")), out, None, "--jobs", "1"))
    assert ran.code == 1
    assert ran.error.startswith("error: a:")
    assert (out / "b.tgz").read_bytes() == b"good"


def test_too_little_space_is_refused_with_both_numbers_before_any_transfer(
    server: FileServer, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module("_batch"), "free_bytes", lambda folder: 2_500_000)
    path = manifest(tmp_path, archive(server, "a.tar.gz", b"x" * 3_000_000))
    ran = run_download(arguments(path, out))
    assert ran.code == 2
    assert "needs 3 MB" in ran.error and "2.5 MB are free" in ran.error and "--output" in ran.error
    assert server.seen == []
    assert run_download(arguments(path, out, None, "--dry-run")).code == 2


def test_what_is_already_on_disk_does_not_count_as_needed_space(
    server: FileServer, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module("_batch"), "free_bytes", lambda folder: 1_000_000)
    body = random_bytes(3_000_000)
    path = manifest(tmp_path, archive(server, "a.tar.gz", body))
    out.mkdir()
    (out / "a.tar.gz.part").write_bytes(body[:2_500_000])
    (out / "a.tar.gz.part.tag").write_text(f'"{hashlib.md5(body).hexdigest()}"')
    assert run_download(arguments(path, out)).code == 0


def test_a_disk_that_fills_up_keeps_the_part_and_the_next_run_continues(
    server: FileServer, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = random_bytes(5 << 20)
    path = manifest(tmp_path, archive(server, "a.tar.gz", body))
    part_file = module("_fetch").PartFile
    append = part_file.append

    def full(self: Any, block: bytes) -> None:
        if self.offset + len(block) > 3 << 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(self, block)

    monkeypatch.setattr(part_file, "append", full)
    ran = run_download(arguments(path, out))
    assert ran.code == 2
    assert "disk full" in ran.error and f"{5 << 20:,}" in ran.error and "--output" in ran.error
    kept = (out / "a.tar.gz.part").stat().st_size
    assert 0 < kept <= 3 << 20
    monkeypatch.setattr(part_file, "append", append)
    assert run_download(arguments(path, out)).code == 0
    assert server.gets("/a.tar.gz")[-1] == f"bytes={kept}-"
    assert (out / "a.tar.gz").read_bytes() == body


def start(arguments: list[str], **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-B", str(TOOL), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "no_proxy": "127.0.0.1"},
        **more,
    )


def test_a_write_that_the_system_really_refuses_is_reported_in_one_line(
    server: FileServer, tmp_path: Path, out: Path
) -> None:
    path = manifest(tmp_path, archive(server, "a.tar.gz", random_bytes(1 << 20)))

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))

    process = start(arguments(path, out), preexec_fn=limit)
    stderr = process.communicate(timeout=30)[1]
    assert process.returncode == 2
    assert stderr.splitlines()[-1].startswith("error: disk full")
    assert "Traceback" not in stderr
    assert not (out / "a.tar.gz").exists()


def wait_for_bytes(path: Path, count: int) -> None:
    deadline = time.monotonic() + 20
    while not (path.exists() and path.stat().st_size >= count):
        assert time.monotonic() < deadline, f"{path} did not reach {count} bytes"
        time.sleep(0.01)


def test_a_killed_run_is_continued_where_it_stopped(server: FileServer, tmp_path: Path, out: Path) -> None:
    body = random_bytes(4 << 20)
    path = manifest(tmp_path, archive(server, "a.tar.gz", body))
    server.items["/a.tar.gz"].block_s = 0.005
    process = start(arguments(path, out))
    wait_for_bytes(out / "a.tar.gz.part", 1 << 20)
    process.kill()
    process.communicate(timeout=20)
    kept = (out / "a.tar.gz.part").stat().st_size
    assert not (out / "a.tar.gz").exists()
    server.pause.set()
    assert run_download(arguments(path, out)).code == 0
    assert server.gets("/a.tar.gz")[-1] == f"bytes={kept}-"
    assert (out / "a.tar.gz").read_bytes() == body


def test_an_interrupt_ends_soon_with_130_and_keeps_what_arrived(server: FileServer, tmp_path: Path, out: Path) -> None:
    path = manifest(tmp_path, archive(server, "a.tar.gz", random_bytes(8 << 20)))
    server.items["/a.tar.gz"].block_s = 0.01
    process = start(arguments(path, out))
    wait_for_bytes(out / "a.tar.gz.part", 1 << 20)
    process.send_signal(signal.SIGINT)
    stderr = process.communicate(timeout=20)[1]
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert (out / "a.tar.gz.part").stat().st_size >= 1 << 20


def test_a_second_run_into_the_same_folder_is_refused(server: FileServer, tmp_path: Path, out: Path) -> None:
    path = manifest(tmp_path, archive(server, "a.tar.gz", b"body"))
    with module("_batch").lock_folder(out):
        ran = run_download(arguments(path, out))
    assert ran.code == 2
    assert str(out) in ran.error
    assert run_download(arguments(path, out)).code == 0


def test_an_output_that_cannot_be_written_is_one_line(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    path = manifest(tmp_path, archive(server, "a.tar.gz", b"body"))
    ran = run_download(arguments(path, tmp_path / "file" / "below"))
    assert ran.code == 2
    assert "--output" in ran.error
