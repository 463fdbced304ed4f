"""Host expert store: one segment, many processes, nothing left behind."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from control_plane import filled_store

from specter_core.errors import UserError
from specter_core.memory import host_store
from specter_core.memory.host_store import HostExpertStore
from specter_core.memory.payload import PayloadLayout
from specter_core.types import ExpertKey

LAYOUT = PayloadLayout(16, 8, torch.bfloat16)
ROOT = Path(__file__).resolve().parent.parent


def child(code: str, *arguments: str) -> subprocess.Popen[bytes]:
    """A fresh interpreter running `code`; it inherits nothing but the repository on its path."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


ATTACH_AND_WAIT = """
import pickle, sys
from specter_core.memory.host_store import HostExpertStore
from specter_core.types import ExpertKey
handle = pickle.loads(bytes.fromhex(sys.argv[1]))
store = HostExpertStore.attach(handle)
key = ExpertKey(1, 2)
store.layout.check(store.entry(key), key)
store.layout.verify_crc(store.entry(key))
print("attached", flush=True)
sys.stdin.read()
"""

CREATE_AND_WAIT = """
import sys, torch
from specter_core.memory.host_store import HostExpertStore
from specter_core.memory.payload import PayloadLayout
store = HostExpertStore.create(2, 3, PayloadLayout(16, 8, torch.bfloat16), sys.argv[1])
print(store.handle.path, flush=True)
sys.stdin.read()
"""


def test_every_entry_holds_its_own_expert_and_attachers_see_the_same_bytes(tmp_path):
    store = filled_store(3, 4, LAYOUT, str(tmp_path))
    other = HostExpertStore.attach(pickle.loads(pickle.dumps(store.handle)))
    for layer in range(3):
        for expert in range(4):
            key = ExpertKey(layer, expert)
            LAYOUT.check(other.entry(key), key)
            LAYOUT.verify_crc(other.entry(key))
            assert torch.equal(store.entry(key), other.entry(key))
    assert other.segment.numel() == 3 * 4 * LAYOUT.entry_bytes
    store.entry(ExpertKey(0, 0))[0] ^= 1
    assert torch.equal(store.entry(ExpertKey(0, 0)), other.entry(ExpertKey(0, 0))), "shared, not copied"
    other.close()
    store.unlink()


def test_a_half_filled_store_cannot_be_attached(tmp_path):
    store = HostExpertStore.create(1, 2, LAYOUT, tmp_path)
    with pytest.raises(UserError, match="not filled"):
        HostExpertStore.attach(store.handle)
    assert not store.ready
    store.mark_ready()
    HostExpertStore.attach(store.handle).close()
    store.unlink()


def test_killing_an_attached_process_leaves_the_store_usable(tmp_path):
    store = filled_store(2, 3, LAYOUT, str(tmp_path))
    before = store.segment.clone()
    for _ in range(2):
        worker = child(ATTACH_AND_WAIT, pickle.dumps(store.handle).hex())
        assert worker.stdout is not None and worker.stdout.readline() == b"attached\n"
        worker.send_signal(signal.SIGKILL)
        assert worker.wait() == -signal.SIGKILL
        worker.communicate()
    assert torch.equal(store.segment, before)
    HostExpertStore.attach(store.handle).close()
    store.unlink()
    assert not list(tmp_path.iterdir())


def test_the_next_store_removes_what_a_killed_owner_left(tmp_path, monkeypatch):
    owner = child(CREATE_AND_WAIT, str(tmp_path))
    assert owner.stdout is not None
    left = Path(owner.stdout.readline().decode().strip())
    monkeypatch.setattr(host_store, "_STALE_AFTER_S", -1.0)
    assert host_store.remove_stale(tmp_path) == [], "its owner lives"
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.communicate()
    assert left.exists()
    store = HostExpertStore.create(1, 1, LAYOUT, tmp_path)
    assert not left.exists()
    store.unlink()


def test_an_owner_that_just_exits_leaves_no_segment(tmp_path):
    owner = child(CREATE_AND_WAIT, str(tmp_path))
    owner.communicate(b"")
    assert owner.returncode == 0
    assert not list(tmp_path.iterdir())


def test_views_outlive_close_and_unlink(tmp_path):
    store = filled_store(1, 2, LAYOUT, str(tmp_path))
    entry = store.entry(ExpertKey(0, 1))
    copy = entry.clone()
    store.close()
    store.close()
    store.unlink()
    store.unlink()
    del store
    gc.collect()
    assert torch.equal(entry, copy)
    assert not list(tmp_path.iterdir())


def test_a_store_that_is_gone_or_has_another_shape_is_a_user_error(tmp_path):
    store = filled_store(1, 2, LAYOUT, str(tmp_path))
    other = host_store.StoreHandle(store.handle.path, 1, 3, LAYOUT)
    with pytest.raises(UserError, match=rf"{store.handle.bytes} bytes, expected {other.bytes}"):
        HostExpertStore.attach(other)
    swapped = host_store.StoreHandle(store.handle.path, 2, 1, LAYOUT)
    with pytest.raises(UserError, match="header"):
        HostExpertStore.attach(swapped)
    store.unlink()
    with pytest.raises(UserError, match="gone"):
        HostExpertStore.attach(store.handle)


def test_no_room_is_one_line_with_both_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(host_store, "_free_bytes", lambda folder: 2_000_000_000)
    large = PayloadLayout(4096, 6400, torch.bfloat16)
    with pytest.raises(UserError, match=r"needs 80\.5\d GB.* has 2\.00 GB free") as error:
        HostExpertStore.create(32, 16, large, tmp_path)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_file_system_that_fills_up_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(UserError, match="No space left"):
        HostExpertStore.create(1, 1, LAYOUT, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_store_is_ready_when_it_was_filled_and_gone_when_that_failed(tmp_path):
    with pytest.raises(ZeroDivisionError), HostExpertStore.create(1, 1, LAYOUT, str(tmp_path)).filling():
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    store = HostExpertStore.create(1, 1, LAYOUT, str(tmp_path))
    assert not store.ready
    with store.filling():
        pass
    assert store.ready
    store.discard()
    assert list(tmp_path.iterdir()) == []
