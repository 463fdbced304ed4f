"""Builds and loads copy_worker.c: the part of the link that must not wait for Python's interpreter lock."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from specter_core.errors import UserError

SOURCE = Path(__file__).with_name("copy_worker.c")
_FLAGS = ("-O2", "-std=gnu11", "-shared", "-fPIC", "-pthread")

_POINTER, _INT, _LONG, _DOUBLE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_double
_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "worker_create": (_POINTER, (ctypes.c_char_p, _POINTER, _POINTER, _LONG, _INT, _DOUBLE, _DOUBLE, _INT)),
    "worker_submit": (_LONG, (_POINTER, ctypes.c_uint64, ctypes.c_uint64, _LONG, _INT, _POINTER)),
    "worker_submit_many": (_LONG, (_POINTER, _INT, _POINTER, _POINTER, _POINTER, _LONG, _INT)),
    "worker_promote": (_INT, (_POINTER, _LONG)),
    "worker_cancel": (_INT, (_POINTER, _LONG)),
    "worker_reorder": (None, (_POINTER, _POINTER, _INT)),
    "worker_fence": (_INT, (_POINTER, _LONG, _POINTER)),
    "worker_wait": (_INT, (_POINTER, _LONG)),
    "worker_drain": (_INT, (_POINTER,)),
    "worker_error": (_INT, (_POINTER,)),
    "worker_best_rate": (_DOUBLE, (_POINTER,)),
    "worker_issued": (_INT, (_POINTER, _LONG)),
    "worker_states": (_POINTER, (_POINTER,)),
    "worker_issued_as": (_POINTER, (_POINTER,)),
    "worker_table": (_INT, ()),
    "worker_arrivals": (_POINTER, (_POINTER,)),
    "worker_arrived_ids": (_POINTER, (_POINTER,)),
    "worker_counters": (None, (_POINTER, _POINTER)),
    "worker_take_gaps": (_INT, (_POINTER, _POINTER)),
    "worker_take_intervals": (_INT, (_POINTER, _POINTER)),
    "worker_close": (None, (_POINTER,)),
    "wait_flag": (_INT, (_POINTER, ctypes.c_int32, _LONG)),
}


@functools.cache
def library() -> ctypes.CDLL:
    """copy_worker.c as a shared library, compiled at first use and kept by the hash of its source.

    UserError without a C compiler; Triton needs one on the same machines.
    """
    path = build(SOURCE, _cache_folder())
    loaded = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def build(source: Path, folder: Path) -> Path:
    """The shared library of a C file in `folder`; compiled unless this very source already was."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))), None)
    if compiler is None:
        raise UserError("device 'cuda' needs a C compiler and 0 were found (cc, gcc, clang); install gcc or set CC")
    digest = hashlib.sha256(source.read_bytes() + " ".join(_FLAGS).encode()).hexdigest()[:16]
    target = folder / f"{source.stem}-{digest}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        fresh = target.with_suffix(f".{os.getpid()}.tmp")
        done = subprocess.run(
            [compiler, *_FLAGS, "-o", str(fresh), str(source), "-ldl"], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise UserError(f"{compiler} cannot build {source.name}: {done.stderr.strip().splitlines()[-1:]}; set CC")
        fresh.replace(target)
    return target


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    folder = Path(base) if base else Path.home() / ".cache"
    usable = os.access(folder if folder.exists() else folder.parent, os.W_OK)
    return (folder if usable else Path(tempfile.gettempdir())) / "specter"
