#!/usr/bin/env python3
"""Downloads the five prompt datasets from their official sources, or takes files that are already on disk.

    python3 -B initialization/download_datasets.py
    python3 -B initialization/download_datasets.py --only gsm8k,humaneval
    python3 -B initialization/download_datasets.py --from /path/to/files

Licences are shown first and left in datasets/NOTICE.md beside the data. Of a dataset's sources the first that
answers is taken. Standard library only and Python >= 3.8. The last line on stdout is one JSON object. Exit
codes: 0; 1 network or verification; 2 arguments, manifest, disk, or a dataset that --from does not find.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
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
from _http import FetchError, RemoteFile, Retry, UsageError, probe
from _hub import HubFile, HubPlan, HubSource, plan_hub, write_record
from _local import FORMATS, KnownFile, copy_file, find_files
from _manifest import Fields, read_manifest, select
from _progress import Progress, human_bytes

HERE = Path(__file__).resolve().parent
NOTICE = "NOTICE.md"


@dataclass(frozen=True)
class UrlSource:
    """One file behind a plain URL; `name` on disk."""

    url: str
    name: str
    bytes: int | None
    sha256: str | None


Source = Union[UrlSource, HubSource]  # noqa: UP007 (evaluated by Python 3.8 too)


@dataclass(frozen=True)
class Dataset:
    """One dataset of the manifest. hashes: published SHA-256 -> name, for files that --from may find."""

    name: str
    label: str
    title: str
    licence: str
    attribution: str
    homepage: str
    remark: str
    sources: tuple[Source, ...]
    known: tuple[KnownFile, ...]
    hashes: dict[str, str]


def _read_source(entry: Fields, dataset: str) -> Source:
    kind, name = entry.choice("kind", ("url", "hub")), entry.path("name")
    size, sha256 = entry.count("bytes"), entry.sha256()
    source: Source
    if kind == "url":
        source = UrlSource(entry.url() or "", name, size, sha256)
    else:
        files = (HubFile(entry.path("path"), name, size, sha256),)
        source = HubSource(dataset, entry.text("repo"), entry.text("revision"), files, "datasets")
    entry.done()
    return source


def _read_known(entry: Fields) -> KnownFile:
    known = KnownFile(entry.text("pattern"), entry.choice("format", FORMATS), tuple(entry.texts("fields")))
    entry.done()
    return known


def read_dataset(entry: Fields) -> Dataset:
    """One dataset of the manifest, checked field by field."""
    name = entry.path("name")
    sources = tuple(_read_source(s, name) for s in entry.objects("sources"))
    hashes = {s.sha256: s.name for s in sources if isinstance(s, UrlSource) and s.sha256}
    for published in entry.objects("published"):
        hashes[published.sha256() or ""] = published.text("name")
        published.done()
    dataset = Dataset(
        name=name,
        label=entry.text("label"),
        title=entry.text("title"),
        licence=entry.text("licence"),
        attribution=entry.text("attribution"),
        homepage=entry.url("homepage") or "",
        remark=entry.text("remark", required=False) or "",
        sources=sources,
        known=tuple(_read_known(k) for k in entry.objects("known")),
        hashes=hashes,
    )
    entry.done()
    if not sources or not dataset.known:
        raise UsageError(f"{entry.where}: {name} needs at least one source and one known file")
    return dataset


def licence_line(dataset: Dataset) -> str:
    remark = f" {dataset.remark}" if dataset.remark else ""
    return f"{dataset.title}: {dataset.licence}. {dataset.attribution}. {dataset.homepage}{remark}"


def write_notice(datasets: list[Dataset], folder: Path) -> None:
    """datasets/NOTICE.md: licence and origin of every dataset that has a folder here."""
    lines = ["# Licences of the datasets in this folder", ""]
    lines += [f"- `{d.name}/` {licence_line(d)}" for d in datasets if (folder / d.name).is_dir()]
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / (NOTICE + ".part")
    draft.write_text("\n".join(lines) + "\n", encoding="utf-8")
    draft.replace(folder / NOTICE)


def take_from(datasets: list[Dataset], folder: Path, output: Path) -> dict[str, list[str]]:
    """Copies what is found below `folder`; UsageError at the end names the datasets that were not found."""
    if not folder.is_dir():
        raise UsageError(f"--from {folder}: no such folder")
    found = {d.name: find_files(folder, d.known, d.hashes) for d in datasets}
    needed = sum(path.stat().st_size for files in found.values() for path, _, _ in files)
    print(check_space(needed, output), file=sys.stderr)
    taken: dict[str, list[str]] = {}
    for dataset in datasets:
        for path, digest, check in found[dataset.name]:
            target = output / "datasets" / dataset.name / path.name
            state = "copied" if copy_file(path, target, digest) else "already there"
            size = human_bytes(path.stat().st_size)
            print(f"{dataset.name}/{path.name}: {state}, {size}, checked by {check}", file=sys.stderr)
            taken.setdefault(dataset.name, []).append(path.name)
    missing = [d for d in datasets if not found[d.name]]
    if missing:
        write_notice(datasets, output / "datasets")
        wanted = "; ".join(f"{d.name} ({', '.join(k.pattern for k in d.known)})" for d in missing)
        raise UsageError(f"not found below {folder}: {wanted}; run without --from to download, or name --only")
    return taken


def choose_source(
    dataset: Dataset, output: Path, hub_url: str, retry: Retry, progress: Progress
) -> tuple[list[RemoteFile], HubPlan | None]:
    """The first source that answers; each that does not is noted, the last one's error is raised."""
    folder = output / "datasets" / dataset.name
    for i, source in enumerate(dataset.sources):
        last = i == len(dataset.sources) - 1
        patience = retry if last else replace(retry, attempts=min(2, retry.attempts))
        try:
            if isinstance(source, HubSource):
                plan = plan_hub(source, folder, hub_url, 1, patience, progress)
                return list(plan.files), plan
            file = RemoteFile(
                f"{dataset.name}/{source.name}", source.url, folder / source.name, source.bytes, source.sha256
            )
            return [file if not missing_bytes(file) and file.bytes else probe(file, patience)], None
        except FetchError as error:
            if last:
                raise
            progress.note(f"{error}; the next source is tried")
    raise AssertionError("unreachable: a dataset has a source")


def download(datasets: list[Dataset], args: argparse.Namespace, retry: Retry) -> dict[str, list[str]]:
    """Downloads one source of each dataset. Returns the file names by dataset."""
    progress = Progress()
    chosen = {d.name: choose_source(d, args.output, args.hub_url, retry, progress) for d in datasets}
    files = [f for some, _ in chosen.values() for f in some]
    unknown = sum(f.bytes is None for f in files)
    progress.note(check_space(sum(missing_bytes(f) for f in files), args.output, unknown))
    results = fetch_all(files, args.jobs, retry, progress)
    for _, plan in chosen.values():
        if plan is not None:
            write_record(plan, results)
    return {name: [f.path.name for f in some] for name, (some, _) in chosen.items()}


def _show(datasets: list[Dataset], output: Path, origins: bool) -> None:
    for dataset in datasets:
        print(licence_line(dataset), file=sys.stderr)
        if not origins:
            continue
        first = dataset.sources[0]
        if isinstance(first, UrlSource):
            origin, size = first.url, first.bytes
        else:
            origin, size = f"{first.repo}@{first.revision}: {first.files[0].path}", first.files[0].bytes
        amount = "size known at run time" if size is None else human_bytes(size)
        print(f"  {amount}, {origin} -> {output / 'datasets' / dataset.name}", file=sys.stderr)


def run(args: argparse.Namespace) -> None:
    retry = retry_from(args)
    everything = [read_dataset(e) for e in read_manifest(args.manifest, "datasets")]
    names = select([d.name for d in everything], args.only, args.manifest)
    datasets = [d for d in everything if d.name in names]
    _show(datasets, args.output, origins=args.from_folder is None)
    if args.dry_run:
        print(json.dumps({"dry_run": True, "datasets": names}))
        return
    with lock_folder(args.output):
        if args.from_folder is not None:
            taken = take_from(datasets, args.from_folder, args.output)
        else:
            taken = download(datasets, args, retry)
        write_notice(everything, args.output / "datasets")
    print(json.dumps({"output": str(args.output), "datasets": taken}))


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--manifest", type=Path, default=HERE / "dataset-assets.json", help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=HERE.parent / "downloads", help="default: %(default)s")
    parser.add_argument(
        "--from", dest="from_folder", type=Path, metavar="DIR", help="take files found anywhere below DIR"
    )
    add_transfer_options(parser)
    args = parser.parse_args(argv)
    return run_tool(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
