"""Which layout the draft's codes take on a CUDA device."""

from __future__ import annotations

from specter_core.draft.kernels.block_path import BlockExpertPath
from specter_core.draft.kernels.path import FusedExpertPath


def path_of(encoding: str) -> type[BlockExpertPath] | type[FusedExpertPath]:
    """In blocks for the tensor cores; in rows where the draft's codes are the other half of "nested" experts."""
    return FusedExpertPath if encoding == "nested" else BlockExpertPath
