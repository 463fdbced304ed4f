"""The engine's switches (each has an exactness test; `paper()` sets the published design)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specter_core.errors import UserError

VERIFY_ORDERS = ("expertwise", "tokenwise", "microbatches")
EVICTIONS = ("need", "count_then_recency", "lru")
PLANNINGS = ("need", "top_m")
ENCODINGS = ("plain", "nested")
ENCODING_CHOICES = ("auto", *ENCODINGS)
VARIANTS = ("default", "paper")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Plain values; none of them changes a greedy token, whatever it is set to.

    depth: K, draft tokens per window; 0 is plain autoregressive decoding. draft_stop: a row drafts no further once the
    estimated chance that the target agrees with all its tokens of this window is below it; 0: every row drafts K.
    initial_chunk_tokens: b_1, draft tokens before the first prefetch plan.
    verify: expert by expert for all rows, row by row, or expert by expert for one half of the batch after the other.
    shared_kv, shared_weights: the draft has no KV, no attention, embeddings … of its own. Without shared_weights the
    memory for a second copy is set aside; the numbers are the same, so computation goes on with the one copy.
    prefetch_under_verify: planned loads go on underneath verification, and the last draft tokens are planned for too.
    uniform_slots: the same M in every layer and no staging slots; otherwise one pool, remainder to the first layers.
    staging_slots: slots shared by all layers, used by misses of a layer whose own slots are all needed. stage_ahead:
    free ones take predicted misses of the next layer.
    planning: prefetch what the draft has counted over what is least likely to be needed, or each layer's top M.
    eviction in verification: by recent need, by count and recency of this window, or least recently used.
    context_tokens: KV capacity per row, in tokens. prefill_chunk_tokens: rows of one prefill chunk.
    experts_encoding: how a model is to be opened for this engine (`open_model`); "nested": host store, link and slots
    carry residuals to the draft's codes.
    """

    depth: int = 8
    draft_stop: float = 0.0
    initial_chunk_tokens: int = 2
    prefetch: bool = True
    fused_kernel: bool = True
    graphs: bool = True
    hit_first: bool = True
    verify: str = "expertwise"
    shared_kv: bool = True
    shared_weights: bool = True
    prefetch_under_verify: bool = True
    uniform_slots: bool = False
    staging_slots: int = 4
    stage_ahead: bool = True
    planning: str = "need"
    eviction: str = "need"
    context_tokens: int = 1024
    prefill_chunk_tokens: int = 1024
    max_batch: int = 1
    experts_encoding: str = "plain"

    def __post_init__(self) -> None:
        _at_least("depth", self.depth, 0, "0 is plain decoding")
        if not 0 <= self.draft_stop < 1:
            raise UserError(f"draft_stop is {self.draft_stop}, outside [0, 1); use 0 to switch it off")
        _at_least("initial_chunk_tokens", self.initial_chunk_tokens, 1)
        _at_least("staging_slots", self.staging_slots, 0)
        _at_least("context_tokens", self.context_tokens, 2)
        _at_least("prefill_chunk_tokens", self.prefill_chunk_tokens, 1)
        _at_least("max_batch", self.max_batch, 1)
        _one_of("verify", self.verify, VERIFY_ORDERS)
        _one_of("eviction", self.eviction, EVICTIONS)
        _one_of("planning", self.planning, PLANNINGS)
        _one_of("experts_encoding", self.experts_encoding, ENCODINGS)

    def paper(self) -> EngineOptions:
        """The right-hand column of the switch table: no planned loads beyond drafting, uniform M, LRU per layer."""
        return replace(
            self,
            draft_stop=0.0,
            prefetch=True,
            fused_kernel=True,
            hit_first=True,
            verify="expertwise",
            shared_kv=True,
            shared_weights=True,
            prefetch_under_verify=False,
            uniform_slots=True,
            staging_slots=0,
            stage_ahead=False,
            planning="top_m",
            eviction="lru",
            experts_encoding="plain",
        )


def resolve_encoding(wanted: str, *, device: str, dtype: str, with_draft: bool, variant: str = "default") -> str:
    """The encoding of the experts for what is asked for: `plain` and `nested` as they are; `auto` is nested where it
    gains and can be had, plain elsewhere.

    device: cpu | cuda; the link that nested experts save is a GPU's. dtype: of the target's experts, `bfloat16`,
    `float16` …. with_draft: whether an INT4 draft is resident (K > 0 and there is one). variant: all but `default` are
    plain, the published design among them. UserError for anything else than auto, plain, nested.
    """
    _one_of("encoding", wanted, ENCODING_CHOICES)
    if wanted != "auto":
        return wanted
    gains = device == "cuda" and dtype == "bfloat16" and with_draft and variant == "default"
    return "nested" if gains else "plain"


def _at_least(name: str, value: int, least: int, note: str = "") -> None:
    if value < least:
        raise UserError(f"{name} is {value}, the least is {least}{': ' + note if note else ''}; raise it")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UserError(f"{name} is {value!r}, known are {', '.join(known)}; choose one of these")
