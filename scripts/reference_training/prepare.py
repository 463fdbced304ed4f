"""`prepare`: text -> tokenizer.json, train.bin, valid.bin (uint16 ids), manifest.json in the work folder."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from .corpus import Source, collect, load_plan
from .tokenizer import save_tokenizer, token_bytes, train_tokenizer


def _encode(tokenizer: Tokenizer, documents: list[str]) -> np.ndarray:
    ids: list[np.ndarray] = []
    for start in range(0, len(documents), 2000):
        for encoding in tokenizer.encode_batch_fast(documents[start : start + 2000]):
            ids.append(np.array([*encoding.ids, 0], dtype=np.uint16))
    return np.concatenate(ids) if ids else np.zeros(0, np.uint16)


def _split(source: Source, share: float, least_chars: int, seed: int) -> tuple[list[str], list[str]]:
    """Documents for training and for validation (at least `share` and `least_chars` of the text)."""
    documents = list(source.documents)
    random.Random(f"{seed} {source.name} split").shuffle(documents)
    wanted = max(share * sum(map(len, documents)), least_chars)
    valid: list[str] = []
    while documents and sum(map(len, valid)) < wanted and len(documents) > 1:
        valid.append(documents.pop()[:40_000])
    return documents, valid


def common_cap(sizes: list[int], room: int) -> int:
    """The largest cap that makes the sum of min(size, cap) at most `room`: only the largest sources are cut."""
    left, count = room, len(sizes)
    for size in sorted(sizes):
        if size * count > left:
            return left // count
        left, count = left - size, count - 1
    return max(sizes)


def prepare(work: Path, datasets: Path | None) -> None:
    """Collect the sources of conf/corpus.yaml and write the work folder; about two minutes on one core."""
    work.mkdir(parents=True, exist_ok=True)
    write_work(work, collect(work, datasets), load_plan())


def write_work(work: Path, sources: list[Source], plan: dict[str, Any]) -> None:
    """Tokenizer, token files and manifest of the sources; `plan` holds the values of conf/corpus.yaml."""
    start = time.monotonic()
    splits = {s.name: _split(s, plan["valid_share"], plan["valid_min_tokens"] * 3, plan["seed"]) for s in sources}
    for source in sources:
        source.documents = splits[source.name][0]
    tokenizer = train_tokenizer(sources, plan["vocab_size"], plan["tokenizer_mb"], plan["seed"])
    save_tokenizer(tokenizer, work, 2048)
    print(f"  tokenizer after {time.monotonic() - start:.0f} s; encoding", flush=True)
    encoded = {s.name: tuple(_encode(tokenizer, part) for part in splits[s.name]) for s in sources}
    most = common_cap([e[0].size for e in encoded.values()], plan["train_max_bytes"] // 2)
    rows, train_parts, valid_parts = [], [], []
    train_at = valid_at = 0
    for source in sources:
        train, valid = encoded[source.name]
        train = train[:most]
        rows.append(
            {
                "name": source.name,
                "style": source.style,
                "licence": source.licence,
                "weight": source.weight,
                "origin": source.origin,
                "documents": len(splits[source.name][0]),
                "dropped_for_overlap": source.dropped,
                "sha256": source.sha256,
                "train": [train_at, train_at + train.size],
                "valid": [valid_at, valid_at + valid.size],
            }
        )
        train_at, valid_at = train_at + train.size, valid_at + valid.size
        train_parts.append(train)
        valid_parts.append(valid)
        print(f"  {source.name:20} {train.size / 1e6:7.3f} M train tokens {valid.size:7d} valid", flush=True)
    np.concatenate(train_parts).tofile(work / "train.bin")
    np.concatenate(valid_parts).tofile(work / "valid.bin")
    manifest = {
        "vocab_size": plan["vocab_size"],
        "seed": plan["seed"],
        "train_tokens": train_at,
        "valid_tokens": valid_at,
        "token_bytes": token_bytes(tokenizer),
        "sources": rows,
    }
    (work / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    print(
        f"  {train_at / 1e6:.2f} M train tokens, {train_at * 2 / 2**20:.1f} MiB",
        flush=True,
    )
