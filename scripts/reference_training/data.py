"""Token files on the device, and rows drawn from the sources by weight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch


class Corpus:
    """train.bin and valid.bin of a work folder.

    A row is a window of S + 1 ids inside one source: half of the rows start with a document, half anywhere.
    """

    def __init__(self, work: Path, device: torch.device, seed: int) -> None:
        try:
            self.manifest: dict[str, Any] = json.loads((work / "manifest.json").read_text())
        except FileNotFoundError:
            raise SystemExit(f"no manifest.json in {work}; run the prepare command with --work {work} first") from None
        self.sources: list[dict[str, Any]] = self.manifest["sources"]
        train = np.fromfile(work / "train.bin", dtype=np.uint16)
        assert train.size == self.manifest["train_tokens"], (train.size, self.manifest["train_tokens"])
        self.valid = torch.from_numpy(np.fromfile(work / "valid.bin", dtype=np.uint16).astype(np.int64))
        self.token_bytes = torch.tensor(self.manifest["token_bytes"])
        self.train = torch.from_numpy(train.astype(np.int32)).to(device)
        self.rng = np.random.default_rng(seed)
        weights = np.array([s["weight"] for s in self.sources], dtype=np.float64)
        self.shares = weights / weights.sum()
        self.starts = []
        for source in self.sources:
            low, high = source["train"]
            ends = np.flatnonzero(train[low:high] == 0) + low + 1
            self.starts.append(np.concatenate(([low], ends[ends < high - 1])))

    def batch(self, rows: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, each [rows, tokens] int64 on the device."""
        picks = self.rng.choice(len(self.sources), size=rows, p=self.shares)
        aligned = self.rng.random(rows) < 0.5
        offsets = np.empty(rows, dtype=np.int64)
        for i, pick in enumerate(picks):
            low, high = self.sources[pick]["train"]
            last = max(low, high - tokens - 1)
            if aligned[i]:
                offsets[i] = min(self.rng.choice(self.starts[pick]), last)
            else:
                offsets[i] = self.rng.integers(low, last + 1)
        at = torch.from_numpy(offsets)
        if self.train.is_cuda:
            at = at.pin_memory().to(self.train.device, non_blocking=True)
        index = at[:, None] + torch.arange(tokens + 1, device=self.train.device)
        window = self.train[index.clamp_max(self.train.numel() - 1)].long()
        return window[:, :-1], window[:, 1:]

    def valid_rows(self, source: dict[str, Any], tokens: int, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Held-out windows of one source, each [N, tokens]; at most `most` ids."""
        low, high = source["valid"]
        ids = self.valid[low:high][: most + 1]
        count = max(1, (ids.numel() - 1) // tokens)
        tokens = min(tokens, ids.numel() - 1)
        inputs = ids[: count * tokens].view(count, tokens)
        return inputs, ids[1 : count * tokens + 1].view(count, tokens)
