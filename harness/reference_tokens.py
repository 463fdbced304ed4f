"""The target's own greedy tokens, one untimed run per (model, prompt): what exact_match compares with.

A line of reference_tokens.jsonl holds token ids, never text; for private prompts only their SHA-256.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.prompts import BenchPrompt


class ReferenceKey(NamedTuple):
    weights_hash: str
    prompt_sha256: str
    new_tokens: int


PREFIXES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
"""Numbers of new tokens for which a longer reference run answers too."""


class ReferenceTokens:
    """The file as a map; a line that a crash left unfinished is ignored and written again. Greedy text does not depend
    on how much of it is wanted: a run of 128 tokens is also the reference of its first 16."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digests: dict[ReferenceKey, str] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    row = json.loads(line)
                    key = ReferenceKey(row["model"], row["prompt_sha256"], row["new_tokens"])
                    self._digests[key] = row.get("tokens_sha256") or token_digest(row["tokens"])
                    for n, digest in row.get("prefixes_sha256", {}).items():
                        self._digests.setdefault(key._replace(new_tokens=int(n)), digest)
                except (ValueError, KeyError):
                    continue

    def has(self, key: ReferenceKey) -> bool:
        return key in self._digests

    def put(self, key: ReferenceKey, prompt: BenchPrompt, tokens: Sequence[int]) -> None:
        digest = token_digest(tokens)
        shown = {"tokens_sha256": digest} if prompt.private else {"tokens": list(tokens)}
        row: dict[str, Any] = {
            "model": key.weights_hash,
            "prompt": prompt.prompt_id,
            "prompt_sha256": key.prompt_sha256,
            "new_tokens": key.new_tokens,
            **shown,
            "prefixes_sha256": {str(n): token_digest(tokens[:n]) for n in PREFIXES if n < len(tokens)},
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # several runs may share the folder
            file.seek(0)
            text = file.read()
            torn = bool(text) and not text.endswith("\n")
            file.write("\n" * torn + json.dumps(row) + "\n")
        self._digests[key] = digest
        for n, part in row["prefixes_sha256"].items():
            self._digests.setdefault(key._replace(new_tokens=int(n)), part)

    def matches(self, key: ReferenceKey, tokens: Sequence[int]) -> bool | None:
        """Whether tokens equal the reference run's; None where there is no reference run."""
        return self.matches_digest(key, token_digest(tokens))

    def matches_digest(self, key: ReferenceKey, digest: str) -> bool | None:
        """The same for tokens of which only `token_digest` was kept."""
        own = self._digests.get(key)
        return None if own is None else digest == own


def reference_key(weights_hash: str, prompt: BenchPrompt, new_tokens: int) -> ReferenceKey:
    return ReferenceKey(weights_hash, token_digest(prompt.tokens), new_tokens)


def token_digest(tokens: Sequence[int]) -> str:
    return hashlib.sha256(",".join(str(int(t)) for t in tokens).encode()).hexdigest()
