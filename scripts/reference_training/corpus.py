"""Collect the training text: unpack Debian packages, read every source, drop overlaps with test data."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import itertools
import json
import random
import re
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from . import readers
from .generated_code import code_documents
from .generated_maths import maths_documents
from .generated_quiz import quiz_documents
from .settings import CONF

OVERLAP_WORDS = 13
UNWANTED_PARTS = {
    "test",
    "tests",
    "idlelib",
    "site-packages",
    "lib2to3",
    "ensurepip",
    "turtledemo",
    "__pycache__",
    "pydoc_data",
}


@dataclass(slots=True)
class Source:
    """Documents of one source and where they come from."""

    name: str
    style: str
    licence: str
    weight: float
    documents: list[str]
    origin: list[str] = field(default_factory=list)
    dropped: int = 0

    @property
    def sha256(self) -> str:
        """Over all documents, each followed by a zero byte."""
        digest = hashlib.sha256()
        for text in self.documents:
            digest.update(text.encode() + b"\0")
        return digest.hexdigest()


def load_plan() -> dict[str, Any]:
    """conf/corpus.yaml."""
    return yaml.safe_load((CONF / "corpus.yaml").read_text())


def unpack_package(package: str, work: Path) -> tuple[Path, str]:
    """Download a Debian package and unpack it under `work` without installing it -> folder, file name."""
    debs, folder = work / "debs", work / "packages" / package
    debs.mkdir(parents=True, exist_ok=True)
    found = sorted(debs.glob(f"{package}_*.deb"))
    if not found:
        done = subprocess.run(
            ["apt-get", "download", "-q", package], cwd=debs, capture_output=True, text=True, check=False
        )
        found = sorted(debs.glob(f"{package}_*.deb"))
        if not found:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise SystemExit(f"apt-get download {package} failed ({reason}); run apt-get update first")
    if not folder.is_dir():
        folder.mkdir(parents=True)
        subprocess.run(["dpkg", "-x", str(found[0]), str(folder)], check=True)
    return folder, found[0].name.replace("%3a", ":")


def python_files(stdlib: bool, site: list[str]) -> list[tuple[Path, str]]:
    """Python sources of the interpreter's library and of named installed packages, tests left out."""
    roots = [Path(sysconfig.get_paths()["stdlib"])] if stdlib else []
    for package in site:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin:
            roots.append(Path(spec.origin).parent)
    out = []
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            parts = set(path.relative_to(root).parts)
            if not parts & UNWANTED_PARTS and path.stat().st_size < 200_000 and "test" not in path.stem:
                out.append((path, f"{root.name}/{path.relative_to(root)}"))
    return out


def source_files(entry: dict[str, Any], work: Path, datasets: Path | None) -> tuple[list[Path], list[str]]:
    """The files of one source and a short statement of their origin; ([], []) when a data set is absent."""
    if "dataset" in entry:
        path = (datasets or Path("/nonexistent")) / entry["dataset"]
        return ([path], [entry["dataset"]]) if path.is_file() else ([], [])
    if entry.get("stdlib") or entry.get("site"):
        pairs = python_files(entry.get("stdlib", False), entry.get("site", []))
        return [p for p, _ in pairs], sorted({label.split("/")[0] for _, label in pairs})
    files: list[Path] = []
    origin: list[str] = []
    packages = entry.get("package", [])
    for package in [packages] if isinstance(packages, str) else packages:
        folder, name = unpack_package(package, work)
        patterns = [entry["files"]] if isinstance(entry["files"], str) else entry["files"]
        files += sorted({p for pattern in patterns for p in folder.glob(pattern) if p.is_file() and not p.is_symlink()})
        origin.append(name)
    return files, origin


def read_source(entry: dict[str, Any], work: Path, datasets: Path | None, seed: int) -> Source:
    """All documents of one source, shuffled with the seed and cut at `max_mb`."""
    files, origin = source_files(entry, work, datasets)
    limit = int(entry.get("max_mb", 1e6) * 1e6)
    rng = random.Random(f"{seed} {entry['name']}")
    stream: Iterator[str]
    if entry["reader"] == "generated":
        kind = entry["generator"]
        makers = {"maths": maths_documents, "code": code_documents}
        stream = quiz_documents(seed, files[0]) if kind == "quiz" else makers[kind](seed)
        origin = [*origin, f"generated_{kind}.py"]
    else:
        reader = getattr(readers, f"read_{entry['reader']}")
        documents = list(dict.fromkeys(itertools.chain.from_iterable(reader(p) for p in files)))
        rng.shuffle(documents)
        stream = iter(documents)
    kept: list[str] = []
    size = 0
    for text in stream:
        text = text.replace("\r", "").replace("\0", "").replace("<|endoftext|>", "").strip()
        if len(text) < 60 or sum(c.isascii() for c in text) < 0.9 * len(text):
            continue
        kept.append(text[:200_000])
        size += len(kept[-1])
        if size >= limit:
            break
    return Source(entry["name"], entry["style"], entry["licence"], float(entry["weight"]), kept, origin)


def word_runs(text: str) -> Iterator[int]:
    """Hashes of all runs of 13 words; case and punctuation do not count."""
    words = re.findall(r"\w+", text.lower())
    for i in range(len(words) - OVERLAP_WORDS + 1):
        yield hash(tuple(words[i : i + OVERLAP_WORDS]))


def held_back_runs(datasets: Path | None) -> set[int]:
    """13-word runs not to train on: HumanEval, GSM8K test, WikiText test, the second half of the C4 file."""
    if datasets is None:
        return set()
    texts: list[str] = []
    humaneval = datasets / "humaneval" / "HumanEval.jsonl.gz"
    if humaneval.is_file():
        for line in gzip.decompress(humaneval.read_bytes()).splitlines():
            row = json.loads(line)
            texts.append(row["prompt"] + row["canonical_solution"])
    gsm8k = datasets / "gsm8k" / "test.jsonl"
    if gsm8k.is_file():
        texts += [json.loads(line)["question"] for line in gsm8k.read_text().splitlines()]
    wikitext = datasets / "wikitext-2-v1" / "test.txt"
    if wikitext.is_file():
        texts += [line for line in wikitext.read_text().splitlines() if "<unk>" not in line or len(line) > 200]
    c4 = datasets / "c4" / "c4.jsonl"
    if c4.is_file():
        rows = [json.loads(line) for line in c4.read_text().splitlines() if line.strip()]
        texts += [row["prefix"] + " " + row["gold_completion"] for row in rows[len(rows) // 2 :]]
    return {run for text in texts for run in word_runs(text)}


def collect(work: Path, datasets: Path | None) -> list[Source]:
    """Read every source; whole documents that overlap held-back data are dropped."""
    plan = load_plan()
    held_back = held_back_runs(datasets)
    sources = []
    for entry in plan["sources"]:
        source = read_source(entry, work, datasets, plan["seed"])
        if not source.documents:
            print(f"  {source.name:20} absent, left out", flush=True)
            continue
        clean = [t for t in source.documents if held_back.isdisjoint(word_runs(t))]
        source.dropped = len(source.documents) - len(clean)
        source.documents = clean
        sources.append(source)
        size = sum(map(len, clean)) / 1e6
        print(
            f"  {source.name:20} {len(clean):7d} documents {size:6.2f} MB, {source.dropped} dropped",
            flush=True,
        )
    return sources
