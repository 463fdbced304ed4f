"""GPQA main (Rein et al. 2024), read in memory from an encrypted archive or the CSV that a user extracted.

The authors ask that its examples are not put online in plain text. So nothing here writes, logs or raises any
of its text: errors name files, columns and record ids alone, and prompts from here are private.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
import zlib
from pathlib import Path

import pandas as pd

from harness.datasets.files import find, require_columns
from harness.datasets.prompt import PromptText
from specter_core.errors import UserError

PATTERNS = ("dataset.zip", "gpqa_main.csv.zip", "gpqa_main.csv", "dataset/gpqa_main.csv")
MEMBER = "gpqa_main.csv"
PASSWORD = b"deserted-untie-orchid"  # published by the authors, beside the archive
CHOICES = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def files(root: Path) -> list[Path]:
    return find("gpqa", root, PATTERNS)[:1]


def load(root: Path) -> list[PromptText]:
    """One document per question: the question, its four choices in an order that the record id decides."""
    texts: list[PromptText] = []
    for path in files(root):
        table = _table(path)
        require_columns(path, table, ["Record ID", "Question", *CHOICES])
        for _, row in table.iterrows():
            record, question = str(row["Record ID"]).strip(), str(row["Question"]).strip()
            choices = [str(row[c]).strip() for c in CHOICES]
            if record and question and all(choices):
                texts.append(PromptText(f"gpqa-{record}", _document(record, question, choices), "gpqa", "GP"))
    return texts


def _document(record: str, question: str, choices: list[str]) -> str:
    order = sorted(range(len(choices)), key=lambda i: hashlib.sha256(f"{record}/{i}".encode()).digest())
    listed = "\n".join(f"({letter}) {choices[i]}" for letter, i in zip("ABCD", order, strict=True))
    return f"{question}\n\n{listed}\n\nAnswer:"


def _table(path: Path) -> pd.DataFrame:
    raw = _member(path) if path.suffix == ".zip" else path.read_bytes()
    try:
        return pd.read_csv(io.BytesIO(raw), dtype=str, keep_default_na=False, encoding="utf-8")
    except ValueError as error:  # parser and encoding errors; their messages may quote the file
        raise UserError(f"{path} holds no CSV ({type(error).__name__}); fetch it again") from None


def _member(path: Path) -> bytes:
    try:
        with zipfile.ZipFile(path) as archive:
            names = [n for n in archive.namelist() if n.rsplit("/", 1)[-1] == MEMBER]
            if not names:
                raise UserError(f"{path} has no member {MEMBER}; fetch it again")
            return archive.read(names[0], pwd=PASSWORD)
    except NotImplementedError:
        problem = "is encrypted in a way that Python cannot read (AES)"
    except RuntimeError:
        problem = "does not open with the password that the authors publish"
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError):
        # a wrong password passes the one-byte check of the format once in 256 times and fails here
        problem = "is damaged or does not open with the password that the authors publish"
    raise UserError(f"{path} {problem}; fetch it again, or extract {MEMBER} beside it and delete the archive")
