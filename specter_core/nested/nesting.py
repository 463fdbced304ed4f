"""A host store of plain experts and a draft -> a host store of residuals; the draft's codes become its other half."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from specter_core.draft.draft_store import DraftExperts
from specter_core.draft.int4 import Int4Matrix
from specter_core.errors import UserError
from specter_core.memory.host_store import HostExpertStore
from specter_core.memory.payload import ExpertViews, PayloadLayout
from specter_core.nested.expert import ExpertCodes, decode_expert, encode_expert, sanitised_codes
from specter_core.nested.layout import NestedLayout
from specter_core.types import ExpertKey


@dataclass(frozen=True, slots=True)
class NestingReport:
    """What nesting did to a model. moved: draft codes that had to change, of `weights`; the largest payload is every
    slot's size."""

    weights: int
    moved: int
    mean_bytes: float
    largest_bytes: int

    def bits_per_weight(self, weights_per_expert: int) -> float:
        """Bits a slot takes per weight, the resident code not counted."""
        return 8 * self.largest_bytes / weights_per_expert


def nested_store(
    plain: HostExpertStore,
    draft: DraftExperts,
    *,
    device: torch.device | str = "cpu",
    directory: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[HostExpertStore, NestingReport]:
    """A ready store with every expert of `plain` as a nested payload. Changes `draft` in place where a code does not
    reach its weight.

    Two passes: codes and sizes first, since the largest payload is the size of all. UserError for experts that are not
    BF16.
    """
    check_dtype(plain.layout.dtype)
    layout = NestedLayout(plain.layout.hidden, plain.layout.width)
    keys = list(_keys(plain))
    sizes, moved = [], 0
    for key in keys:
        found = sanitised_codes(_weights(plain, key, device), expert_codes(draft, key, device))
        _replace(draft, key, found.codes)
        sizes.append(found.tails)
        moved += found.moved
    payload_bytes = layout.payload_bytes(max(sizes))
    nested = HostExpertStore.create(
        plain.layers, plain.experts,
        PayloadLayout(layout.hidden, layout.width, torch.bfloat16, "nested", payload_bytes), directory,
    )  # fmt: skip
    try:
        for done, key in enumerate(keys, 1):
            codes = expert_codes(draft, key, device)
            entry = nested.entry(key)
            entry[:payload_bytes] = encode_expert(_weights(plain, key, device), codes, layout, payload_bytes)
            nested.layout.seal(entry, key)
            if progress is not None:
                progress(done, len(keys))
    except BaseException:
        nested.close()
        nested.unlink()
        raise
    nested.mark_ready()
    mean = layout.tails_at + sum(sizes) / len(sizes)
    return nested, NestingReport(layout.weights * len(keys), moved, mean, payload_bytes)


def check_dtype(dtype: torch.dtype) -> None:
    """UserError unless experts are BF16."""
    if dtype != torch.bfloat16:
        raise UserError(f"experts are {dtype}, nested experts need torch.bfloat16; use experts_encoding=plain")


def expert_codes(draft: DraftExperts, key: ExpertKey, device: torch.device | str | None = None) -> ExpertCodes:
    """One expert's codes and scales; views of the draft's where it lies on `device`."""
    matrices = (
        Int4Matrix(m.codes[key.layer, key.expert], m.scales[key.layer, key.expert]) for m in (draft.gate_up, draft.down)
    )
    return ExpertCodes(*(Int4Matrix(m.codes.to(device), m.scales.to(device)) for m in matrices))


def nested_views(layout: PayloadLayout, draft: DraftExperts) -> Callable[[Tensor, ExpertKey], ExpertViews]:
    """The CPU engine's way from an entry of `layout` to matrices: decoded anew at each use."""
    inner = NestedLayout(layout.hidden, layout.width)

    def views(entry: Tensor, key: ExpertKey) -> ExpertViews:
        return decode_expert(entry, expert_codes(draft, key, entry.device), inner)

    return views


def _replace(draft: DraftExperts, key: ExpertKey, codes: ExpertCodes) -> None:
    draft.gate_up.codes[key.layer, key.expert] = codes.gate_up.codes.to(draft.device)
    draft.down.codes[key.layer, key.expert] = codes.down.codes.to(draft.device)


def _keys(store: HostExpertStore) -> Iterator[ExpertKey]:
    return (ExpertKey(layer, expert) for layer in range(store.layers) for expert in range(store.experts))


def _weights(store: HostExpertStore, key: ExpertKey, device: torch.device | str) -> ExpertViews:
    return ExpertViews(*(matrix.to(device) for matrix in store.layout.views(store.entry(key))))
