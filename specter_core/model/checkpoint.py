"""Sharded safetensors on disk: what is there, checked before use, read without a second copy.

Tensors are read with preadv straight into their destination, so that file pages never count as resident
memory.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specter_core.errors import UserError

_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
    "I8": torch.int8,
}
_HEADER_LIMIT_BYTES = 100_000_000


class TensorInfo(NamedTuple):
    """Where a tensor lies: shard, byte offset in the file, shape, dtype as safetensors spells it."""

    shard: str
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str


class Checkpoint:
    """Index of the safetensors files of one model folder. `tensor`, `read_into` are thread-safe.

    UserError: no safetensors, a shard missing or truncated, a tensor that the index names but no shard holds.
    """

    def __init__(self, model_dir: str | Path) -> None:
        self.model_dir = Path(model_dir)
        self._files: dict[str, int] = {}
        self._tensors: dict[str, TensorInfo] = {}
        index = self.model_dir / "model.safetensors.index.json"
        if not self.model_dir.is_dir():
            raise UserError(f"{self.model_dir} is not a folder; give a folder in Hugging Face format")
        weight_map = _read_index(index) if index.exists() else None
        if weight_map is not None:
            shards = sorted(set(weight_map.values()))
        else:
            shards = sorted(path.name for path in self.model_dir.glob("*.safetensors"))
        if not shards:
            raise UserError(f"{self.model_dir} holds no *.safetensors files; download or convert the checkpoint")
        missing = [shard for shard in shards if not (self.model_dir / shard).exists()]
        if missing:
            raise UserError(
                f"{missing[0]} is missing in {self.model_dir} ({len(missing)} of {len(shards)} shards are); "
                "download the checkpoint again"
            )
        for shard in shards:
            self._tensors.update(_read_header(self.model_dir / shard))
        for name, shard in (weight_map or {}).items():
            if name not in self._tensors:
                raise UserError(f"{shard} does not hold {name}, though {index.name} says so; download it again")

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def info(self, name: str) -> TensorInfo:
        """UserError when the checkpoint has no such tensor."""
        if name not in self._tensors:
            raise UserError(f"{self.model_dir} has no tensor {name} ({len(self._tensors)} others); download it again")
        return self._tensors[name]

    def dtype(self, name: str) -> torch.dtype:
        """UserError for a dtype that this program cannot read (fp8 and the like)."""
        info = self.info(name)
        if info.dtype not in _DTYPES:
            raise UserError(f"{name} has dtype {info.dtype}, known: {', '.join(_DTYPES)}; convert the checkpoint")
        return _DTYPES[info.dtype]

    def tensor(self, name: str) -> Tensor:
        """The tensor as stored, on the CPU, in memory of its own."""
        info = self.info(name)
        out = torch.empty(info.shape, dtype=self.dtype(name))
        self.read_into(name, out)
        return out

    def read_into(self, name: str, out: Tensor, first_row: int = 0) -> None:
        """Fill the contiguous CPU tensor `out` from the tensor's bytes, beginning at row `first_row` of
        its dim 0.

        Several leading dims may be flattened: `first_row` counts rows of out's width.
        """
        info = self.info(name)
        assert out.is_contiguous() and out.dtype == self.dtype(name)
        skip = first_row * (out.nbytes // max(out.shape[0], 1) if out.dim() else 0)
        assert skip + out.nbytes <= info.nbytes
        view = memoryview(out.reshape(-1).view(torch.uint8).numpy().data)
        descriptor, offset, done = self._file(info.shard), info.offset + skip, 0
        while done < len(view):
            got = os.preadv(descriptor, [view[done:]], offset + done)
            if got == 0:
                raise UserError(f"{info.shard} ended inside {name}; the file changed, download it again")
            done += got

    def require(self, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, str] | None = None) -> None:
        """Every expected tensor is here with its shape, under its own name or the one in `found`; else
        UserError.
        """
        for name, shape in expected.items():
            actual = (found or {}).get(name, name)
            info = self.info(actual)
            if info.shape != shape:
                raise UserError(
                    f"{actual} has shape {list(info.shape)}, config.json implies {list(shape)}; "
                    "config and weights belong to different models"
                )

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _file(self, shard: str) -> int:
        descriptor = self._files.get(shard)
        if descriptor is None:
            opened = os.open(self.model_dir / shard, os.O_RDONLY)
            descriptor = self._files.setdefault(shard, opened)
            if descriptor != opened:
                os.close(opened)
        return descriptor


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(shard) for name, shard in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a safetensors index ({error!r}); download it again") from None


def _read_header(path: Path) -> dict[str, TensorInfo]:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if length == 0 or length > _HEADER_LIMIT_BYTES or 8 + length > size:
            raise UserError(f"{path} is truncated or no safetensors file: {size} bytes; download it again")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
        except ValueError:
            raise UserError(f"{path} has an unreadable header of {length} bytes; download it again") from None
    header.pop("__metadata__", None)
    tensors, end = {}, 0
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        shape = tuple(entry["shape"])
        width = _DTYPES[entry["dtype"]].itemsize if entry["dtype"] in _DTYPES else None
        if width is not None and stop - start != math.prod(shape) * width:
            raise UserError(f"{path}: {name} spans {stop - start} bytes, its shape needs another size; download again")
        tensors[name] = TensorInfo(path.name, 8 + length + start, stop - start, shape, entry["dtype"])
        end = max(end, stop)
    if size < 8 + length + end:
        raise UserError(f"{path} is truncated: {size} bytes, its header needs {8 + length + end}; download it again")
    return tensors
