"""One file, downloaded: resumed by range, hashed while it streams, renamed into place when it is whole.

The bytes of an unfinished file lie in `<name>.part`, the version tag (ETag) that they came from in
`<name>.part.tag`. Standard library only and Python >= 3.8.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.client
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from _http import (
    Answer,
    CutError,
    FetchError,
    RemoteFile,
    Retry,
    UsageError,
    attempts,
    open_url,
    reason_of,
    wrong_size,
)
from _progress import Progress

CHUNK_BYTES = 1 << 20
STEADY_BYTES = 8 << 20  # a connection that brings this much more than ever before ends a row of failures
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class PartFile:
    """The bytes that have arrived, in `<name>.part`, with their running SHA-256."""

    def __init__(self, target: Path, tick: Callable[[int], None]) -> None:
        self.path = target.with_name(target.name + ".part")
        self._tag_path = target.with_name(target.name + ".part.tag")
        self.tag = self._tag_path.read_text(encoding="utf-8") if self._tag_path.exists() else ""
        self._file = open(self.path, "r+b" if self.path.exists() else "w+b")  # noqa: SIM115, PTH123 (closed by close)
        self._sha256 = hashlib.sha256()
        self.offset = 0
        for block in iter(lambda: self._file.read(CHUNK_BYTES), b""):
            self._sha256.update(block)
            self.offset += len(block)
            tick(self.offset)
        self.resumed = self.offset > 0

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    def git_sha1(self) -> str:
        self._file.flush()
        return git_blob_sha1(self.path)

    def restart(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._sha256, self.offset, self.resumed = hashlib.sha256(), 0, False

    def set_tag(self, tag: str) -> None:
        self.tag = tag
        self._tag_path.write_text(tag, encoding="utf-8")

    def append(self, block: bytes) -> None:
        self._file.write(block)
        self._sha256.update(block)
        self.offset += len(block)

    def commit(self, target: Path) -> None:
        """Everything on disk, then the final name: the target is whole or absent at every moment."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self.path.replace(target)
        self._tag_path.unlink(missing_ok=True)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk refuses the last flush once more
            self._file.close()

    def discard(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)
        self._tag_path.unlink(missing_ok=True)


def git_blob_sha1(path: Path) -> str:
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as file:
        for block in iter(lambda: file.read(CHUNK_BYTES), b""):
            digest.update(block)
    return digest.hexdigest()


def sha256_of(path: Path, tick: Callable[[int], None] | None = None) -> str:
    """SHA-256 of a file on disk, in hex. `tick` is told the number of bytes read so far."""
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        for block in iter(lambda: file.read(CHUNK_BYTES), b""):
            digest.update(block)
            done += len(block)
            if tick is not None:
                tick(done)
    return digest.hexdigest()


@dataclass(frozen=True)
class Fetched:
    file: RemoteFile
    sha256: str
    bytes: int
    fresh: bool  # False: it was already there and passed its check


def fetch(file: RemoteFile, retry: Retry, progress: Progress) -> Fetched:
    """Has `file` at its path, whole and checked; keeps one that is there already and passes the same check.

    Raises FetchError (network, verification) or UsageError (disk). An unfinished `.part` stays for the next
    run; one that fails verification is removed.
    """

    def tick(done_bytes: int) -> None:
        progress.at(file.label, done_bytes)
        retry.check()

    present = _keep_present(file, progress, tick)
    if present is not None:
        return present
    try:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        return _download(file, retry, progress, tick)
    except OSError as error:
        if error.errno in FULL_DISK:
            part = file.path.with_name(file.path.name + ".part")
            kept = part.stat().st_size if part.exists() else 0
            total = "an unknown number of" if file.bytes is None else f"{file.bytes:,}"
            raise UsageError(
                f"disk full at {file.path}: {kept:,} of {total} bytes are kept ({error.strerror}); "
                "free space or choose another --output, then run the same command again"
            ) from error
        raise UsageError(f"cannot write {file.path}: {error.strerror or error}; check --output") from error


def _keep_present(file: RemoteFile, progress: Progress, tick: Callable[[int], None]) -> Fetched | None:
    if not file.path.is_file():
        return None
    size = file.path.stat().st_size
    if file.bytes is None and not (file.sha256 or file.git_sha1):
        return None
    if file.bytes is None or size == file.bytes:
        digest = sha256_of(file.path, tick)
        git_sha1 = git_blob_sha1(file.path) if file.git_sha1 else None
        if file.sha256 in (None, digest) and file.git_sha1 == git_sha1:
            return Fetched(file, digest, size, fresh=False)
    progress.note(f"{file.label}: the file on disk fails its check ({file.check}); it is fetched again")
    return None


def _download(file: RemoteFile, retry: Retry, progress: Progress, tick: Callable[[int], None]) -> Fetched:
    part = PartFile(file.path, tick)
    best = part.offset
    try:
        for again in (True, False):
            for attempt in attempts(file, retry):
                with attempt:
                    try:
                        file = _stream(file, part, retry, progress)
                    finally:
                        attempt.steady = part.offset >= best + STEADY_BYTES
                        best = max(best, part.offset)
            wrong = _mismatch(file, part)
            if wrong is None:
                digest, size = part.sha256, part.offset
                part.commit(file.path)
                return Fetched(file, digest, size, fresh=True)
            if not (again and part.resumed):
                part.discard()
                raise FetchError(
                    f"{file.label}: {wrong} ({file.url}); the bytes were discarded: run again, and if it "
                    "repeats the source is not the file that the manifest names"
                )
            progress.note(f"{file.label}: {wrong} after resuming; it is fetched again from the start")
            part.restart()
            best = 0
        raise AssertionError("unreachable: the second pass returns or raises")
    finally:
        part.close()


def _stream(file: RemoteFile, part: PartFile, retry: Retry, progress: Progress) -> RemoteFile:
    """One connection's worth of bytes appended to `part`. Returns the file with its size known."""
    if file.bytes is not None and part.offset > file.bytes:
        part.restart()
    if file.bytes is not None and part.offset == file.bytes and part.offset:
        return file
    with open_url(file, retry, start=part.offset) as answer:
        total = answer.length
        if answer.status == 416 or (answer.status == 206 and not _continues(answer, part)):
            part.restart()
            offered = answer.header("Content-Range") or "no range"
            raise CutError(f"the server cannot continue: HTTP {answer.status}, {offered}")
        if answer.status == 200 and part.offset:
            progress.note(f"{file.label}: the server ignores ranges; it starts again from byte 0")
            part.restart()
        if file.bytes is not None and total not in (None, file.bytes):
            raise wrong_size(file, total or 0)
        file = replace(file, bytes=total if file.bytes is None else file.bytes)
        part.set_tag(answer.tag)
        progress.expect(file.label, file.bytes)
        progress.at(file.label, part.offset)
        while file.bytes is None or part.offset < file.bytes:
            retry.check()
            left = CHUNK_BYTES if file.bytes is None else min(CHUNK_BYTES, file.bytes - part.offset)
            try:
                block = answer.body.read1(left)  # what is there now: a slow link still stops soon
            except (OSError, http.client.HTTPException) as error:
                raise CutError(f"connection cut at byte {part.offset:,}: {reason_of(error)}") from error
            if not block:
                break
            part.append(block)
            progress.received(len(block))
            progress.at(file.label, part.offset)
        if file.bytes is not None and part.offset < file.bytes:
            raise CutError(f"connection cut at byte {part.offset:,} of {file.bytes:,}")
        return replace(file, bytes=part.offset) if file.bytes is None else file


def _continues(answer: Answer, part: PartFile) -> bool:
    """A partial answer fits when it starts where the part ends and comes from the same version."""
    match = re.match(r"bytes (\d+)-", answer.header("Content-Range"))
    return match is not None and int(match.group(1)) == part.offset and answer.tag == part.tag


def _mismatch(file: RemoteFile, part: PartFile) -> str | None:
    if file.bytes is not None and part.offset != file.bytes:
        return f"{part.offset:,} bytes arrived, {file.bytes:,} are expected"
    if file.sha256 and part.sha256 != file.sha256:
        return f"SHA-256 is {part.sha256}, expected {file.sha256}"
    if file.git_sha1:
        found = part.git_sha1()
        if found != file.git_sha1:
            return f"git SHA-1 is {found}, expected {file.git_sha1}"
    return None
