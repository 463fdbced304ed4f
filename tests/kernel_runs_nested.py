"""Compiles the nested kernels, or interprets them with their assembly emulated, in a process of its own.

python tests/kernel_runs_nested.py emulate GROUP… | compile SHAPE…: one JSON object on the last line.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import kernel_process


def run(mode: str, *groups: str) -> dict[str, Any]:
    """{group: [[check, value, limit], …]} or {shape: [[kernel, shared bytes, uses the matrix unit, k in order], …]}."""
    return kernel_process.run(__file__, mode, *groups)


def compiled(name: str) -> list[list[Any]]:
    """[kernel, shared bytes, uses the matrix unit, k in its natural order] of the nested kernels."""
    import torch

    from scripts.gpu.decode_shapes import SHAPES
    from scripts.gpu.offline_sm90 import compile_only
    from specter_core.draft.kernels.blocks import BlockMatrix
    from specter_core.nested.kernels.decode import decode_rows
    from specter_core.nested.layout import NestedLayout
    from specter_core.verify.kernels.nested_ffn import ResidentCodes, nested_ffn

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    shape = next(s for s in SHAPES if s.name == name)
    hidden, width, experts, k = shape.hidden, shape.width, shape.experts, shape.top_k
    layout, brain = NestedLayout(hidden, width), torch.bfloat16
    gate_up, down = (
        [
            BlockMatrix(
                empty(experts, n // 16, i // 128, 256), empty(experts, n // 16, i // 128, 8, 2, dtype=torch.float16)
            )
        ]
        for n, i in ((2 * width, hidden), (hidden, width))
    )
    entries = empty(4, layout.payload_bytes(1 << 20) + 256, dtype=torch.uint8)
    members, counts, slots = empty(experts, 17), empty(experts), empty(experts)
    x, act = empty(17, hidden, dtype=brain), empty(17, k, width, dtype=brain)
    out = empty(17, k, hidden, dtype=torch.float32)
    with compile_only() as found:
        for listed in (None, slots):
            nested_ffn(x, entries, ResidentCodes(gate_up, down), empty(1), slots, members, counts, act, out,
                       layout=layout, top_k=k, experts=listed)  # fmt: skip
        symbols, tails = empty(hidden, width // 4), empty(1 << 20, dtype=torch.uint8)
        blocks = BlockMatrix(*(t[0] for t in down[0]))
        decode_rows(blocks, symbols, tails, empty(hidden), empty(hidden), empty(hidden, width, dtype=torch.int16))
    return [
        [kernel, built.metadata.shared, "mma.sync" in built.asm["ptx"], "kWidth = 4" not in built.asm["ttgir"]]
        for kernel, built in found
    ]


def emulated(group: str) -> Iterator[Any]:
    """The nested kernels in the interpreter, but with their assembly, by ptx_lanes."""
    import numpy as np
    import ptx_lanes
    import torch
    from triton.runtime import interpreter

    from scripts.gpu import nested_checks as nested
    from scripts.gpu.decode_checks import Env
    from specter_core.nested.kernels import decode
    from specter_core.verify.kernels import nested_ffn
    from specter_core.verify.kernels.grouped_ffn import GroupedTile

    class Results(list[Any]):
        get_result = list.__getitem__

    def load(at: Any) -> Any:
        ones = np.ones(at.shape, bool)
        return interpreter._interpreter.load(
            at.astype(np.uint64), ones, np.zeros(at.shape, np.uint32), np.dtype(np.uint32)
        )

    def inline_asm(self: Any, text: str, constraints: str, values: list[Any], kinds: list[Any], *_: Any) -> Any:
        outputs, shape = constraints.count("="), values[0].data.shape
        unsigned = {2: np.uint16, 4: np.uint32, 8: np.uint64}
        inputs = [v.data.reshape(-1) for v in values]
        inputs = [v if v.dtype == np.float32 else v.view(unsigned[v.itemsize]) for v in inputs]
        found = ptx_lanes.run(text, {f"${outputs + i}": value for i, value in enumerate(inputs)}, load)
        wanted = [(found[f"${i}"], kind.scalar) for i, kind in enumerate(kinds)]
        signed = {16: np.int16, 32: np.int32}
        return Results(
            interpreter.TensorHandle(bits.view(signed[kind.primitive_bitwidth]).reshape(shape), kind)
            for bits, kind in wanted
        )

    interpreter.InterpreterBuilder.create_inline_asm = inline_asm
    decode.uses_assembly = nested_ffn.uses_assembly = lambda tensor: True
    env, fp32 = Env.make("cpu", torch.float16, seed=11), Env.make("cpu", torch.float32, seed=12)
    pairs = (GroupedTile(block_n=32, warps=8), GroupedTile(block_n=32, warps=8))  # a thread has two words
    groups: dict[str, Callable[[], Iterator[Any]]] = {
        "rebuild": lambda: nested.rebuild_checks(env, 32, 512),
        "nested": lambda: nested.nested_checks(env, 3, 2, 256, 128, 5),
        "nested_pairs": lambda: nested.nested_checks(fp32, 3, 1, 128, 128, 3, pairs),
    }
    yield from groups[group]()


def main() -> None:
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    mode, *groups = sys.argv[1:]
    if mode == "compile":
        result: dict[str, Any] = {name: compiled(name) for name in groups}
    else:
        result = {group: [list(check) for check in emulated(group)] for group in groups}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
