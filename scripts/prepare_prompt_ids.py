"""Token ids of the datasets' prompts, for machines without datasets: python scripts/prepare_prompt_ids.py

Tokenizers are given as MODEL=FILE (a tokenizer.json: the checkpoint's own, or one out of a package). Datasets: those of
the download tools, or below --datasets DIR. The output may hold ids of private datasets; .work/ is ignored by git.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import assets, datasets
from harness.prompt_ids import DATASETS, prompt_ids
from specter_core.errors import UserError, exit_code

ROOT = Path(__file__).resolve().parents[1]
LENGTHS = {16: 32, 64: 2, 256: 2, 1024: 2}
"""Prefix length -> prompts per dataset."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", action="append", required=True, metavar="MODEL=FILE", help="a tokenizer.json")
    parser.add_argument("--datasets", type=Path, help="a folder per dataset; default: the downloads")
    parser.add_argument("--output", type=Path, default=ROOT / ".work/prompt_ids/prompts.json")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    roots = {name: options.datasets or assets.dataset_root(name) for name in DATASETS}
    here = {name: root for name, root in roots.items() if datasets.absent(name, root) is None}
    for name in set(roots) - set(here):
        print(f"left out: {datasets.absent(name, roots[name])}", file=sys.stderr)
    models = {}
    for given in options.tokenizer:
        model, _, file = given.partition("=")
        models[model] = prompt_ids(here, encoder(Path(file)), LENGTHS, options.seed)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(models))
    counts = {m: {d: {n: len(p) for n, p in v.items()} for d, v in x["prompts"].items()} for m, x in models.items()}
    print(json.dumps({"output": str(options.output), "prompts": counts}))
    return 0


def encoder(file: Path) -> Callable[[str], Sequence[int]]:
    from tokenizers import Tokenizer

    if not file.is_file():
        raise UserError(f"{file} is no tokenizer.json; give one as --tokenizer MODEL=FILE")
    tokenizer = Tokenizer.from_file(str(file))
    return lambda text: tokenizer.encode(text).ids


if __name__ == "__main__":
    sys.exit(exit_code(main))
