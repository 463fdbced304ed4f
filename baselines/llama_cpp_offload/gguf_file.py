"""Writes a planned GGUF file: metadata with the `gguf` package, weights by several threads into the mapped file."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baselines.llama_cpp_offload.gguf_plan import GgufPlan, Target
from specter_core.errors import UserError

PIECE_BYTES = 32 << 20
MAKE = "install it again: pip install gguf"


def write_gguf(path: Path, plan: GgufPlan, tensors: Iterable[tuple[str, Tensor]], threads: int = 1) -> int:
    """Writes the file whole (a temporary name first) and returns its bytes. tensors: (Hugging Face name, tensor on any
    device), each planned one exactly once, in any order. UserError: gguf missing, disk full; ValueError: a tensor that
    is not planned, comes twice, never comes or has another shape."""
    temporary = path.with_suffix(".part")
    offsets, size = _write_header(temporary, plan)
    with temporary.open("r+b") as file:
        try:
            file.truncate(size)
        except OSError as error:
            raise UserError(f"{temporary}: {error.strerror}; {size / 1e9:.1f} GB are needed") from error
        with mmap.mmap(file.fileno(), size) as mapped:
            _Regions(mapped, offsets, plan).fill(tensors, threads)
    temporary.replace(path)
    return size


def _write_header(path: Path, plan: GgufPlan) -> tuple[dict[str, int], int]:
    """Everything but the weights; where each tensor's begin, and the file's size."""
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise UserError(f"llama_cpp: the package gguf is missing; {MAKE}") from error
    writer: Any = gguf.GGUFWriter(path, plan.architecture)
    for key, value in plan.metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    kinds = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
    for name, tensor in plan.tensors.items():
        kind = gguf.GGMLQuantizationType[kinds[tensor.dtype]]
        writer.add_tensor_info(name, tensor.shape, np.dtype(np.uint16), tensor.nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    alignment = int(writer.data_alignment)
    at = _padded(path.stat().st_size, alignment)
    offsets = {}
    for name, tensor in plan.tensors.items():
        offsets[name] = at
        at += _padded(tensor.nbytes, alignment)
    return offsets, at


class _Regions:
    """The weights' places in the mapped file."""

    def __init__(self, mapped: mmap.mmap, offsets: dict[str, int], plan: GgufPlan) -> None:
        self._mapped, self._offsets, self._plan = mapped, offsets, plan
        self._local = threading.local()

    def fill(self, tensors: Iterable[tuple[str, Tensor]], threads: int) -> None:
        for name, constant in self._plan.constants.items():
            self._store(Target(name), constant)
        missing = set(self._plan.targets)
        room = threading.Semaphore(4 * threads)
        with ThreadPoolExecutor(threads) as pool:
            jobs = []
            for name, tensor in tensors:
                if name not in missing:
                    raise ValueError(f"{name} is not planned, or came twice")
                missing.remove(name)
                for target in self._plan.targets[name]:
                    room.acquire()
                    job = pool.submit(self._store, target, tensor)
                    job.add_done_callback(lambda _: room.release())
                    jobs.append(job)
        for job in jobs:
            job.result()
        if missing:
            raise ValueError(f"{len(missing)} tensors did not come, {min(missing)} among them")

    def _store(self, target: Target, tensor: Tensor) -> None:
        planned = self._plan.tensors[target.tensor]
        shape = planned.shape if target.index is None else planned.shape[1:]
        made = tensor if target.change is None else target.change(tensor)
        if made.numel() != torch.Size(shape).numel():
            raise ValueError(f"{target.tensor} is {tuple(made.shape)}, planned as {shape}")
        data = made.to(planned.dtype).contiguous().view(-1).view(torch.uint8)
        at = self._offsets[target.tensor] + (target.index or 0) * data.numel()
        region = torch.frombuffer(self._mapped, dtype=torch.uint8, count=data.numel(), offset=at)
        for begin in range(0, data.numel(), PIECE_BYTES):
            piece = data[begin : begin + PIECE_BYTES]
            if piece.is_cuda:
                stage = self._stage()[: piece.numel()]
                stage.copy_(piece)
                piece = stage
            ctypes.memmove(region.data_ptr() + begin, piece.data_ptr(), piece.numel())

    def _stage(self) -> Tensor:
        """This thread's page-locked buffer."""
        if not hasattr(self._local, "stage"):
            self._local.stage = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
        found: Tensor = self._local.stage
        return found


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
