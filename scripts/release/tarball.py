"""A .tar.gz whose bytes depend on its entries alone: sorted, fixed owner, time and modes, no timestamp in gzip."""

from __future__ import annotations

import gzip
import hashlib
import io
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from _http import UsageError
from _progress import human_bytes, human_seconds

MTIME = 1577836800  # 2020-01-01, UTC, for every entry
BLOCK_BYTES = 1 << 20
REPORT_EVERY_S = 10.0


@dataclass(frozen=True)
class Entry:
    """One file of an archive: `path` inside it, and its content as bytes or as a file on disk."""

    path: str
    content: bytes | Path
    executable: bool = False

    @property
    def bytes(self) -> int:
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size


@dataclass(frozen=True)
class Built:
    """What an archive turned out to be. tar_sha256 is of the uncompressed tar: the same with every zlib."""

    file: str
    bytes: int
    sha256: str
    tar_sha256: str
    files: tuple[dict[str, object], ...]


class _Hashing:
    """A file to write to (or read from) that hashes and counts what passes."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.digest, self.count = stream, hashlib.sha256(), 0

    def write(self, block: bytes) -> int:
        self._pass(block)
        return self.stream.write(block)

    def read(self, size: int = -1) -> bytes:
        block = self.stream.read(size)
        self._pass(block)
        return block

    def flush(self) -> None:
        self.stream.flush()

    def _pass(self, block: bytes) -> None:
        self.digest.update(block)
        self.count += len(block)


class Report:
    """A line now and then: bytes read, rate, time left."""

    def __init__(self, name: str, total_bytes: int) -> None:
        self.name, self.total, self.done = name, total_bytes, 0
        self.start = self.last = time.monotonic()

    def add(self, count: int) -> None:
        self.done += count
        now = time.monotonic()
        if now - self.last >= REPORT_EVERY_S:
            self.last = now
            rate = self.done / (now - self.start)
            left = human_seconds((self.total - self.done) / rate)
            say(f"{self.name}: {human_bytes(self.done)} of {human_bytes(self.total)}, {left} left")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def build(output: Path, entries: Sequence[Entry], level: int) -> Built:
    """Writes `output` through a .part file, which is removed when anything fails."""
    ordered = sorted(entries, key=lambda e: e.path.encode())
    names = [e.path for e in ordered]
    assert len(set(names)) == len(names), "an archive holds a path once"
    part = output.with_name(output.name + ".part")
    report = Report(output.name, sum(e.bytes for e in ordered))
    try:
        with part.open("wb") as raw:
            packed = _Hashing(raw)
            with gzip.GzipFile("", "wb", level, packed, mtime=0) as zipped:  # type: ignore[arg-type]
                plain = _Hashing(zipped)  # type: ignore[arg-type]
                files = _write_tar(plain, ordered, report)
        part.replace(output)
    finally:
        part.unlink(missing_ok=True)
    say(f"{output.name}: {len(files)} files, {human_bytes(report.total)} -> {human_bytes(packed.count)}")
    return Built(output.name, packed.count, packed.digest.hexdigest(), plain.digest.hexdigest(), tuple(files))


def _write_tar(plain: _Hashing, ordered: Sequence[Entry], report: Report) -> list[dict[str, object]]:
    files: list[dict[str, object]] = []
    with tarfile.open(fileobj=plain, mode="w|", format=tarfile.PAX_FORMAT, bufsize=BLOCK_BYTES) as tar:  # type: ignore[call-overload]
        for entry in ordered:
            info = tarfile.TarInfo(entry.path)
            info.size, info.mtime, info.mode = entry.bytes, MTIME, 0o755 if entry.executable else 0o644
            with _open(entry) as stream:
                reader = _Hashing(stream)
                try:
                    tar.addfile(info, reader)  # type: ignore[arg-type]
                    grown = bool(stream.read(1))
                except OSError as error:
                    if error.errno is not None:
                        raise
                    grown = True  # tarfile's "unexpected end of data"
            if grown:
                raise UsageError(f"{entry.content!s} changed while it was packed; let it be and run again")
            report.add(info.size)
            files.append({"path": entry.path, "bytes": info.size, "sha256": reader.digest.hexdigest()})
    return files


def _open(entry: Entry) -> BinaryIO:
    return io.BytesIO(entry.content) if isinstance(entry.content, bytes) else entry.content.open("rb")
