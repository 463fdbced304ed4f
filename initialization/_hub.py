"""Files of one hub repository: the commit is pinned first, the shards come from the checkpoint's index.

`download.json` beside the files records repository, revision, commit, sizes and digests. A later run takes
its list from there: it continues at the same commit even if the branch has moved, and needs no network when
all is whole.
Standard library only and Python >= 3.8.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from _batch import probe_all
from _fetch import Fetched, fetch
from _http import FetchError, MissingFileError, RemoteFile, Retry, UsageError, probe
from _manifest import safe_path
from _progress import Progress

RECORD = "download.json"
SINGLE_FILE = "model.safetensors"


@dataclass(frozen=True)
class HubFile:
    """`path` in the repository, `name` on disk."""

    path: str
    name: str
    bytes: int | None = None
    sha256: str | None = None
    optional: bool = False


@dataclass(frozen=True)
class HubSource:
    """What to take from a repository. kind: "models" or "datasets". index: the file that names the shards."""

    label: str
    repo: str
    revision: str
    files: tuple[HubFile, ...]
    kind: str = "models"
    index: str | None = None

    def url(self, hub_url: str, revision: str, path: str) -> str:
        prefix = "" if self.kind == "models" else self.kind + "/"
        return f"{hub_url.rstrip('/')}/{prefix}{self.repo}/resolve/{quote(revision, safe='')}/{quote(path)}"


@dataclass(frozen=True)
class HubPlan:
    """The files of a source at one commit (None: the server does not say), to be fetched into `folder`."""

    source: HubSource
    folder: Path
    commit: str | None
    files: tuple[RemoteFile, ...]


def plan_hub(source: HubSource, folder: Path, hub_url: str, jobs: int, retry: Retry, progress: Progress) -> HubPlan:
    """The plan from `download.json` where it is of this source, else from the hub and the index there."""
    recorded = _read_record(source, folder, hub_url)
    if recorded is not None:
        return recorded
    pinned = source.revision if re.fullmatch(r"[0-9a-f]{40}", source.revision) else None
    first = source.index or source.files[0].path
    url = source.url(hub_url, source.revision, first)
    asked = RemoteFile(f"{source.label}/{first}", url, folder, commit=pinned, optional=source.index is not None)
    try:
        commit = probe(asked, retry).commit
    except MissingFileError:
        if source.index is None:
            raise
        commit = pinned
    if commit is None:
        progress.note(f"{source.label}: {hub_url} names no commit; revision {source.revision} is taken as it is")

    def remote(file: HubFile) -> RemoteFile:
        return RemoteFile(
            label=f"{source.label}/{file.name}",
            url=source.url(hub_url, commit or source.revision, file.path),
            path=folder / file.name,
            bytes=file.bytes,
            sha256=file.sha256,
            commit=commit,
            optional=file.optional,
        )

    files = list(source.files)
    if source.index is not None:
        known = {f.path for f in files}
        files += [HubFile(s, s) for s in _shards(source, remote, retry, progress) if s not in known]
    probed = probe_all([remote(f) for f in files], jobs, retry, progress)
    plan = HubPlan(source, folder, commit, tuple(probed))
    write_record(plan)
    return plan


def _shards(source: HubSource, remote: Any, retry: Retry, progress: Progress) -> list[str]:
    """The index and the files in its weight_map; the single file of a checkpoint that has no index."""
    name = source.index or ""
    index = remote(HubFile(name, name, optional=True))
    try:
        fetch(probe(index, retry), retry, progress)
    except MissingFileError:
        if any(f.path.endswith(".safetensors") for f in source.files):
            return []
        progress.note(f"{source.label}: no {name}; the checkpoint is taken to be one file, {SINGLE_FILE}")
        return [SINGLE_FILE]
    try:
        shards = sorted(set(json.loads(index.path.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FetchError(
            f"{index.label}: not an index of safetensors shards ({type(error).__name__}); "
            "list the shards under files in the manifest"
        ) from error
    return [name, *(safe_path(str(s), index.label) for s in shards)]


def _read_record(source: HubSource, folder: Path, hub_url: str) -> HubPlan | None:
    path = folder / RECORD
    if not path.is_file():
        return None
    stated = {f.name: f for f in source.files}
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if (raw["repo"], raw["revision"]) != (source.repo, source.revision):
            return None
        files = [
            RemoteFile(
                label=f"{source.label}/{name}",
                url=source.url(hub_url, raw["commit"] or source.revision, entry["path"]),
                path=folder / safe_path(name, str(path)),
                bytes=entry["bytes"],
                sha256=entry["sha256"],
                git_sha1=entry["git_sha1"],
                digest_from=entry["digest_from"],
                commit=raw["commit"],
            )
            for name, entry in raw["files"].items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is damaged ({type(error).__name__}); delete it and run again") from error
    recorded = {file.path.relative_to(folder).as_posix() for file in files}
    if not recorded.issuperset(f.name for f in source.files if not f.optional):
        return None
    for i, file in enumerate(files):
        hub_file = stated.get(file.path.relative_to(folder).as_posix())
        if hub_file is not None and hub_file.sha256 is not None:
            files[i] = replace(file, bytes=hub_file.bytes, sha256=hub_file.sha256, git_sha1=None, digest_from="")
    return HubPlan(source, folder, raw["commit"], tuple(files))


def write_record(plan: HubPlan, fetched: list[Fetched] | None = None) -> None:
    """Writes `download.json` atomically; with `fetched` it carries the SHA-256 of every file on disk."""
    on_disk = {f.file.path: f for f in fetched or []}
    remote_path = {f.name: f.path for f in plan.source.files}
    files = {}
    for file in plan.files:
        name = file.path.relative_to(plan.folder).as_posix()
        done = on_disk.get(file.path)
        files[name] = {
            "path": remote_path.get(name, name),
            "bytes": done.bytes if done else file.bytes,
            "sha256": done.sha256 if done else file.sha256,
            "git_sha1": file.git_sha1,
            "digest_from": file.digest_from or ("" if file.sha256 else "record" if done else ""),
        }
    record = {
        "repo": plan.source.repo,
        "revision": plan.source.revision,
        "commit": plan.commit,
        "complete": fetched is not None,
        "files": files,
    }
    plan.folder.mkdir(parents=True, exist_ok=True)
    draft = plan.folder / (RECORD + ".part")
    draft.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    draft.replace(plan.folder / RECORD)
