"""GPQA's archive of the release, encrypted from end to end: nothing here decrypts a byte.

The release holds gpqa_main.csv.zip. Its authors publish dataset.zip, which has gpqa_main.csv among others. The
encryption of zip archives covers a member's content and not its name, so that member's encrypted bytes are
copied into an archive of their own as they stand, with the password that the authors chose.
"""

from __future__ import annotations

import hashlib
import io
import struct
import zipfile
from collections.abc import Collection
from pathlib import Path

from _http import UsageError

from release.tarball import say

MEMBER = "gpqa_main.csv"
PREPARED = "gpqa_main.csv.zip"
PUBLISHED = "dataset.zip"
ENCRYPTED, DESCRIPTOR = 0x1, 0x8
LOCAL = struct.Struct("<4s5H3I2H")
CENTRAL = struct.Struct("<4s6H3I5H2I")
END = struct.Struct("<4s4H2IH")


def archive(folder: Path, pins: Collection[str]) -> bytes:
    """The bytes of gpqa_main.csv.zip: that file, or made of dataset.zip. Either one's SHA-256 has to be in `pins`."""
    for name in (PREPARED, PUBLISHED):
        path = folder / name
        if path.is_file():
            body = path.read_bytes()
            digest = hashlib.sha256(body).hexdigest()
            if digest not in pins:
                raise UsageError(f"{path} has SHA-256 {digest}, which is not pinned; check it and give --gpqa-sha256")
            check_encrypted(path, body)
            if name == PREPARED:
                return body
            say(f"{PREPARED}: made of {name} ({digest[:12]}…), the encrypted bytes of {MEMBER} copied as they stand")
            return single_member(path, body)
    raise UsageError(f"{folder} has neither {PREPARED} nor {PUBLISHED}; fetch it with download_datasets.py --only gpqa")


def check_encrypted(path: Path, body: bytes) -> None:
    """UsageError when any file of the archive can be read without a password."""
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as opened:
            members = [i for i in opened.infolist() if not i.is_dir()]
    except zipfile.BadZipFile as error:
        raise UsageError(f"{path} is no zip archive ({error}); fetch it again") from error
    plain = [i.filename for i in members if not i.flag_bits & ENCRYPTED]
    if plain:
        raise UsageError(f"{path}: {plain[0]} is not encrypted; GPQA is not released in plain text, fetch it again")
    if not any(i.filename.rsplit("/", 1)[-1] == MEMBER for i in members):
        raise UsageError(f"{path} has no member {MEMBER}; fetch it again")


def single_member(path: Path, body: bytes) -> bytes:
    """An archive of MEMBER alone. Flags, time and CRC stay: the encryption header is checked against them."""
    with zipfile.ZipFile(io.BytesIO(body)) as opened:
        info = next(i for i in opened.infolist() if i.filename.rsplit("/", 1)[-1] == MEMBER)
    head = LOCAL.unpack_from(body, info.header_offset)
    start = info.header_offset + LOCAL.size + head[9] + head[10]
    secret = body[start : start + info.compress_size]
    if head[0] != b"PK\3\4" or len(secret) != info.compress_size:
        raise UsageError(f"{path} is damaged at {MEMBER}; fetch it again")
    flags, method, clock, date = head[2:6]
    sizes = (info.CRC, info.compress_size, info.file_size)
    name = MEMBER.encode()
    late = bool(flags & DESCRIPTOR)
    local = LOCAL.pack(
        b"PK\3\4", info.extract_version, flags, method, clock, date, *((0, 0, 0) if late else sizes), len(name), 0
    )
    whole = local + name + secret + (struct.pack("<4s3I", b"PK\7\x08", *sizes) if late else b"")
    versions = (info.create_version, info.extract_version)
    central = CENTRAL.pack(b"PK\1\2", *versions, flags, method, clock, date, *sizes, len(name), 0, 0, 0, 0, 0, 0)
    end = END.pack(b"PK\5\6", 0, 0, 1, 1, len(central) + len(name), len(whole), 0)
    return whole + central + name + end
