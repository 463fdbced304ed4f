"""Small files in the official formats of the five datasets, with made-up content."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from zipcrypto import encrypted_zip

PASSWORD = b"deserted-untie-orchid"
SECRET = "xyzzyplugh"  # in every GPQA text made here: must never show
GPQA_COLUMNS = (
    "Pre-Revision Question", "Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2",
    "Incorrect Answer 3", "Explanation", "Record ID",
)  # fmt: skip

WIKITEXT = (
    " \n = First Title = \n \n One paragraph , with @-@ marks and <unk> words . \n \n"
    " = = Section = = \n \n Another one . \n\n = Second = \n \n The last paragraph . \n"
)


def shared() -> Path | None:
    """The folder with the real files, when it is there: SPECTER_SHARED or ../shared."""
    root = Path(os.environ.get("SPECTER_SHARED") or Path(__file__).resolve().parents[2] / "shared")
    return root if (root / "datasets").is_dir() else None


def jsonl(records: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(r) + "\n" for r in records).encode()


def write(path: Path, body: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(body) if path.suffix == ".gz" else body)
    return path


def write_parquet(path: Path, records: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(records).to_parquet(path)
    return path


def humaneval_records(count: int = 6) -> list[dict[str, Any]]:
    return [
        {"task_id": f"HumanEval/{i}", "prompt": f"def f{i}(x):\n    ...\n", "entry_point": f"f{i}", "test": ""}
        for i in range(count)
    ]


def gsm8k_records(count: int = 6) -> list[dict[str, Any]]:
    return [{"question": f"Ann has {i} pens and 3 caps. How many?", "answer": f"#### {i}"} for i in range(count)]


def wikitext_lines() -> list[str]:
    return [line + "\n" for line in WIKITEXT.split("\n")]


def gpqa_csv(count: int = 5, columns: tuple[str, ...] = GPQA_COLUMNS, **blank: Iterable[int]) -> bytes:
    """A CSV like the authors'; `Question=[1]` leaves that field of row 1 empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, extrasaction="ignore")
    writer.writeheader()
    for i in range(count):
        row = {c: f'{SECRET} "{c}" of {i},\nsecond line' for c in columns} | {"Record ID": f"rec{i:03d}"}
        for column, rows in blank.items():
            if i in rows:
                row[column] = ""
        writer.writerow(row)
    return out.getvalue().encode()


def gpqa_zip(csv_bytes: bytes, member: str = "dataset/gpqa_main.csv", password: bytes = PASSWORD, **more: Any) -> bytes:
    return encrypted_zip({member: csv_bytes, "dataset/license.txt": b"CC BY 4.0"}, password, **more)


def everything(root: Path) -> None:
    """All five datasets below `root`, in their original formats, in nested folders."""
    write(root / "a/HumanEval.jsonl.gz", jsonl(humaneval_records()))
    write(root / "b/c/test.jsonl", jsonl(gsm8k_records()))
    write(root / "b/wikitext-2/test.txt", WIKITEXT.encode())
    write(root / "c4/c4-validation.00000-of-00008.json.gz", jsonl({"text": f"web page {i}"} for i in range(4)))
    write(root / "gpqa/dataset.zip", gpqa_zip(gpqa_csv()))
