"""All full-precision experts of a model in one host segment that several processes map.

The segment is a file, so any process attaches by path and nothing depends on who created it staying alive.
It lies in /dev/shm where that exists and has room (Linux), else in the temporary folder (macOS, small
containers).

    [0, 4096)                              header: magic, version, ready flag, layers, experts, entry_bytes
    4096 + (layer * E + expert) * entry    one entry (payload.py) per expert
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specter_core.errors import UserError
from specter_core.memory.numa import chosen_node, preferred
from specter_core.memory.payload import PayloadLayout
from specter_core.types import ExpertKey

HEADER_BYTES = 4096
PREFIX = "specter-experts-"

_MAGIC = b"SPXSTORE"
_HEADER = struct.Struct("<8sIIIIQ")  # magic, version, ready, layers, experts, entry_bytes
_VERSION = 1
_STALE_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class StoreHandle:
    """Everything a process needs to attach; picklable."""

    path: str
    layers: int
    experts: int
    layout: PayloadLayout

    @property
    def bytes(self) -> int:
        return HEADER_BYTES + self.layers * self.experts * self.layout.entry_bytes


class HostExpertStore:
    """L x E expert entries in shared host memory.

    `create` makes the segment (owner), fills it through `entry` + `PayloadLayout.write` and calls
    `mark_ready`; `attach` maps a ready one. The owner unlinks on `unlink()`, on garbage collection and at
    exit; if it is killed, the next `create` in the same folder removes what it left (its file lock is free
    then). Workers own nothing: killing one leaves the segment as it was.
    """

    def __init__(self, handle: StoreHandle, fd: int, owner: bool) -> None:
        self.handle = handle
        self.owner = owner
        self._fd = fd
        self._map: mmap.mmap | None = mmap.mmap(fd, handle.bytes, flags=mmap.MAP_SHARED)
        self._bytes: Tensor | None = torch.frombuffer(self._map, dtype=torch.uint8)  # [bytes]
        self._close_fd = weakref.finalize(self, os.close, fd)
        self._unlink = weakref.finalize(self, _unlink_own, handle.path, os.getpid()) if owner else None

    @classmethod
    def create(
        cls,
        layers: int,
        experts: int,
        layout: PayloadLayout,
        directory: str | os.PathLike[str] | None = None,
        *,
        numa_node: int | None = None,
    ) -> HostExpertStore:
        """A new, empty store of layers x experts entries, next to the GPU where there are several NUMA nodes.

        numa_node: that node instead. UserError when no folder has room for it.
        """
        assert layers > 0 and experts > 0, (layers, experts)
        size = HEADER_BYTES + layers * experts * layout.entry_bytes
        candidates = _default_folders() if directory is None else [Path(directory)]
        for folder in candidates:
            remove_stale(folder)
        folder = _folder_with_room(candidates, size)
        path = folder / f"{PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            with preferred(chosen_node(numa_node)):
                _reserve(fd, size, folder)
            os.pwrite(fd, _HEADER.pack(_MAGIC, _VERSION, 0, layers, experts, layout.entry_bytes), 0)
            return cls(StoreHandle(str(path), layers, experts, layout), fd, owner=True)
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise

    @classmethod
    def attach(cls, handle: StoreHandle) -> HostExpertStore:
        """Map an existing, ready store. UserError when it is gone, has another shape or is not filled."""
        try:
            fd = os.open(handle.path, os.O_RDWR)
        except FileNotFoundError:
            raise UserError(f"host expert store {handle.path} is gone; start the process that owns it again") from None
        try:
            size = os.fstat(fd).st_size
            if size != handle.bytes:
                raise UserError(
                    f"host expert store {handle.path} has {size} bytes, expected {handle.bytes}; recreate it"
                )
            header = _HEADER.unpack(os.pread(fd, _HEADER.size, 0))
            wanted = (_MAGIC, _VERSION, 1, handle.layers, handle.experts, handle.layout.entry_bytes)
            if header[2] != 1:
                raise UserError(f"host expert store {handle.path} is not filled yet; attach once its owner is ready")
            if header != wanted:
                raise UserError(
                    f"host expert store {handle.path} has header {header}, expected {wanted}; create it again"
                )
            return cls(handle, fd, owner=False)
        except BaseException:
            os.close(fd)
            raise

    @property
    def layers(self) -> int:
        return self.handle.layers

    @property
    def experts(self) -> int:
        return self.handle.experts

    @property
    def layout(self) -> PayloadLayout:
        return self.handle.layout

    @property
    def ready(self) -> bool:
        return bool(_HEADER.unpack(os.pread(self._fd, _HEADER.size, 0))[2])

    @property
    def segment(self) -> Tensor:
        """uint8 [layers * experts * entry_bytes]: the entries as one range, to register with a device."""
        assert self._bytes is not None, "store is closed"
        return self._bytes[HEADER_BYTES:]

    def entry(self, key: ExpertKey) -> Tensor:
        """uint8 [entry_bytes] of one expert; a view, no copy."""
        assert 0 <= key.layer < self.layers and 0 <= key.expert < self.experts, key
        size = self.layout.entry_bytes
        start = (key.layer * self.experts + key.expert) * size
        return self.segment[start : start + size]

    def mark_ready(self) -> None:
        """Let others attach: every entry is written."""
        assert self.owner, "only the owner fills a store"
        fields = (_MAGIC, _VERSION, 1, self.layers, self.experts, self.layout.entry_bytes)
        os.pwrite(self._fd, _HEADER.pack(*fields), 0)

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Inside, the owner writes every entry: ready afterwards, gone when that fails."""
        try:
            yield
        except BaseException:
            self.discard()
            raise
        self.mark_ready()

    def discard(self) -> None:
        """Unmap; the owner also removes the segment. Idempotent."""
        self.close()
        if self.owner:
            self.unlink()

    def close(self) -> None:
        """Unmap, once no view of an entry is left. Idempotent; the segment itself stays until
        `unlink`.
        """
        self._bytes = None
        self._map = None  # tensors that view the map keep it alive; closing it under them would be a segfault
        if self._unlink is None:
            self._close_fd()

    def unlink(self) -> None:
        """Remove the segment's name (owner only); processes that mapped it keep their view. Idempotent."""
        assert self._unlink is not None, "only the owner unlinks a store"
        self._unlink()
        if self._map is None:
            self._close_fd()


def remove_stale(folder: Path) -> list[Path]:
    """Remove segments in `folder` whose owner died: their lock is free and they are older than a minute."""
    removed = []
    for path in folder.glob(f"{PREFIX}*"):
        try:
            fd = os.open(path, os.O_RDWR)
        except OSError:
            continue  # gone meanwhile, or another user's
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(fd).st_ctime > _STALE_AFTER_S:
                path.unlink(missing_ok=True)
                removed.append(path)
        except BlockingIOError:
            pass  # its owner lives
        finally:
            os.close(fd)
    return removed


def _unlink_own(path: str, pid: int) -> None:
    if os.getpid() == pid:  # a forked child is not the owner
        Path(path).unlink(missing_ok=True)


def _default_folders() -> list[Path]:
    shm = Path("/dev/shm")
    usable = [shm] if shm.is_dir() and os.access(shm, os.W_OK) else []
    return [*usable, Path(tempfile.gettempdir())]


def _free_bytes(folder: Path) -> int:
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize


def _folder_with_room(candidates: list[Path], size: int) -> Path:
    for folder in candidates:
        if _free_bytes(folder) >= size:
            return folder
    room = ", ".join(f"{folder} has {_free_bytes(folder) / 1e9:.2f} GB" for folder in candidates)
    raise UserError(
        f"host expert store needs {size / 1e9:.2f} GB, {room} free; free space there or name another folder"
    )


def _reserve(fd: int, size: int, folder: Path) -> None:
    """Make the pages exist now, so that a full file system is an error here and not a SIGBUS later."""
    os.ftruncate(fd, size)
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        free = _free_bytes(folder)
        raise UserError(
            f"host expert store needs {size / 1e9:.2f} GB, {folder} has {free / 1e9:.2f} GB free "
            f"({error.strerror}); free space there or name another folder"
        ) from None
