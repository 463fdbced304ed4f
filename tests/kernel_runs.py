"""Runs decode-kernel checks in a process of its own, since Triton decides once whether it interprets or compiles.

python tests/kernel_runs.py interpret GROUP… | compile SHAPE… | compile_rest all | decode FAMILY…: one JSON object on
the last line.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kernel_process

ROOT = Path(__file__).resolve().parents[1]


def run(mode: str, *groups: str) -> dict[str, Any]:
    """{group: [[check, value, limit], …]} or {group: [[kernel, shared bytes, uses the matrix unit], …]}."""
    return kernel_process.run(__file__, mode, *groups)


def interpreted(group: str) -> Iterator[Any]:
    import torch

    from scripts.gpu import decode_checks_attention as attention
    from scripts.gpu import decode_checks_linear as linear
    from scripts.gpu import decode_checks_moe as moe
    from scripts.gpu import draft_fusion_checks as fusion
    from scripts.gpu import nested_checks as nested
    from scripts.gpu.decode_checks import Env
    from scripts.gpu.draft_ends_checks import draft_ends_checks
    from scripts.gpu.int4_checks import Case
    from specter_core.model.kernels.tiles import GemvTile, LinearTile
    from specter_core.verify.kernels.grouped_ffn import GroupedTile

    env = Env.make("cpu", torch.float16, seed=11)
    fp32 = Env.make("cpu", torch.float32, seed=12)
    few, many = attention.Sequences((3, 70), 3, (3, 2)), attention.Sequences((500,), 5, (5,))
    tile = GroupedTile(16, 16, 32)
    groups: dict[str, Callable[[], Iterator[Any]]] = {
        "linear": lambda: linear.linear_checks(env, 40, 72, LinearTile(16, 16, 32), (1, 18)),
        "linear_split": lambda: linear.linear_checks(env, 24, 80, LinearTile(16, 16, 32, split=2), (3,)),
        "linear_fp32": lambda: linear.linear_checks(fp32, 17, 33, LinearTile(32, 16, 32), (2,)),
        "gemv": lambda: linear.gemv_checks(env, 10, 40, 5, GemvTile(4, 64), (1, 3)),
        "gemv_fp32": lambda: linear.gemv_checks(fp32, 9, 32, 3, GemvTile(2, 32), (2,)),
        "norm": lambda: linear.norm_checks(env, 40, (1, 5)),
        "head_linear": lambda: linear.head_linear_checks(env, 3, 24, 40, (1, 18)),
        "gqa": lambda: attention.gqa_checks(env, 4, 2, 24, few, 192),
        "gqa_longrope": lambda: attention.gqa_checks(env, 2, 2, 16, many, 900, switch=503),
        "gqa_interleaved": lambda: attention.gqa_checks(fp32, 2, 1, 16, few, 128, interleaved=True),
        "mla": lambda: attention.mla_checks(env, 4, 24, 8, 40, 24, few, 192, (1, 2, 4)),
        "mla_one_launch": lambda: attention.mla_checks(env, 3, 24, 8, 40, 24, many, 900, (1,), 16),
        "router": lambda: moe.router_checks(env, 13, 3, 7),
        "tokens": lambda: moe.token_checks(env, 2100, 40, 3),
        "routing": lambda: fusion.routing_checks(env, 10, 40, 9, 3, GemvTile(4, 64), 3),
        "gqa_row": lambda: fusion.gqa_row_checks(env, 4, 2, 24, (130, 3, 0, 63), 192),
        "gqa_row_longrope": lambda: fusion.gqa_row_checks(env, 2, 2, 16, (140, 5), 192, 135),
        "shared": lambda: fusion.shared_checks(env, Case(128, 128, 3, 2, 3, env.dtype), 1032),
        "shared_one_row": lambda: fusion.shared_checks(env, Case(128, 128, 2, 1, 1, env.dtype), 256),
        "draft_ends": lambda: draft_ends_checks(env, 5, 8),
        "grouped": lambda: moe.grouped_checks(env, 5, 2, 40, 24, 6, (tile, tile)),
        "grouped_many_rows": lambda: moe.grouped_checks(env, 3, 1, 32, 16, 40, (tile, tile)),
        "rebuild": lambda: nested.rebuild_checks(env, 32, 512),
        "rebuild_long": lambda: nested.rebuild_checks(env, 16, 33 * 128),  # groups share flags
        "nested": lambda: nested.nested_checks(env, 3, 2, 256, 128, 5),
        "nested_fp32": lambda: nested.nested_checks(fp32, 4, 1, 128, 256, 3),
        "grouped_fp32": lambda: moe.grouped_checks(fp32, 4, 4, 24, 40, 3, (tile, tile)),
    }
    yield from groups[group]()


def decoded(family: str) -> list[tuple[str, float, float]]:
    """The same layers on CudaOps and on TorchOps: prefill, then two sequences at once with padding."""
    import tempfile

    import plain_model
    import tiny_models
    import torch

    from specter_core.model.decoder import Decoder
    from specter_core.model.ops_cuda import CudaOps
    from specter_core.model.rows import Rows
    from specter_core.state.kv_cache import KVCache

    with tempfile.TemporaryDirectory() as folder:
        path = tiny_models.tiny_checkpoint(
            family, Path(folder), layers=2, hidden=64, experts=4, expert_width=32, heads=2, vocab=64,
            top_k=2, original_positions=4,
        )  # fmt: skip
        decoders = [Decoder.load(path, compute_dtype=torch.float32, ops=ops) for ops in (None, CudaOps())]
    generator = torch.Generator().manual_seed(3)
    found = []
    prompts = Rows.prefill(0, 0, 5, 5), Rows.prefill(1, 0, 2, 2)
    two = *prompts, Rows.decode([5, 2], 2, [2, 1]), Rows.decode([7, 3], 1, [1, 1])
    plans = [(2, rows) for rows in two] + [(1, prompts[0]), (1, Rows.decode([5], 1, [1]))]
    caches: list[KVCache] = []
    for batch, rows in plans:
        if not caches or caches[0].batch != batch:
            caches = [KVCache(d.config, batch, 64, "cpu", torch.float32) for d in decoders]
        tokens = torch.randint(0, 64, (rows.batch, rows.steps), generator=generator)
        outcomes = []
        for decoder, kv in zip(decoders, caches, strict=True):
            x, ids = plain_model.without_experts(decoder, kv, tokens, rows)
            outcomes.append((decoder.logits(x)[rows.valid.flatten()], ids))
        if all(rows is not prompt for prompt in prompts):
            outcomes += [fused(decoders[0], caches[0], tokens, rows, preset) for preset in ("target", "draft")]
        wanted, wanted_ids = outcomes[0]
        for logits, ids in outcomes[1:]:
            error = float((logits - wanted).norm() / wanted.norm())
            found += [(f"logits T={rows.steps}", error, 1e-5), ("ids", float((ids != wanted_ids).sum()), 0.0)]
    return found


def fused(decoder: Any, kv: Any, tokens: Any, rows: Any, preset: str) -> tuple[Any, Any]:
    """(logits of valid rows, ids) of the fused pass, no routed experts; KV behind the boundaries is rewritten."""
    import torch

    from specter_core.model.fused_pass import FusedPass
    from specter_core.model.fused_weights import FusedWeights, rope_tables
    from specter_core.model.kernels.tiles import Preset

    weights, tables = FusedWeights.of(decoder), rope_tables(decoder, kv.capacity)
    step = FusedPass(weights, decoder.config, kv, tables, rows.steps, rows.last + 1, Preset(preset))
    for buffer, value in (
        (step.tokens, tokens), (step.positions, rows.positions), (step.valid, rows.valid), (step.context, rows.context)
    ):  # fmt: skip
        buffer.copy_(value.flatten())
    step.embed()
    ids = []
    for index, layer in enumerate(weights.layers):
        step.attend(index)
        if layer.moe_index is None:
            step.dense(index)
        else:
            step.route(index)
            ids.append(step.ids.clone())
            step.combine(index)
    step.head()
    step.choose()
    best = step.logits.argmax(dim=1)
    assert torch.equal(step.chosen[step.valid], best[step.valid])
    return step.logits[step.valid], torch.stack(ids)


def compiled(name: str) -> list[list[Any]]:
    import torch

    from scripts.gpu.decode_cases import model_cases
    from scripts.gpu.decode_shapes import SHAPES, Maker
    from scripts.gpu.offline_sm90 import compile_only

    shape = next(s for s in SHAPES if s.name == name)
    with compile_only() as found:
        for case in model_cases(shape, Maker("meta", torch.bfloat16)):
            if case.rows == 1 and not shape.rank:
                continue  # the draft's tiles are those of the first model
            for launch in case.build(1):
                launch()
    return [[kernel, built.metadata.shared, "mma.sync" in built.asm["ptx"]] for kernel, built in found]


def fused_launches(empty: Callable[..., Any]) -> None:
    """What a draft step of one row draws together."""
    import torch

    from specter_core.draft.int4 import Int4Matrix
    from specter_core.draft.kernels.block_path import BlockExpertPath
    from specter_core.model.kernels.gemv import gemv
    from specter_core.model.kernels.gqa_row import gqa_row
    from specter_core.model.kernels.linear import NormWeights
    from specter_core.model.kernels.partials import Partials
    from specter_core.model.kernels.rope import RopeTables, RowTensors
    from specter_core.model.kernels.router import Routing
    from specter_core.model.kernels.shared_down import SharedDown
    from specter_core.model.kernels.tiles import gemv_tile

    def values(*shape: int) -> Any:
        return empty(*shape, dtype=torch.bfloat16)

    def floats(*shape: int) -> Any:
        return empty(*shape, dtype=torch.float32)

    def codes(experts: int, n: int, k: int) -> Int4Matrix:
        scales = empty(experts, n, k // 128, dtype=torch.float16)
        return Int4Matrix(empty(experts, n, k // 2, dtype=torch.uint8), scales)

    counts, valid = empty(64, dtype=torch.int32), empty(1, dtype=torch.bool)
    ids, weights, x, normed = empty(1, 6), floats(1, 6), values(1, 2048), values(1, 2048)
    inner, routing = values(1, 2816), Routing(ids, weights, valid, counts, 64, counters=counts)
    gemv(x, values(5632, 2048), inner, gemv_tile(2816, 2048, pair=True), swiglu=True, router=values(64, 2048),
         norm=NormWeights(values(2048), None, 1e-6, False), logits=floats(1, 64), normed=normed, routing=routing,
         pdl=True)  # fmt: skip
    tables = RopeTables(floats(1, 512, 128), floats(1, 512, 128), False, 1 << 30)
    cache, part = values(1, 513, 16, 128), Partials.allocate(1, 16, 128, 512, "meta")
    rows = RowTensors(ids[:, 0], valid, ids[:, 0], 1)
    gqa_row(values(1, 48 * 128), cache, cache, rows, tables, 0.1, 512, part, counts, values(1, 16, 128), pdl=True)
    layer = (codes(64, 2816, 2048), codes(64, 2048, 1408))
    path = BlockExpertPath.from_layers([layer], 2048, 1408, 6, "meta", pdl=True)
    path.add(0, normed, ids, weights, x, SharedDown(inner, values(2048, 2816), None, x, floats(1, 2048)))


def compiled_rest() -> list[list[Any]]:
    """Kernels that stand between the passes: host and device, windows and steps, the plain path."""
    import torch

    from scripts.gpu.offline_sm90 import compile_only
    from specter_core.draft.kernels.advance import Stopping, advance, begin_window
    from specter_core.memory.payload import PayloadLayout
    from specter_core.model.kernels.elementwise import rope_rows, silu_mul
    from specter_core.model.kernels.norm import softmax_rows
    from specter_core.model.kernels.tokens import Margin, argmax
    from specter_core.verify.kernels.host_io import admit_list, admit_table, load_rows, report_ids

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    layout = PayloadLayout(2048, 1408, torch.bfloat16)
    words, error = empty(40, layout.entry_bytes // 4, dtype=torch.int32), empty(1, dtype=torch.int32)
    rows, valid = empty(17), empty(17, dtype=torch.uint8)
    wide, table = empty(17, 1408, dtype=torch.bfloat16), empty(17, 64, dtype=torch.float32)
    heads = empty(17, 16, 64, dtype=torch.bfloat16)
    with compile_only() as found:
        lead, parts = empty(4, dtype=torch.float32), empty(4 * 50, dtype=torch.float32)
        ends = Stopping(lead, empty(4, dtype=torch.float32), empty(16, 5, dtype=torch.int32), 0.5, 4.0)
        state = *(empty(4) for _ in range(3)), empty(4, dtype=torch.uint8), empty(4), empty(4)
        for stop in (None, ends):
            begin_window(empty(3, 4), *state, stop)
            advance(empty(4), empty(4, 16), *state, stop)
        scores = empty(4, 102400, dtype=torch.float32)
        argmax(scores, empty(4), parts, empty(4 * 50, dtype=torch.int32), Margin(lead, parts))
        load_rows(empty(3, 17), rows, rows, rows, valid)
        report_ids(empty(17, 6), empty(17 * 6, dtype=torch.int32), error)
        admit_table(empty(26, 64, dtype=torch.int32), empty(26, 64, dtype=torch.int32), words, error, layout)
        lists, lines = empty(2, 512, 64, dtype=torch.int32), empty(512, dtype=torch.int32)
        admit_list(lists, lines, empty(3, 64, dtype=torch.int32), error, words, error, 4, layout)
        fused_launches(empty)
        silu_mul(wide, wide, empty(17, 1408, dtype=torch.bfloat16))
        softmax_rows(table, empty(17, 64, dtype=torch.float32))
        for interleaved in (True, False):
            rope_rows(heads, table, table, interleaved, empty(17, 16, 64, dtype=torch.bfloat16))
    return [[kernel, built.metadata.shared, False] for kernel, built in found]


def main() -> None:
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    mode, *groups = sys.argv[1:]
    if mode == "compile":
        result: dict[str, Any] = {name: compiled(name) for name in groups}
    elif mode == "compile_rest":
        result = {"all": compiled_rest()}
    elif mode == "interpret":
        result = {group: [list(check) for check in interpreted(group)] for group in groups}
    else:
        result = {family: decoded(family) for family in groups}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
