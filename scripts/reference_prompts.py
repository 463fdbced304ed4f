"""What scripts that count on real prompts have in common: which prompts of which datasets for which models."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from harness.datasets import load_texts, select_prompts
from harness.prompts import BenchPrompt
from specter_core.text import TextCodec


def add_prompt_arguments(parser: argparse.ArgumentParser, *, prompts: int, new_tokens: int) -> None:
    """--models, --datasets, --data, --prompts (per dataset), --prefix-tokens, --new-tokens; the numbers: defaults."""
    parser.add_argument("--models", default="deepseek_v2_mini,qwen2_moe_mini,phimoe_mini")
    parser.add_argument("--datasets", default="c4,wikitext2,humaneval,gsm8k,gpqa")
    parser.add_argument("--data", type=Path, default=Path("downloads"))
    parser.add_argument("--prompts", type=int, default=prompts, help="per dataset")
    parser.add_argument("--prefix-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=new_tokens)


def chosen_prompts(folder: Path, args: argparse.Namespace) -> Iterator[BenchPrompt]:
    """Of each dataset in turn, as the model in `folder` reads them. UserError for a dataset that is not there."""
    codec = TextCodec(folder)
    for dataset in args.datasets.split(","):
        texts = load_texts(dataset, args.data)
        yield from select_prompts(texts, codec.encode, count=args.prompts, prefix_len=args.prefix_tokens, seed=0)
