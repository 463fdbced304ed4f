"""Dataset files that are already on disk: found by name, recognised by hash or format, copied atomically.

Standard library only and Python >= 3.8; parquet is recognised by its footer, with the column names in plain.
"""

from __future__ import annotations

import csv
import fnmatch
import gzip
import io
import json
import os
import shutil
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from _fetch import FULL_DISK, sha256_of
from _http import UsageError

FORMATS = ("jsonl", "jsonl.gz", "text", "parquet", "csv", "zip")
HEAD_BYTES = 1 << 20
PARQUET_MAGIC = b"PAR1"


@dataclass(frozen=True)
class KnownFile:
    """The last parts of a path under which a dataset's file is known, and how to tell that a file is it.

    fields: JSON keys of the first record, parquet or CSV columns, words of a text, or ends of zip members.
    """

    pattern: str
    format: str
    fields: tuple[str, ...]


def has_format(path: Path, known: KnownFile) -> bool:
    """True when the file's beginning (parquet: footer) is of the known format and has the known fields."""
    try:
        if known.format == "zip":
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
            return all(any(n.endswith(f) for n in names) for f in known.fields)
        if known.format == "parquet":
            footer = _parquet_footer(path)
            return all(f.encode() in footer for f in known.fields)
        with path.open("rb") as raw:
            file = gzip.GzipFile(fileobj=raw) if known.format == "jsonl.gz" else raw
            head = file.read(HEAD_BYTES).decode("utf-8", errors="replace")
        if known.format == "text":
            return all(f in head for f in known.fields)
        if known.format == "csv":
            return set(known.fields) <= set(next(csv.reader(io.StringIO(head)), []))
        record = json.loads(head.split("\n", 1)[0])
        return isinstance(record, dict) and set(known.fields) <= set(record)
    except (OSError, EOFError, ValueError, csv.Error, zlib.error, zipfile.BadZipFile):
        return False


def _parquet_footer(path: Path) -> bytes:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size < 12:
            return b""
        file.seek(-8, os.SEEK_END)
        tail = file.read(8)
        length = int.from_bytes(tail[:4], "little")
        if tail[4:] != PARQUET_MAGIC or length > size - 12:
            return b""
        file.seek(size - 8 - length)
        return file.read(length)


def find_files(folder: Path, known: tuple[KnownFile, ...], hashes: dict[str, str]) -> list[tuple[Path, str, str]]:
    """(path, SHA-256, check) of the first pattern that has matches anywhere below `folder`.

    hashes: published SHA-256 -> file name; a hit is "sha256", one recognised by its content is "format". Of
    two files with the same name the one with the published hash wins, then the first by path.
    """
    below = sorted(p for p in folder.rglob("*") if p.is_file())
    for kind in known:
        best: dict[str, tuple[Path, str, str]] = {}
        for path in below:
            if not fnmatch.fnmatch("/" + path.relative_to(folder).as_posix(), "*/" + kind.pattern):
                continue
            digest = sha256_of(path)
            if digest in hashes:
                if best.get(path.name, ("", "", ""))[2] != "sha256":
                    best[path.name] = (path, digest, "sha256")
            elif path.name not in best and has_format(path, kind):
                best[path.name] = (path, digest, "format")
        if best:
            return [best[name] for name in sorted(best)]
    return []


def copy_file(source: Path, target: Path, digest: str) -> bool:
    """Copies under a temporary name, compares the hash, renames. False when the same bytes are there."""
    if target.is_file() and (source.samefile(target) or sha256_of(target) == digest):
        return False
    draft = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, draft)
        if sha256_of(draft) != digest:
            raise UsageError(f"{source} changed while it was copied; run again")
        draft.replace(target)
    except OSError as error:
        draft.unlink(missing_ok=True)
        full = "disk full" if error.errno in FULL_DISK else "cannot write"
        raise UsageError(f"{full} at {target}: {error.strerror}; free space or choose another --output") from error
    return True
