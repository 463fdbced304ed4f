"""Writes a draft folder layer by layer, so that a stopped job goes on where it was.

While the job runs, OUTPUT.partial holds job.json (what is being made of what), one safetensors file per
finished MoE layer, and the calibration's hidden states behind the last of them. `finish` turns it into
OUTPUT:

    model.safetensors            routed experts only, GPTQ tensors (several shards and an index above 1 GB)
    quantize_config.json         the format, as GPTQ readers expect it
    draft_card.json              how it was made
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from specter_core.draft.draft_store import CARD_NAME
from specter_core.draft.gptq_reader import gptq_tensors
from specter_core.draft.int4 import GROUP, Int4Matrix
from specter_core.errors import UserError

_ONE_FILE_BYTES = 1_000_000_000
_JOB, _HIDDEN = "job.json", "hidden.safetensors"
_PARTS = ("gate_proj", "up_proj", "down_proj")


class DraftWriter:
    """The folder in the making. job says what is made of what; a partial folder of another job is refused."""

    def __init__(self, output: Path, moe_layers: Sequence[int], job: Mapping[str, Any]) -> None:
        self.output = output
        self.partial = output.with_name(output.name + ".partial")
        self.moe_layers = tuple(moe_layers)
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise UserError(f"{output} exists and is not empty: remove it or choose another --output")
        self.partial.mkdir(parents=True, exist_ok=True)
        path = self.partial / _JOB
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8"))
            for key in sorted(set(found) | set(job)):
                if found.get(key) != job.get(key):
                    raise UserError(
                        f"{self.partial} was begun with {key} {found.get(key)!r}, "
                        f"this job has {job.get(key)!r}: repeat the first command, or remove that folder"
                    )
        _write_json(path, job)

    @property
    def done(self) -> int:
        """Number of leading MoE layers whose experts are written."""
        count = 0
        while count < len(self.moe_layers) and self._part(count).is_file():
            count += 1
        return count

    def write_layer(self, layer: int, experts: Sequence[Sequence[Int4Matrix]], note: Mapping[str, str]) -> None:
        """experts[e] = (gate, up, down) of MoE layer `layer`; note is kept for the card."""
        tensors: dict[str, Tensor] = {}
        for expert, matrices in enumerate(experts):
            stem = f"model.layers.{self.moe_layers[layer]}.mlp.experts.{expert}"
            for part, matrix in zip(_PARTS, matrices, strict=True):
                tensors.update(gptq_tensors(f"{stem}.{part}", matrix))
        _write_tensors(self._part(layer), tensors, note)

    def notes(self) -> list[dict[str, str]]:
        """The note of every layer, also of those that an earlier run wrote."""
        found = []
        for layer in range(len(self.moe_layers)):
            with safe_open(self._part(layer), framework="pt") as file:
                found.append(dict(file.metadata()))
        return found

    def save_hidden(self, layer: int, hidden: Tensor) -> None:
        """Hidden states [N, H] behind MoE layer `layer`, whose experts are already written."""
        _write_tensors(self.partial / _HIDDEN, {"layer": torch.tensor(layer), "hidden": hidden.contiguous()})

    def load_hidden(self) -> tuple[int, Tensor] | None:
        """(MoE layer, hidden states behind it), None before the first `save_hidden`."""
        path = self.partial / _HIDDEN
        if not path.is_file():
            return None
        tensors = load_file(path)
        return int(tensors["layer"]), tensors["hidden"]

    def finish(self, card: Mapping[str, Any]) -> None:
        """Makes the complete folder beside the partial one and gives it its name by one rename."""
        complete = self.output.with_name(self.output.name + ".tmp")
        shutil.rmtree(complete, ignore_errors=True)
        complete.mkdir()
        parts = [self._part(layer) for layer in range(len(self.moe_layers))]
        if sum(part.stat().st_size for part in parts) <= _ONE_FILE_BYTES:
            whole: dict[str, Tensor] = {}
            for part in parts:
                whole.update(load_file(part))
            _write_tensors(complete / "model.safetensors", whole)
        else:
            for part in parts:
                (complete / part.name).hardlink_to(part)
            _write_index(complete / "model.safetensors.index.json", parts)
        _write_json(complete / "quantize_config.json", _FORMAT)
        _write_json(complete / CARD_NAME, card)
        if self.output.is_dir():
            self.output.rmdir()
        complete.rename(self.output)
        shutil.rmtree(self.partial)

    def _part(self, layer: int) -> Path:
        return self.partial / f"model-{layer + 1:05d}-of-{len(self.moe_layers):05d}.safetensors"


_FORMAT = {
    "bits": 4,
    "group_size": GROUP,
    "sym": True,
    "desc_act": False,
    "quant_method": "gptq",
    "checkpoint_format": "gptq",
    "pack_dtype": "int32",
    "lm_head": False,
}


def _write_tensors(path: Path, tensors: Mapping[str, Tensor], note: Mapping[str, str] | None = None) -> None:
    temporary = path.with_suffix(".tmp")
    save_file(dict(tensors), temporary, metadata={"format": "pt", **(note or {})})
    temporary.chmod(0o644)  # safetensors leaves it to its owner alone
    temporary.replace(path)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def _write_index(path: Path, parts: Sequence[Path]) -> None:
    names: dict[str, str] = {}
    for part in parts:
        with safe_open(part, framework="pt") as file:
            names.update(dict.fromkeys(file.keys(), part.name))
    total = sum(part.stat().st_size for part in parts)
    _write_json(path, {"metadata": {"total_size": total}, "weight_map": names})
