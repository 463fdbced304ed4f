"""Switches on the CUDA engine's parts with interpreted kernels: one JSON line of Checker's rows.

TRITON_INTERPRET=1 python tests/interpreted_switches.py FAMILY FOLDER CASE…
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from scripts.gpu import check_switches
from specter_core import assembly
from specter_core.cuda_parts import CudaParts
from specter_core.opening import LoadedModel, open_model
from specter_core.options import EngineOptions
from specter_core.trace import Trace
from tests.host_runtime import HostRuntime
from tests.tiny_models import interpreter_checkpoint

NEW_TOKENS = 3


def main(family: str, folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    path = interpreter_checkpoint(family, folder)
    runtime = HostRuntime(folder / "stub")

    def parts(model: LoadedModel, options: EngineOptions, trace: Trace, _: Any) -> CudaParts:
        return CudaParts(model, options, trace, runtime)

    assembly._parts = parts  # type: ignore[assignment]
    with open_model(path, rtn_if_missing=True) as model:
        checker = check_switches.Checker(model, [range(5, 8), range(6, 10)], NEW_TOKENS)
        for case in check_switches.switches(2, 2):
            if f"{case.name}, B {case.batch}" in names:
                checker.switch(case)
    print(json.dumps(checker.rows))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
