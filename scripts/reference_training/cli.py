"""Command line of scripts/train_reference_moe.py."""

from __future__ import annotations

import argparse
from pathlib import Path


def parser() -> argparse.ArgumentParser:
    """The four commands."""
    top = argparse.ArgumentParser(prog="train_reference_moe.py")
    commands = top.add_subparsers(dest="command", required=True)
    p = commands.add_parser("prepare", help="collect text, train the tokenizer, write token files")
    p.add_argument("--work", type=Path, required=True)
    p.add_argument("--datasets", type=Path, help="folder with c4/, gsm8k/, humaneval/, wikitext-2-v1/")
    p = commands.add_parser("train", help="train one model")
    p.add_argument("--config", required=True)
    p.add_argument("--work", type=Path, required=True)
    p.add_argument("--output", type=Path, required=True, help="model folder")
    p.add_argument("--minutes", type=float, help="wall time, start and evaluation included")
    p.add_argument("--steps", type=int, help="stop after this many steps instead")
    p.add_argument("--batch-rows", type=int)
    p.add_argument("--sequence-tokens", type=int)
    p.add_argument("--device", default=None)
    p.add_argument("--no-compile", action="store_true")
    p = commands.add_parser("all", help="train every model at the same time and pack the folders")
    p.add_argument("--work", type=Path, required=True)
    p.add_argument("--output", type=Path, required=True)
    p.add_argument("--minutes-total", type=float, default=9.0)
    p.add_argument("--device", default=None)
    p.add_argument("--no-compile", action="store_true")
    p.add_argument("--batch-rows", type=int)
    p.add_argument("--sequence-tokens", type=int)
    p.add_argument("--configs", nargs="*", help="only these")
    p = commands.add_parser("sample", help="continue a prompt with transformers")
    p.add_argument("--model", type=Path, required=True)
    p.add_argument("--prompt", required=True)
    p.add_argument("--tokens", type=int, default=120)
    p.add_argument("--temperature", type=float, default=0.0)
    return top


def main(argv: list[str] | None = None) -> int:
    """Run one command; torch is imported by those that need it."""
    args = parser().parse_args(argv)
    if args.command == "prepare":
        from .prepare import prepare

        prepare(args.work, args.datasets)
    elif args.command == "train":
        from .train import train_command

        train_command(args)
    elif args.command == "all":
        from .train_all import train_all

        return train_all(args)
    else:
        from .sample import sample

        print(sample(args.model, args.prompt, args.tokens, args.temperature))
    return 0
