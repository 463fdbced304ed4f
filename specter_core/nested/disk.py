"""Nested experts on disk, so that a second start reads residuals instead of encoding the checkpoint again.

nested.json         what the files hold and what they were made from
experts.bin         the host store's entries, each with its trailer and CRC-32
codes.safetensors   the draft's codes as nesting left them; its scales are the draft's own
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specter_core.draft.draft_store import DraftExperts
from specter_core.errors import UserError, WrongExpertError
from specter_core.memory.host_store import HostExpertStore
from specter_core.memory.payload import PayloadLayout
from specter_core.types import ExpertKey

VERSION = 2
CARD, EXPERTS, CODES = "nested.json", "experts.bin", "codes.safetensors"
_READ_BYTES = 64 << 20


def source_of(folders: Iterable[Path]) -> str:
    """What tells one checkpoint and draft from another: names, sizes and times of their JSON and safetensors files."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(p for p in folder.iterdir() if p.suffix in (".json", ".safetensors")):
            stat = path.stat()
            digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def save_nested(folder: Path, store: HostExpertStore, draft: DraftExperts, source: str) -> None:
    """Writes the store and the draft's codes to `folder`, in place of what was there; whole or not at all."""
    layout = store.layout
    assert layout.encoding == "nested", layout
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
    fresh.mkdir()
    try:
        with (fresh / EXPERTS).open("wb") as file:
            file.write(store.segment.numpy().data)
        codes = {"gate_up": draft.gate_up.codes, "down": draft.down.codes}
        save_file({name: tensor.cpu().contiguous() for name, tensor in codes.items()}, fresh / CODES)
        (fresh / CARD).write_text(json.dumps(_card(store, source), indent=1) + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def load_nested(
    folder: Path, draft: DraftExperts, source: str, directory: str | os.PathLike[str] | None = None
) -> HostExpertStore | None:
    """A ready store from `folder`, and the codes into `draft`; None where there is none, or one of another checkpoint,
    draft or version. UserError for files that are damaged: every entry's CRC is checked.
    """
    try:
        card: dict[str, Any] = json.loads((folder / CARD).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UserError(f"{folder / CARD} cannot be read ({error}); delete {folder}, it is made anew") from error
    if card.get("version") != VERSION or card.get("source") != source:
        return None
    layout = PayloadLayout(card["hidden"], card["width"], torch.bfloat16, "nested", card["payload_bytes"])
    store = HostExpertStore.create(card["layers"], card["experts"], layout, directory)
    with store.filling():
        _read(folder / EXPERTS, store)
        _check(folder, store)
        codes = load_file(folder / CODES)
        draft.gate_up.codes.copy_(codes["gate_up"])
        draft.down.codes.copy_(codes["down"])
    return store


def _card(store: HostExpertStore, source: str) -> dict[str, int | str]:
    layout = store.layout
    return {
        "version": VERSION, "source": source, "layers": store.layers, "experts": store.experts,
        "hidden": layout.hidden, "width": layout.width, "payload_bytes": layout.payload_bytes,
    }  # fmt: skip


def _read(path: Path, store: HostExpertStore) -> None:
    wanted, found = store.segment.numel(), path.stat().st_size
    if wanted != found:
        raise UserError(f"{path} has {found} bytes, expected {wanted}; delete {path.parent}, it is made anew")
    target = store.segment.numpy().data
    with path.open("rb", buffering=0) as file:
        done = 0
        while done < wanted:
            read = file.readinto(target[done : done + _READ_BYTES])
            if not read:
                raise UserError(f"{path} ended after {done} of {wanted} bytes; delete {path.parent}, it is made anew")
            done += read


def _check(folder: Path, store: HostExpertStore) -> None:
    for layer in range(store.layers):
        for expert in range(store.experts):
            key = ExpertKey(layer, expert)
            try:
                store.layout.check(store.entry(key), key)
                store.layout.verify_crc(store.entry(key))
            except WrongExpertError as error:
                raise UserError(f"{folder / EXPERTS}: {error}; delete {folder}, it is made anew") from error
