#!/usr/bin/env python3
"""Makes the files of a release from explicit inputs; the same inputs give the same bytes.

    python scripts/build_release.py --output DIR --base-url https://HOST/FOLDER --wheels DIR --datasets DIR \\
        --target DIR --draft DIR

    specter-ae-v1.tar.gz            the tracked files of --source's HEAD                  specter/
    specter-ae-wheels.tar.gz        supplied wheels with their SHA256SUMS                 specter-assets/wheels/
    specter-ae-datasets.tar.gz      the five prompt datasets; GPQA encrypted              specter-assets/datasets/
    specter-ae-dsv2-target.tar.gz   DeepSeek-V2-Lite                                      specter-assets/dsv2-target/
    specter-ae-dsv2-draft.tar.gz    its GPTQ INT4 draft                                   specter-assets/dsv2-draft/
    specter-ae-v1.manifest.json     commit, sizes and hashes of all of it
    SHA256SUMS                      of these six

url, bytes and sha256 of the two model archives (below --base-url) are filled into the model-assets.json inside
v1. docs/RELEASE.md tells how a release is made and checked. The last line on stdout is one JSON object. Exit
codes: 0; 2 arguments, inputs or disk.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "initialization")]

from _batch import OneLineParser, check_space, run_tool  # noqa: E402
from _http import UsageError  # noqa: E402
from release import inputs  # noqa: E402
from release.tarball import Built, Entry, build, say  # noqa: E402

PREFIX = "specter-ae"
SOURCE, WHEELS, DATASETS, TARGET, DRAFT = "v1", "wheels", "datasets", "dsv2-target", "dsv2-draft"
MANIFEST = f"{PREFIX}-v1.manifest.json"
FIRST = (SOURCE, WHEELS, DATASETS)  # these and the manifest verify before the models are there
LEVELS = {SOURCE: 9, WHEELS: 1, DATASETS: 9, TARGET: 1, DRAFT: 1}  # weights and wheels hardly shrink


def file_name(part: str) -> str:
    return f"{PREFIX}-{part}.tar.gz"


RELEASE_FILES = {*(file_name(part) for part in LEVELS), MANIFEST, inputs.SUMS}


def filled_manifest(raw: Any, built: dict[str, Built], base_url: str) -> bytes:
    """model-assets.json with url, bytes and sha256 of the two model archives."""
    entries = {asset.get("name"): asset for asset in raw["assets"]}
    for part in (TARGET, DRAFT):
        asset, made = entries.get(part), built[part]
        if asset is None or asset.get("file") != made.file:
            raise UsageError(f"{inputs.MODEL_MANIFEST} has no archive {part} with file {made.file}; add it")
        asset |= {"url": f"{base_url.rstrip('/')}/{made.file}", "bytes": made.bytes, "sha256": made.sha256}
    return (json.dumps(raw, indent=1, ensure_ascii=False) + "\n").encode()


def release_manifest(source: inputs.Source, built: dict[str, Built], base_url: str) -> bytes:
    """specter-ae-v1.manifest.json: per archive its hashes (of the tar inside too) and every file's."""
    archives = []
    for part in LEVELS:
        made = built[part]
        unpacks_to = inputs.SOURCE if part == SOURCE else inputs.ASSETS
        archives.append(
            {
                "name": part,
                "file": made.file,
                "unpacks_to": unpacks_to,
                "bytes": made.bytes,
                "sha256": made.sha256,
                "tar_sha256": made.tar_sha256,
                "files": list(made.files),
            }
        )
    record = {"format": 1, "release": f"{PREFIX}-v1", "commit": source.commit, "models_url": base_url}
    return (json.dumps({**record, "archives": archives}, indent=1) + "\n").encode()


def write(path: Path, body: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(body)
    part.replace(path)


def check_output(folder: Path) -> None:
    """A release folder holds nothing else, so that it can be uploaded as it stands."""
    folder.mkdir(parents=True, exist_ok=True)
    foreign = sorted(p.name for p in folder.iterdir() if p.name.removesuffix(".part") not in RELEASE_FILES)
    if foreign:
        raise UsageError(f"--output {folder} holds {foreign[0]}, which is no file of a release; choose an empty folder")


def run(args: argparse.Namespace) -> None:
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", args.base_url):
        raise UsageError(f"--base-url {args.base_url!r} has to begin with https://host")
    pins = [pin.lower() for pin in args.gpqa_sha256]
    for pin in pins:
        if not re.fullmatch(r"[0-9a-f]{64}", pin):
            raise UsageError(f"--gpqa-sha256 {pin!r} has to be 64 hexadecimal digits")
    source = inputs.Source(args.source)
    entries: dict[str, list[Entry]] = {
        TARGET: inputs.model_entries(
            args.target, "--target", TARGET, ("config.json", "tokenizer.json"), without=args.draft
        ),
        DRAFT: inputs.model_entries(args.draft, "--draft", DRAFT, ("quantize_config.json",)),
        WHEELS: inputs.wheel_entries(args.wheels),
        DATASETS: inputs.dataset_entries(args.datasets, source.read_json(inputs.DATASET_MANIFEST), pins),
    }
    check_output(args.output)
    needed = source.bytes() + sum(e.bytes for part in entries.values() for e in part)
    say(check_space(needed, args.output))
    if args.dry_run:
        print(json.dumps({"dry_run": True, "commit": source.commit, "bytes": needed, "files": sorted(RELEASE_FILES)}))
        return
    built = {part: build(args.output / file_name(part), some, LEVELS[part]) for part, some in entries.items()}
    models = filled_manifest(source.read_json(inputs.MODEL_MANIFEST), built, args.base_url)
    built[SOURCE] = build(args.output / file_name(SOURCE), source.entries(models), LEVELS[SOURCE])
    write(args.output / MANIFEST, release_manifest(source, built, args.base_url))
    digest = inputs.file_sha256(args.output / MANIFEST)
    sums = [(built[p].sha256, built[p].file) for p in FIRST] + [(digest, MANIFEST)]
    sums += [(built[p].sha256, built[p].file) for p in (TARGET, DRAFT)]
    write(args.output / inputs.SUMS, "".join(f"{sha256}  {name}\n" for sha256, name in sums).encode())
    print(json.dumps({"output": str(args.output), "commit": source.commit, "sha256": {n: d for d, n in sums}}))


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folders: list[tuple[str, str]] = [
        ("--output", "empty folder, or one with an earlier build"),
        ("--wheels", "folder of the supplied wheels"),
        ("--datasets", "downloads/datasets as download_datasets.py leaves it"),
        ("--target", "checkpoint of DeepSeek-V2-Lite"),
        ("--draft", "its draft, from quantize_draft.py"),
    ]
    for name, text in folders:
        parser.add_argument(name, type=Path, required=True, metavar="DIR", help=text)
    parser.add_argument("--source", type=Path, default=HERE.parent, metavar="DIR", help="checkout (default: this one)")
    parser.add_argument("--base-url", required=True, metavar="URL", help="where the model archives will lie")
    parser.add_argument("--gpqa-sha256", action="append", default=[], metavar="HEX", help="pins gpqa_main.csv.zip")
    parser.add_argument("--dry-run", action="store_true", help="check inputs and space; write nothing")
    args = parser.parse_args(argv)
    return run_tool(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
