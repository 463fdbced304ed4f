"""What goes into each archive of the release, from explicit inputs, checked before anything is written."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from _http import UsageError

from release import gpqa
from release.tarball import Entry, say

SOURCE = "specter"
ASSETS = "specter-assets"
SUMS = "SHA256SUMS"
MODEL_MANIFEST = "initialization/model-assets.json"
DATASET_MANIFEST = "initialization/dataset-assets.json"
COMMIT_FILE = "SOURCE_COMMIT"


def git(source: Path, *arguments: str) -> bytes:
    try:
        done = subprocess.run(["git", "-C", str(source), *arguments], capture_output=True, check=False)
    except OSError as error:
        raise UsageError(f"git cannot be run ({error.strerror}); install it") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise UsageError(f"--source {source}: git {arguments[0]} failed: {said[-1] if said else done.returncode}")
    return done.stdout


class Source:
    """The tracked files of a checkout's HEAD; what the working tree has beyond it does not count."""

    def __init__(self, checkout: Path) -> None:
        self.checkout = checkout
        self.commit = git(checkout, "rev-parse", "--verify", "HEAD^{commit}").decode().strip()
        changed = git(checkout, "status", "--porcelain", "--untracked-files=no").decode().splitlines()
        if changed:
            say(f"note: {len(changed)} changed file(s) of {checkout} are left out: the release is commit {self.commit}")
        self.blobs: dict[str, tuple[str, str]] = {}
        for line in git(checkout, "ls-tree", "-r", "-z", "--full-tree", self.commit).decode().split("\0")[:-1]:
            (mode, _, digest), path = line.split("\t", 1)[0].split(" "), line.split("\t", 1)[1]
            if mode not in ("100644", "100755"):
                raise UsageError(f"{path} is a link or a submodule (mode {mode}); the release packs files only")
            self.blobs[path] = (mode, digest)

    def read(self, path: str) -> bytes:
        if path not in self.blobs:
            raise UsageError(f"commit {self.commit[:12]} of {self.checkout} has no {path}; choose another --source")
        return git(self.checkout, "cat-file", "blob", self.blobs[path][1])

    def read_json(self, path: str) -> Any:
        try:
            return json.loads(self.read(path))
        except ValueError as error:
            raise UsageError(f"{path} of commit {self.commit[:12]} is not JSON: {error}") from error

    def bytes(self) -> int:
        sizes = git(self.checkout, "ls-tree", "-r", "-l", "--full-tree", self.commit).decode().splitlines()
        return sum(int(line.split("\t")[0].split()[3]) for line in sizes)

    def entries(self, model_manifest: bytes) -> list[Entry]:
        """specter/…: every tracked file but SHA256SUMS (it has this archive's own hash), the filled manifest, and the
        commit's name."""
        replaced = {MODEL_MANIFEST: model_manifest, COMMIT_FILE: f"{self.commit}\n".encode()}
        kept = {p: b for p, b in self.blobs.items() if p != SUMS and p not in replaced}
        found = [Entry(f"{SOURCE}/{path}", body) for path, body in replaced.items()]
        return found + [Entry(f"{SOURCE}/{p}", self.read(p), mode == "100755") for p, (mode, _) in kept.items()]


def wheel_entries(folder: Path) -> list[Entry]:
    """specter-assets/wheels/*.whl and their SHA256SUMS. A SHA256SUMS in the folder has to agree."""
    wheels = sorted(p for p in folder_of(folder, "--wheels").glob("*.whl") if p.is_file())
    if not wheels:
        raise UsageError(f"--wheels {folder}: no .whl file there; install.sh needs at least one, or no archive")
    sums = {p.name: file_sha256(p) for p in wheels}
    given = folder / SUMS
    for line in given.read_text(encoding="utf-8").splitlines() if given.is_file() else ():
        digest, _, name = line.partition("  ")
        if sums.get(name) != digest:
            raise UsageError(f"{given}: {name} should be {digest}, it is {sums.get(name, 'absent')}; correct either")
    text = "".join(f"{digest}  {name}\n" for name, digest in sums.items())
    return [Entry(f"{ASSETS}/wheels/{p.name}", p) for p in wheels] + [Entry(f"{ASSETS}/wheels/{SUMS}", text.encode())]


def dataset_entries(folder: Path, manifest: Any, gpqa_pins: Collection[str]) -> list[Entry]:
    """specter-assets/datasets/<name>/… of every dataset of the manifest. Of GPQA the encrypted archive only."""
    folder_of(folder, "--datasets")
    entries = []
    for dataset in manifest["datasets"]:
        name = dataset["name"]
        place = f"{ASSETS}/datasets/{name}"
        files = regular_files(folder / name) if (folder / name).is_dir() else {}
        if not files:
            raise UsageError(f"--datasets {folder}: no {name}/ there; fetch it with download_datasets.py --only {name}")
        if name == "gpqa":
            pinned = {entry.get("sha256") for entry in dataset["sources"] + dataset["published"]} - {None}
            entries.append(Entry(f"{place}/{gpqa.PREPARED}", gpqa.archive(folder / name, pinned | set(gpqa_pins))))
            left = sorted(set(files) - {gpqa.PREPARED, gpqa.PUBLISHED})
            if left:
                say(f"note: of {folder / name} only the encrypted archive is packed, not {', '.join(left)}")
            continue
        stray = [path for path in files if "gpqa" in path.lower()]
        if stray:
            raise UsageError(f"{folder / name / stray[0]}: GPQA belongs in gpqa/, encrypted; move it away")
        entries += [Entry(f"{place}/{path}", file) for path, file in files.items()]
    known = {d["name"] for d in manifest["datasets"]}
    other = sorted(p.name for p in folder.iterdir() if p.name not in known | {"NOTICE.md"} and p.name[0] != ".")
    if other:
        raise UsageError(f"--datasets {folder}: {other[0]} is no dataset of the manifest; move it away")
    if not (folder / "NOTICE.md").is_file():
        raise UsageError(f"--datasets {folder}: NOTICE.md with the licences is missing; download_datasets.py writes it")
    return [*entries, Entry(f"{ASSETS}/datasets/NOTICE.md", folder / "NOTICE.md")]


def model_entries(
    folder: Path, option: str, name: str, needed: Sequence[str], without: Path | None = None
) -> list[Entry]:
    """specter-assets/<name>/…: a folder with safetensors and the files `needed`, less the folder `without`."""
    files = regular_files(folder_of(folder, option))
    missing = [name for name in needed if name not in files]
    if missing or not any(path.endswith(".safetensors") for path in files):
        raise UsageError(f"{option} {folder} has no {missing[0] if missing else '.safetensors file'}; fetch it again")
    inner = None if without is None else without.resolve()
    kept = {p: f for p, f in files.items() if inner is None or not (folder.resolve() / p).is_relative_to(inner)}
    return [Entry(f"{ASSETS}/{name}/{path}", file) for path, file in kept.items()]


def regular_files(folder: Path) -> dict[str, Path]:
    """relative path -> file, links followed, hidden files left out. UsageError for unfinished downloads."""
    found = {}
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if any(part.startswith(".") for part in inside.parts) or path.is_dir():
            continue
        if not path.is_file():
            raise UsageError(f"{path} is a broken link or no plain file; remove it")
        if ".part" in path.suffixes:
            raise UsageError(f"{path} is an unfinished download; finish it first")
        found[inside.as_posix()] = path.resolve()
    return found


def folder_of(folder: Path, option: str) -> Path:
    if not folder.is_dir():
        raise UsageError(f"{option} {folder}: no such folder")
    return folder


def file_sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
