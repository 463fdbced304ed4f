#!/usr/bin/env python3
"""Downloads model checkpoints: the release's archives, or the official checkpoints from their hub.

    python3 -B initialization/download_models.py --output "$SPECTER_WORK/downloads"
    python3 -B initialization/download_models.py --only deepseek_v2_lite

Without --only the manifest's default assets are fetched. Transfers are parallel, resumed and verified; free
space is checked first. Standard library only and Python >= 3.8, since this runs before anything is installed.
The last line on stdout is one JSON object. Exit codes: 0; 1 network or verification; 2 arguments, manifest or
disk.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Union

from _batch import (
    OneLineParser,
    add_transfer_options,
    check_space,
    fetch_all,
    lock_folder,
    missing_bytes,
    retry_from,
    run_tool,
)
from _fetch import Fetched
from _http import FetchError, RemoteFile, Retry, UsageError
from _hub import RECORD, HubFile, HubPlan, HubSource, plan_hub, write_record
from _manifest import Fields, read_manifest, safe_path, select
from _progress import Progress, human_bytes

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Archive:
    """A release archive. url is None as long as no release exists; then bytes and sha256 are None too."""

    name: str
    description: str
    default: bool
    file: str
    url: str | None
    bytes: int | None
    sha256: str | None
    instead: str

    @property
    def size_text(self) -> str:
        return "size not known yet" if self.bytes is None else human_bytes(self.bytes)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on the hub. `computed` names those expectations that were derived from config.json."""

    name: str
    description: str
    default: bool
    directory: str
    licence: str
    source: HubSource
    tensor_bytes: int | None
    tensors: int | None
    computed: tuple[str, ...]

    @property
    def size_text(self) -> str:
        if self.tensor_bytes is None:
            return "size known at run time"
        return human_bytes(self.tensor_bytes) + (" (computed)" if "tensor_bytes" in self.computed else "")


Asset = Union[Archive, Checkpoint]  # noqa: UP007 (evaluated by Python 3.8 too)


def _hub_file(entry: Fields, optional: bool = False) -> HubFile:
    path = entry.path("path")
    file = HubFile(path, path, entry.count("bytes"), entry.sha256(), optional)
    entry.done()
    return file


def read_asset(entry: Fields) -> Asset:
    """One asset of the manifest, checked field by field."""
    name, kind = entry.text("name"), entry.choice("kind", ("archive", "hub"))
    description, default = entry.text("description"), bool(entry.get("default", bool, required=False))
    asset: Asset
    if kind == "archive":
        asset = Archive(
            name,
            description,
            default,
            entry.path("file"),
            entry.url(nullable=True),
            entry.count("bytes"),
            entry.sha256(),
            entry.text("instead"),
        )
        if asset.url is not None and (asset.sha256 is None or asset.bytes is None):
            raise UsageError(f"{entry.where}: {name} has a url, so bytes and sha256 have to be given too")
    else:
        files = [_hub_file(f) for f in entry.objects("files")]
        for path in entry.texts("optional_files", required=False):
            files.append(HubFile(safe_path(path, entry.where), path, optional=True))
        index = entry.text("index", nullable=True)
        if not files:
            raise UsageError(f"{entry.where}: {name} lists no files; name at least config.json")
        source = HubSource(name, entry.text("repo"), entry.text("revision"), tuple(files), "models", index)
        asset = Checkpoint(
            name,
            description,
            default,
            entry.path("directory"),
            entry.text("licence"),
            source,
            entry.count("tensor_bytes"),
            entry.count("tensors"),
            tuple(entry.texts("computed", required=False)),
        )
    entry.done()
    return asset


def pick(assets: list[Asset], only: list[str], manifest: Path) -> list[Asset]:
    """The assets to fetch: those named, else the default ones, else all. Refuses archives without a url."""
    names = select([a.name for a in assets], only, manifest)
    chosen = [a for a in assets if a.name in names]
    if not only and any(a.default for a in assets):
        chosen = [a for a in assets if a.default]
    unpublished = [a for a in chosen if isinstance(a, Archive) and a.url is None]
    if unpublished:
        listed = " and ".join(a.file for a in unpublished)
        raise UsageError(f"{listed}: no url in {manifest}, the release is not published yet; {unpublished[0].instead}")
    return chosen


def safetensors_totals(path: Path) -> tuple[int, int]:
    """(tensors, bytes of tensor data) of a safetensors file; FetchError when header and length disagree."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            if header_bytes > size - 8:
                raise ValueError(f"header of {header_bytes:,} bytes in a file of {size:,}")
            header = json.loads(file.read(header_bytes))
        ends = [t["data_offsets"][1] for name, t in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise FetchError(f"{path} is not a safetensors file ({error}); delete it and run again") from error
    data_bytes = size - 8 - header_bytes
    if max(ends, default=0) != data_bytes:
        raise FetchError(
            f"{path} holds {data_bytes:,} bytes of tensors, its header says {max(ends, default=0):,}; "
            "delete it and run again"
        )
    return len(ends), data_bytes


def check_checkpoint(asset: Checkpoint, plan: HubPlan, progress: Progress) -> None:
    """Tensor count and bytes against the manifest: a differing fact is an error, a computed one a note."""
    totals = [safetensors_totals(f.path) for f in plan.files if f.path.suffix == ".safetensors"]
    found = {"tensors": sum(t[0] for t in totals), "tensor_bytes": sum(t[1] for t in totals)}
    for field, expected in (("tensors", asset.tensors), ("tensor_bytes", asset.tensor_bytes)):
        if expected is None or found[field] == expected:
            continue
        line = f"{asset.name}: {field} is {found[field]:,}, the manifest expects {expected:,}"
        if field not in asset.computed:
            raise FetchError(f"{line}; the repository changed: pin its revision in the manifest")
        progress.note(f"note: {line} (a computed value)")


def plan_assets(
    assets: list[Asset], output: Path, hub_url: str, jobs: int, retry: Retry, progress: Progress
) -> tuple[list[RemoteFile], list[tuple[Checkpoint, HubPlan]]]:
    """Every file of the assets with its size where any server tells it."""
    files: list[RemoteFile] = []
    plans = []
    for asset in assets:
        if isinstance(asset, Archive):
            files.append(RemoteFile(asset.name, asset.url or "", output / asset.file, asset.bytes, asset.sha256))
        else:
            folder = output / asset.directory
            plan = plan_hub(asset.source, folder, hub_url, jobs, retry, progress)
            progress.note(f"{asset.name}: {asset.source.repo} at {plan.commit or asset.source.revision}")
            progress.note(f"{asset.name}: licence: {asset.licence}")
            plans.append((asset, plan))
            files += plan.files
    return files, plans


def _show(assets: list[Asset], output: Path) -> None:
    for asset in assets:
        if isinstance(asset, Archive):
            place, origin = output / asset.file, asset.url
        else:
            place, origin = (
                output / asset.directory,
                f"{asset.source.repo}@{asset.source.revision}",
            )
        print(f"{asset.name:24}  {asset.size_text:22}  {origin} -> {place}", file=sys.stderr)


def _summary(results: list[Fetched], output: Path) -> dict[str, object]:
    checks = [r.file.check for r in results]
    return {
        "output": str(output),
        "files": len(results),
        "bytes": sum(r.bytes for r in results),
        "fetched_files": sum(r.fresh for r in results),
        "checks": {check: checks.count(check) for check in sorted(set(checks))},
    }


def run(args: argparse.Namespace) -> None:
    retry = retry_from(args)
    assets = pick([read_asset(e) for e in read_manifest(args.manifest, "assets")], args.only, args.manifest)
    _show(assets, args.output)
    rough = sum((a.bytes if isinstance(a, Archive) else a.tensor_bytes) or 0 for a in assets)
    if args.dry_run:
        unknown = sum((a.bytes if isinstance(a, Archive) else a.tensor_bytes) is None for a in assets)
        print(check_space(rough, args.output, unknown), file=sys.stderr)
        print(json.dumps({"dry_run": True, "assets": [a.name for a in assets], "bytes": rough}))
        return
    progress = Progress()
    with lock_folder(args.output):
        files, plans = plan_assets(assets, args.output, args.hub_url, args.jobs, retry, progress)
        unknown = sum(f.bytes is None for f in files)
        progress.note(check_space(sum(missing_bytes(f) for f in files), args.output, unknown))
        results = fetch_all(files, args.jobs, retry, progress)
        for asset, plan in plans:
            check_checkpoint(asset, plan, progress)
            write_record(plan, results)
            progress.note(f"{asset.name}: complete; {plan.folder / RECORD} pins commit and digests")
    print(json.dumps(_summary(results, args.output)))


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--manifest", type=Path, default=HERE / "model-assets.json", help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=HERE.parent / "downloads", help="default: %(default)s")
    add_transfer_options(parser)
    args = parser.parse_args(argv)
    return run_tool(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
