"""One draft step after another: shared decoder, INT4 experts, ELB update, sampled token. No host synchronisation
is needed between steps on an asynchronous device; the host reads tokens only after the last step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specter_core.draft.stopping import agreement
from specter_core.model.decoder import Decoder
from specter_core.model.rows import Rows
from specter_core.passes import DraftExpertsPath
from specter_core.prefetch.pattern_analyzer import PatternAnalyzer
from specter_core.state.kv_cache import KVCache
from specter_core.state.rng import Purpose
from specter_core.state.sampling import SpeculativeSampler
from specter_core.state.state_manager import StateManager


class DraftPass:
    """Drafts up to K tokens per row.

    kv: the target's own cache (shared KV: scratch entries behind the boundary) or, with `shared_kv=False`, a private
    cache of the same shape that holds the draft's entries of the whole sequence. stop: a row ends with the token at
    which the product of its steps' `agreement` falls below it. That token is verified and nothing that was drafted is
    left out, so that sampled output keeps the target's distribution; no row's end depends on another row.
    """

    def __init__(
        self,
        decoder: Decoder,
        experts: DraftExpertsPath,
        analyzer: PatternAnalyzer,
        *,
        shared_kv: bool = True,
        stop: float = 0.0,
    ) -> None:
        self.decoder = decoder
        self.experts = experts
        self.analyzer = analyzer
        self.shared_kv = shared_kv
        self.stop = stop
        self._device = str(decoder.device)

    def start_batch(self, state: StateManager, kv: KVCache, sampler: SpeculativeSampler) -> None:
        """Serves these rows from now on. kv: the target's cache, or a fresh private one."""
        self.state, self.kv, self.sampler = state, kv, sampler
        self.reach = [0] * kv.batch  # private KV: positions that hold the draft's own entries, per row

    def begin(self, depths: Sequence[int]) -> None:
        """Starts a window: depths [B] draft tokens per row (−1: finished row)."""
        self.depths = list(depths)
        self.confidence = torch.ones(len(depths), device=self._device)  # [B]
        self.boundaries = self.state.boundaries
        self.tokens: list[Tensor] = []  # K tensors of [B]
        self.probs: list[Tensor] = []  # K tensors of [B, V], empty when every row is greedy
        self.current = torch.tensor(self.state.pending, dtype=torch.int64, device=self._device)
        if not self.shared_kv:
            self._catch_up()

    def step(self) -> None:
        """Runs draft step t = len(tokens): input pending or d_t, output d_{t+1}."""
        t = len(self.tokens)
        active = [1 if t < depth else 0 for depth in self.depths]
        if self.shared_kv:
            for b, on in enumerate(active):
                if on:
                    self.state.note_draft_write(b, self.boundaries[b] + t)
        rows = Rows.decode([n + t for n in self.boundaries], 1, active, device=self._device)
        logits = self.decoder.logits(self._layers(self.current[:, None], rows, record=True))  # [B, V]
        positions = torch.tensor(self.boundaries, device=self._device) + t + 1
        self.current, probs = self.sampler.sample(logits, positions, Purpose.DRAFT)
        self.tokens.append(self.current)
        if probs is not None:
            self.probs.append(probs)
        if self.stop:
            self.confidence *= agreement(logits)
            for b, confidence in enumerate(self.confidence.tolist()):
                if not confidence >= self.stop:
                    self.depths[b] = min(self.depths[b], t + 1)

    def more(self) -> bool:
        """Whether some row is to be drafted further."""
        return len(self.tokens) < max(self.depths)

    def candidates(self) -> tuple[list[int], Tensor, Tensor | None]:
        """Depth of each row (−1: finished row), draft tokens [B, K] int64 and their distributions [B, K, V] float32
        (None when greedy); K is the longest row's depth."""
        probs = torch.stack(self.probs, dim=1) if self.probs else None
        return self.depths, torch.stack(self.tokens, dim=1).cpu(), probs

    def end(self) -> None:
        """Private KV only: remembers how far the draft's own entries reach."""
        if not self.shared_kv:
            for b, depth in enumerate(self.depths):
                self.reach[b] = self.boundaries[b] + max(depth, 0)

    def prefill(self, prompt: Sequence[int], row: int, chunk_tokens: int) -> None:
        """Private KV only: the draft's own pass over the prompt of one request."""
        for start in range(0, len(prompt), chunk_tokens):
            part = prompt[start : start + chunk_tokens]
            rows = Rows.prefill(row, start, len(part), len(prompt), device=self._device)
            self._layers(torch.tensor([list(part)], device=self._device), rows, record=False)
        self.reach[row] = len(prompt)

    def _catch_up(self) -> None:
        """After full acceptance the draft never saw d_K: its private KV lacks that one position."""
        lag = [
            n - min(reach, n) if d >= 0 else 0
            for n, reach, d in zip(self.boundaries, self.reach, self.depths, strict=True)
        ]
        if not any(lag):
            return
        assert max(lag) == 1, f"the draft's KV lags by {max(lag)} tokens"
        missing = [row.tokens[n - 1] for row, n in zip(self.state.rows, self.boundaries, strict=True)]
        rows = Rows.decode([max(n - 1, 0) for n in self.boundaries], 1, lag, device=self._device)
        self._layers(torch.tensor(missing, device=self._device)[:, None], rows, record=False)

    def _layers(self, tokens: Tensor, rows: Rows, *, record: bool) -> Tensor:
        """tokens [B, T] -> hidden [B*T, H] after the last layer."""
        x = self.decoder.embed(tokens)
        for layer in self.decoder.layers:
            x = layer.attend(x, self.kv, rows)
            if layer.moe_index is None:
                x = layer.dense(x)
                continue
            routing = layer.route(x, rows)
            if record:
                self.analyzer.record(layer.moe_index, routing.ids)
            routed = self.experts.forward(layer.moe_index, routing.normed, routing.ids, routing.weights)
            x = layer.combine(x, routing.normed, routed)
        return x
