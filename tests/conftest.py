"""One compute thread per process: the tests' models are too small for more, and the suite runs several at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

os.environ.pop("SPECTER_WORK", None)  # an artifact workspace of the user must not disturb the tests

import pytest
import torch
from download_server import FileServer, file_server

torch.set_num_threads(1)


@pytest.fixture
def server() -> Iterator[FileServer]:
    """An HTTP server of files that a test puts there."""
    with file_server() as running:
        yield running


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where downloads go."""
    return tmp_path / "downloads"


@pytest.fixture
def fakes_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers import their systems from tests/."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
