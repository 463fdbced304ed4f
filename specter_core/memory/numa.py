"""The host memory next to a GPU, on machines with several NUMA nodes. Linux only; elsewhere nothing is placed."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specter_core.errors import UserError

NUMA_NODE = "SPECTER_NUMA_NODE"
SYSFS = Path("/sys")
_MPOL_DEFAULT, _MPOL_PREFERRED = 0, 1
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # system call numbers; libnuma is not needed
_NVIDIA, _DISPLAY = "0x10de", "0x03"


def nodes(sysfs: Path = SYSFS) -> list[int]:
    """Online nodes; [0] where the system does not say."""
    found = _read(sysfs / "devices/system/node/online")
    try:
        parts = [part.split("-") for part in found.split(",") if part]
        return [n for part in parts for n in range(int(part[0]), int(part[-1]) + 1)] or [0]
    except ValueError:
        return [0]


def gpu_nodes(sysfs: Path = SYSFS) -> list[int]:
    """Node of each NVIDIA GPU, in the order of their PCI addresses; -1 where the system does not say."""
    folder = sysfs / "bus/pci/devices"
    devices = sorted(folder.iterdir()) if folder.is_dir() else []
    gpus = [d for d in devices if _read(d / "vendor") == _NVIDIA and _read(d / "class").startswith(_DISPLAY)]
    return [int(_read(d / "numa_node") or -1) for d in gpus]


def chosen_node(wanted: int | None = None, sysfs: Path = SYSFS) -> int | None:
    """Where a store belongs: `wanted`, else what the environment says (the harness's option), else the node of the
    first visible GPU. None: there is one node, or nobody knows. UserError for a node that is not online."""
    online = nodes(sysfs)
    if wanted is None and (text := os.environ.get(NUMA_NODE, "")):
        if not text.isdigit():
            raise UserError(f"{NUMA_NODE} is {text!r}, online are {', '.join(map(str, online))}; choose one of these")
        wanted = int(text)
    if wanted is not None and wanted not in online:
        raise UserError(f"numa_node is {wanted}, online are {', '.join(map(str, online))}; choose one of these")
    if len(online) == 1:
        return None
    if wanted is not None:
        return wanted
    gpus = gpu_nodes(sysfs)
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    index = int(first) if first.isdigit() else 0
    node = gpus[index] if index < len(gpus) else -1
    return node if node in online else None


@contextmanager
def preferred(node: int | None) -> Iterator[bool]:
    """Inside, this thread's new pages come from `node` as long as it has any. Yields whether that is so; None: no
    preference. Pages of a shared file are placed when they are first touched, whoever does it."""
    set_to = node is not None and _set_policy(_MPOL_PREFERRED, node)
    try:
        yield set_to
    finally:
        if set_to:
            _set_policy(_MPOL_DEFAULT, None)


def _set_policy(policy: int, node: int | None) -> bool:
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None or platform.system() != "Linux":
        return False
    words = 1 if node is None else node // 64 + 1
    mask = (ctypes.c_uint64 * words)()
    if node is not None:
        mask[node // 64] = 1 << (node % 64)
    bits = ctypes.c_ulong(0 if node is None else 64 * words + 1)
    done = ctypes.CDLL(None, use_errno=True).syscall(
        ctypes.c_long(number), ctypes.c_int(policy), None if node is None else mask, bits
    )
    return int(done) == 0


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
