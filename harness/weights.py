"""From a conf/model entry to a checkpoint on this machine: where it lies, what is missing, its hash and
shape."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path

from harness import assets
from harness.catalogue import shown
from harness.entries import ModelEntry
from harness.footprint import draft_bytes
from harness.gpu_info import gpus
from harness.system import ModelShape, ModelSpec
from harness.weights_in_memory import in_memory_spec
from specter_core.errors import UserError

WHOLE_HASH_BYTES = 2_000_000_000
SAMPLE_BYTES = 1 << 20


def absent(entry: ModelEntry, kind: str | None = None) -> str | None:
    """None when the checkpoint is here (or can be generated in memory: weights=synthetic on a GPU); otherwise one line:
    what is missing, what fetches it, how large it is."""
    kind = kind or entry.default_weights
    if kind not in entry.weights:
        return f"model={entry.name} has no weights={kind}; known: {', '.join(sorted(entry.weights))}"
    path = _folder(entry, kind, "path")
    if (path / "config.json").exists() and any(path.glob("*.safetensors")):
        return None
    where = f"model={entry.name} weights={kind}: no checkpoint in {shown(path)}"
    if kind == "official":
        target = entry.download["target_bytes"]
        line = f"{where}; fetch {target / 1e9:.1f} GB ({target / 2**30:.1f} GiB) with: {fetch_command(entry)}"
        if entry.shape is None:
            return line
        draft = draft_bytes(entry.shape)
        return f"{line}, then make its INT4 draft ({draft / 1e9:.1f} GB) with: {draft_command(entry)}"
    if kind == "synthetic":
        if entry.shape is not None and gpus():
            return None
        return f"{where}; make it with: python scripts/make_synthetic_checkpoint.py model={entry.name}"
    return f"{where}; it ships with the repository: git checkout -- {shown(path)}"


def fetch_command(entry: ModelEntry) -> str:
    return f"python3 initialization/download_models.py --only {entry.download['name']}{assets.output_option()}"


def draft_command(entry: ModelEntry) -> str:
    target, draft = (shown(_folder(entry, "official", part)) for part in ("path", "draft"))
    return f"python3 initialization/quantize_draft.py --model {target} --output {draft} --calibration TEXT"


def model_spec(entry: ModelEntry, kind: str | None = None) -> ModelSpec:
    """The spec of a checkpoint that is here, without a store. UserError when it is absent, or when its
    draft is not where conf/model names it but in the subfolder that would be opened instead."""
    if (line := absent(entry, kind)) is not None:
        raise UserError(line)
    kind = kind or entry.default_weights
    path, draft = _folder(entry, kind, "path"), _folder(entry, kind, "draft")
    if kind == "synthetic" and not (path / "config.json").exists():
        return in_memory_spec(entry)
    has_draft = "draft" in entry.weights[kind] and any(draft.glob("*.safetensors"))
    if not has_draft and "draft" in entry.weights[kind] and (path / "draft").is_dir() and draft != path / "draft":
        raise UserError(
            f"model={entry.name} weights={kind}: no draft in {shown(draft)}, but {shown(path / 'draft')} is there; "
            "name that one or make another with initialization/quantize_draft.py"
        )
    shape = entry.shape or read_shape(path)
    return ModelSpec(
        name=entry.name,
        family=entry.family,
        path=str(path),
        draft_path=str(draft) if has_draft else None,
        weights=kind,
        dtype=shape.dtype,
        weights_hash=weights_hash([path, draft] if has_draft else [path]),
        shape=shape,
    )


def weights_hash(folders: list[Path]) -> str:
    """16 hex digits over config.json and the weights. Above 2 GB a file counts by size, first and last MiB,
    and the hash begins with "~"."""
    patterns = ("config.json", "*.safetensors")
    files = [f for folder in folders for pattern in patterns for f in sorted(folder.glob(pattern))]
    whole = sum(f.stat().st_size for f in files) <= WHOLE_HASH_BYTES
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        with file.open("rb") as stream:
            if whole:
                while block := stream.read(SAMPLE_BYTES):
                    digest.update(block)
            else:
                digest.update(stream.read(SAMPLE_BYTES))
                stream.seek(max(0, file.stat().st_size - SAMPLE_BYTES))
                digest.update(stream.read())
    return ("" if whole else "~") + digest.hexdigest()[:16]


def read_shape(path: Path) -> ModelShape:
    """The shape of a checkpoint, from its config.json and the headers of its safetensors files."""
    import torch

    from specter_core.model.config import ModelConfig
    from specter_core.state.kv_cache import KVCache

    config = ModelConfig.from_file(path / "config.json")
    return ModelShape(
        hidden=config.hidden,
        decoder_layers=config.layers,
        moe_layers=len(config.moe_layers),
        experts=config.num_experts,
        top_k=config.top_k,
        expert_width=config.expert_width,
        vocab_size=config.vocab_size,
        shared_params=sum(count for name, count in tensor_sizes(path) if ".experts." not in name),
        kv_bytes_per_token=KVCache.bytes_per_token(config, torch.bfloat16),
        dtype=str(config.dtype).removeprefix("torch."),
        max_positions=config.max_positions,
    )


def tensor_sizes(path: Path) -> Iterator[tuple[str, int]]:
    """(name, number of elements) of every tensor of a checkpoint, from the files' headers alone."""
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb") as stream:
            head = stream.read(8)
            header = stream.read(struct.unpack("<Q", head)[0]) if len(head) == 8 else b""
        try:
            tensors = json.loads(header)
        except ValueError as error:
            raise UserError(f"{file} is truncated or no safetensors file; fetch it again") from error
        for name, tensor in tensors.items():
            if name != "__metadata__":
                count = 1
                for length in tensor["shape"]:
                    count *= length
                yield name, count


def _folder(entry: ModelEntry, kind: str, part: str) -> Path:
    return assets.checkpoint_folder(entry.weights[kind].get(part, ""), entry.download.get("archive"))
