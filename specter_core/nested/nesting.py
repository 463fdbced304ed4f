"""A host store of plain experts and a draft -> a host store of residuals; the draft's codes become its other half.

Two passes over the experts: codes and sizes first, since the largest payload is the size of all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from specter_core.draft.draft_store import DraftExperts
from specter_core.draft.int4 import GROUP, Int4Matrix
from specter_core.errors import UserError
from specter_core.memory.host_store import HostExpertStore
from specter_core.memory.payload import ExpertViews, PayloadLayout
from specter_core.nested.expert import ExpertCodes, decode_expert, encode_experts, sanitised_codes
from specter_core.nested.layout import NestedLayout
from specter_core.types import ExpertKey

_BATCH_BYTES = 150_000_000
"""Of plain experts that are encoded at once: the encoder's intermediates take about twenty times as much."""
LayerCodes = tuple[Int4Matrix, Int4Matrix]
"""gate_up [E, 2I, …] and down [E, H, …] of a layer, canonical layout."""


@dataclass(slots=True)
class NestingReport:
    """What nesting does to a model. tails: bytes beyond one symbol per weight, of each expert; moved: draft codes that
    had to change; flagged: groups of 128 weights whose tails are bytes."""

    layout: NestedLayout
    tails: list[int] = field(default_factory=list)
    moved: int = 0
    flagged: int = 0

    @property
    def payload_bytes(self) -> int:
        """Of every slot: the largest expert's."""
        return self.layout.payload_bytes(max(self.tails))

    @property
    def bits_per_weight(self) -> float:
        """Of every slot, the resident code not counted."""
        return 8 * self.payload_bytes / self.layout.weights

    def __str__(self) -> str:
        mean = 8 * (self.layout.tails_at + sum(self.tails) / len(self.tails)) / self.layout.weights
        moved = self.moved / (self.layout.weights * len(self.tails))
        flagged = self.flagged * GROUP / (self.layout.weights * len(self.tails))
        return (
            f"nested experts: {self.bits_per_weight:.2f} bits per weight in slots (mean {mean:.2f}), {len(self.tails)}"
            f" x {self.payload_bytes / 1e6:.2f} MB, {moved:.2%} of the draft's codes moved,"
            f" {flagged:.2%} of the groups with tails of a byte"
        )


def nested_store(
    plain: HostExpertStore,
    draft: DraftExperts,
    *,
    device: torch.device | str = "cpu",
    directory: str | os.PathLike[str] | None = None,
    checksum: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[HostExpertStore, NestingReport]:
    """A ready store with every expert of `plain` as a nested payload. Changes `draft` in place where a code does not
    reach its weight.

    device: where the encoder works; checksum: see `PayloadLayout.seal`. UserError for experts that are not BF16.
    """
    report = new_report(plain)
    for layer in range(plain.layers):
        codes = (_layer(draft.gate_up, layer), _layer(draft.down, layer))
        for side, found in zip(codes, sanitised_layer(plain, layer, codes, report, device=device), strict=True):
            side.codes.copy_(found.codes)
    whole = write_nested(
        plain, lambda layer: (_layer(draft.gate_up, layer), _layer(draft.down, layer)), report,
        device=device, directory=directory, checksum=checksum, progress=progress,
    )  # fmt: skip
    return whole, report


def new_report(plain: HostExpertStore) -> NestingReport:
    """For `sanitised_layer`. UserError unless experts are BF16."""
    if plain.layout.dtype != torch.bfloat16:
        raise UserError(
            f"experts are {plain.layout.dtype}, nested experts need torch.bfloat16; use experts_encoding=plain"
        )
    assert plain.layout.encoding == "plain", plain.layout
    return NestingReport(NestedLayout(plain.layout.hidden, plain.layout.width))


def sanitised_layer(
    plain: HostExpertStore, layer: int, codes: LayerCodes, report: NestingReport, *, device: torch.device | str
) -> LayerCodes:
    """First pass over a layer: codes that reach every weight, on `device`; sizes go to the report, in order."""
    gate_up, down = (Int4Matrix(m.codes.to(device, copy=True), m.scales.to(device)) for m in codes)
    for some, wide, tall in _batches(plain, layer, device):
        found = sanitised_codes(wide, tall, _experts((gate_up, down), some))
        report.tails += found.tails
        report.flagged += found.flagged
        if found.moved:
            report.moved += found.moved
            gate_up.codes[some], down.codes[some] = found.codes.gate_up.codes, found.codes.down.codes
    return gate_up, down


def write_nested(
    plain: HostExpertStore,
    codes: Callable[[int], LayerCodes],
    report: NestingReport,
    *,
    device: torch.device | str,
    directory: str | os.PathLike[str] | None = None,
    checksum: bool = True,
    progress: Callable[[int, int], None] | None = None,
    register: Callable[[Tensor], None] | None = None,
) -> HostExpertStore:
    """Second pass: a ready store. codes(layer) are what `sanitised_layer` returned. register: page-locks the new
    segment before it is filled."""
    layout, size = report.layout, report.payload_bytes
    entries = PayloadLayout(layout.hidden, layout.width, torch.bfloat16, "nested", size)
    nested = HostExpertStore.create(plain.layers, plain.experts, entries, directory)
    whole = nested.segment.view(nested.layers, nested.experts, entries.entry_bytes)
    with nested.filling():
        if register is not None:
            register(nested.segment)
        for layer in range(plain.layers):
            gate_up, down = (Int4Matrix(m.codes.to(device), m.scales.to(device)) for m in codes(layer))
            for some, wide, tall in _batches(plain, layer, device):
                payload = encode_experts(wide, tall, _experts((gate_up, down), some), layout, size)
                whole[layer, some].copy_(
                    pad(payload, (0, entries.entry_bytes - size))
                )  # one range: the link's full rate
                for expert in range(some.start, some.stop):
                    key = ExpertKey(layer, expert)
                    nested.layout.seal(nested.entry(key), key, checksum=checksum)
            if progress is not None:
                progress(layer + 1, plain.layers)
    return nested


def nested_views(layout: PayloadLayout, draft: DraftExperts) -> Callable[[Tensor, ExpertKey], ExpertViews]:
    """The CPU engine's way from an entry of `layout` to matrices: decoded anew at each use."""
    inner = NestedLayout(layout.hidden, layout.width)

    def views(entry: Tensor, key: ExpertKey) -> ExpertViews:
        codes = (_layer(draft.gate_up, key.layer), _layer(draft.down, key.layer))
        return decode_expert(entry, _experts(codes, slice(key.expert, key.expert + 1)), inner)

    return views


def _layer(matrix: Int4Matrix, layer: int) -> Int4Matrix:
    return Int4Matrix(matrix.codes[layer], matrix.scales[layer])


def _experts(codes: LayerCodes, some: slice) -> ExpertCodes:
    return ExpertCodes(*(Int4Matrix(matrix.codes[some], matrix.scales[some]) for matrix in codes))


def _batches(store: HostExpertStore, layer: int, device: torch.device | str) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(experts, wide [B, 2I, H], tall [B, H, I]) of a plain store's layer, on `device`."""
    layout = store.layout
    hidden, width = layout.hidden, layout.width
    whole = store.segment.view(store.layers, store.experts, layout.entry_bytes)
    at_once = max(1, _BATCH_BYTES // layout.entry_bytes)
    for start in range(0, store.experts, at_once):
        some = slice(start, min(start + at_once, store.experts))
        flat = whole[layer, some].to(device)[:, : layout.payload_bytes].view(layout.dtype)
        split = 2 * hidden * width
        yield (
            some,
            flat[:, :split].unflatten(1, (2 * width, hidden)),
            flat[:, split:].unflatten(1, (hidden, width)),
        )
