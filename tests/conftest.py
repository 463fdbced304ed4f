"""One compute thread per process: the tests' models are too small for more, and the suite runs several at once."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

os.environ.pop("SPECTER_WORK", None)  # an artifact workspace of the user must not disturb the tests

import torch

torch.set_num_threads(1)
