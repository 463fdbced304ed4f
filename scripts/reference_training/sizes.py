"""Exact sizes of a reference model and of the INT4 GPTQ draft that belongs to it."""

from __future__ import annotations

import json
import struct
from pathlib import Path

LIMIT_BYTES = 16_000_000
GROUP = 128
EXPERT_MARK = ".experts."


def tensor_shapes(safetensors: Path) -> dict[str, list[int]]:
    """Names and shapes from the header of a safetensors file."""
    with safetensors.open("rb") as f:
        size = struct.unpack("<Q", f.read(8))[0]
        header = json.loads(f.read(size))
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}


def draft_bytes(shapes: dict[str, list[int]]) -> int:
    """Bytes of a safetensors file with qweight, qzeros, scales and g_idx of every routed expert matrix."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        if EXPERT_MARK not in name:
            continue
        out, inner = shape
        groups = inner // GROUP
        stem = name.removesuffix(".weight")
        parts = {
            "qweight": ("I32", [inner // 8, out], inner * out // 2),
            "qzeros": ("I32", [groups, out // 8], groups * out // 2),
            "scales": ("F16", [groups, out], groups * out * 2),
            "g_idx": ("I32", [inner], inner * 4),
        }
        for suffix, (dtype, dims, size) in parts.items():
            header[f"{stem}.{suffix}"] = {"dtype": dtype, "shape": dims, "data_offsets": [at, at + size]}
            at += size
    return at + 8 + len(json.dumps(header, separators=(",", ":")))


def folder_sizes(folder: Path) -> dict[str, int]:
    """Bytes of the model file, of all files, of the draft to come, and parameters (experts, other)."""
    shapes = tensor_shapes(folder / "model.safetensors")
    count = {n: _product(s) for n, s in shapes.items()}
    experts = sum(v for n, v in count.items() if EXPERT_MARK in n)
    draft = draft_bytes(shapes)
    files = sum(p.stat().st_size for p in folder.iterdir() if p.is_file())
    return {
        "expert_parameters": experts,
        "other_parameters": sum(count.values()) - experts,
        "model_bytes": (folder / "model.safetensors").stat().st_size,
        "files_bytes": files,
        "draft_bytes": draft,
        "total_bytes": files + draft,
    }


def _product(shape: list[int]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out
