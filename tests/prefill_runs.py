"""Runs checks of the prefill on a device in Triton's interpreter, in a process of its own.

python tests/prefill_runs.py kernels all | model FAMILY… | engine FAMILY… | compile FAMILY…: one JSON object on the last
line.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import kernel_process


def run(mode: str, *names: str) -> dict[str, Any]:
    """{name: [[check, value, limit], …]}; "compile": {family: [[kernel, shared bytes, a warp group's product], …]}."""
    return kernel_process.run(__file__, mode, *names)


def kernels(_: str) -> Iterator[Any]:
    import torch

    from scripts.gpu import decode_checks_moe as moe
    from scripts.gpu import nested_checks as nested
    from scripts.gpu import prefill_checks as checks
    from scripts.gpu.decode_checks import Env
    from scripts.gpu.decode_checks_linear import linear_checks
    from specter_core.model.kernels.tiles import LinearTile
    from specter_core.verify.kernels.grouped_ffn import GroupedTile

    env, fp32 = Env.make("cpu", torch.float16, seed=21), Env.make("cpu", torch.float32, seed=22)
    wide, nested_wide = GroupedTile(64, 32, 64), GroupedTile(128, 32, 128)
    yield from checks.mla_prefill_checks(env, 4, 8, 40, 37, 64, (1, 7, 16))
    yield from checks.mla_prefill_checks(env, 3, 16, 24, 70, 128, (33,))
    yield from checks.mla_prefill_checks(fp32, 2, 8, 24, 19, 64, (5,))
    yield from checks.gqa_prefill_checks(env, 4, 2, 24, 70, 128, (1, 33))
    yield from checks.gqa_prefill_checks(env, 3, 3, 32, 9, 64, (4,))
    yield from checks.gqa_prefill_checks(fp32, 2, 1, 16, 21, 64, (5,))
    yield from checks.add_rows_checks(env, 5, 3, 40)
    yield from linear_checks(env, 40, 72, LinearTile(128, 64, 64, warps=8), (3, 130))
    yield from moe.grouped_checks(env, 5, 2, 40, 24, 70, (wide, wide))
    yield from nested.nested_checks(fp32, 3, 2, 128, 128, 9, (nested_wide, nested_wide), (nested_wide, nested_wide))


def models(family: str) -> Iterator[Any]:
    """A prompt through `PrefillPass`, in chunks of several sizes, and through the CPU decoder; no routed experts."""
    import torch

    from specter_core.model.decoder import Decoder
    from specter_core.model.fused_weights import FusedWeights, rope_tables
    from specter_core.model.kernels.rope import RopeTables
    from specter_core.model.prefill_pass import PrefillPass, last_logits
    from specter_core.model.rows import Rows
    from specter_core.state.kv_cache import KVCache
    from tests.plain_model import without_experts
    from tests.tiny_models import tiny_checkpoint

    count = 11
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_checkpoint(
            family, Path(folder), layers=2, hidden=64, experts=4, expert_width=32, heads=2, vocab=64, top_k=2,
            original_positions=8,
        )  # fmt: skip
        decoder = Decoder.load(path, compute_dtype=torch.float32)
    config, weights, tables = decoder.config, FusedWeights.of(decoder), rope_tables(decoder, 64)
    tokens = torch.randint(0, 64, (1, count), generator=torch.Generator().manual_seed(4))

    def cache() -> KVCache:
        return KVCache(config, 2, 64, "cpu", torch.float32)

    def entries(kv: KVCache) -> torch.Tensor:
        return torch.cat([t[1, :count].flatten() for t in (*kv.keys, *kv.values, *kv.latents)])

    kv, rows = cache(), Rows.prefill(1, 0, count, count)
    x, wanted_ids = without_experts(decoder, kv, tokens, rows)
    wanted = decoder.logits(x[-1:]), wanted_ids, entries(kv)

    def device_pass(chunk: int, tables: RopeTables) -> list[torch.Tensor]:
        own = cache()
        scratch = torch.full((PrefillPass.scratch_bytes(config, chunk, torch.float32),), 255, dtype=torch.uint8)
        step = PrefillPass(weights, config, own, tables, 1, count, chunk, scratch)
        step.tokens.copy_(tokens[0])
        step.positions.copy_(torch.arange(count))
        step.valid.fill_(True)
        step.context.fill_(count)
        step.embed()
        ids = []
        for index, layer in enumerate(weights.layers):
            step.attend(index)
            if layer.moe_index is None:
                step.dense(index)
                continue
            step.route(index)
            ids.append(step.ids.clone())
            shared = step.share(index)
            if shared is not None:
                step.x.add_(shared)
        return [last_logits(weights.head, step.x[-1:]), torch.stack(ids), entries(own)]

    whole = device_pass(count, tables)
    for name, found, right in zip(("logits", "ids", "KV"), whole, wanted, strict=True):
        error = float((found != right).sum()) if name == "ids" else float((found - right).norm() / right.norm())
        yield f"{family} {name}", error, 0.0 if name == "ids" else 1e-5
    for chunk in (1, 4):
        wrong = sum(int((a != b).sum()) for a, b in zip(device_pass(chunk, tables), whole, strict=True))
        yield f"{family}: values with other bits in chunks of {chunk}", wrong, 0


def engines(family: str) -> Iterator[Any]:
    """First logits and KV of prompts for both ways: every expert resident, one slot per layer (cold, then warm), other
    chunks, another batch row, row by row; and the CPU engine's logits."""
    import torch
    from host_runtime import HostRuntime
    from torch import Tensor

    from specter_core.assembly import build_engine
    from specter_core.engine import SpecterEngine
    from specter_core.opening import open_model
    from specter_core.options import EngineOptions
    from specter_core.types import Request
    from tests.tiny_models import tiny_checkpoint

    def outcome(engine: SpecterEngine, prompts: Sequence[Request]) -> list[list[Tensor]]:
        """Of each prompt: logits [V] and the KV entries of its row."""
        logits, prefill = [], engine.target.prefill

        def watched(*args: Any) -> Tensor:
            logits.append(prefill(*args).clone())
            return logits[-1]

        engine.target.prefill = watched  # type: ignore[method-assign]
        engine.generate(prompts)
        engine.target.prefill = prefill  # type: ignore[method-assign]
        kv, found = engine.kv, []
        for row, request in enumerate(prompts):
            length = len(request.prompt)
            parts = [t[row, :length].flatten() for t in (*kv.keys, *kv.values, *kv.latents)]
            found.append([logits[row], torch.cat(parts)])
        return found

    def differences(a: list[Tensor], b: list[Tensor]) -> int:
        return sum(int((x != y).sum()) for x, y in zip(a, b, strict=True))

    with tempfile.TemporaryDirectory() as folder:
        path = tiny_checkpoint(
            family, Path(folder), layers=2, hidden=128, experts=4, expert_width=128, heads=2, vocab=64, top_k=2,
            original_positions=32, dtype=torch.float32,
        )  # fmt: skip
        runtime = HostRuntime(Path(folder) / "stub")
        base = EngineOptions(depth=0, context_tokens=128, max_batch=2, prefill_chunk_tokens=64)
        generator = torch.Generator().manual_seed(5)
        requests = [
            Request(f"{n}", tuple(torch.randint(0, 64, (n,), generator=generator).tolist()), 1, ignore_eos=True)
            for n in (9, 66)
        ]
        with open_model(path, rtn_if_missing=True) as model:
            with build_engine(model, base) as engine:
                cpu = [outcome(engine, [r])[0] for r in requests]
            with build_engine(model, base, runtime=runtime) as engine:
                plain = [outcome(engine, [r])[0] for r in requests]
                again = outcome(engine, requests[::-1])[::-1]
            for r, one, two, three in zip(requests, cpu, plain, again, strict=True):
                error = max(float((a - b).norm() / a.norm()) for a, b in zip(one, two, strict=True))
                yield f"{r.request_id} tokens against the CPU engine", error, 1e-4
                yield f"{r.request_id} tokens: other bits with another's row", differences(two, three), 0
            for name, options in (
                ("one slot", replace(base, prefill_chunk_tokens=24)),
                ("row by row", replace(base, verify="tokenwise")),
            ):
                with build_engine(model, options, slots_per_layer=1, runtime=runtime) as engine:
                    for r, right in zip(requests, plain, strict=True):
                        for state in ("cold", "warm")[: 1 if name == "row by row" else 2]:
                            found = outcome(engine, [r])[0]
                            yield f"{name}, {state}: {r.request_id} tokens, other bits", differences(found, right), 0
                        yield f"{name}: nothing missed", int(not sum(engine.prefill_stats.misses)), 0
                    engine.experts.cache.check_integrity()


SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "hidden": 2048, "experts": 64, "top_k": 6, "expert_width": 1408, "heads": 16, "vocab": 102400,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    },
    "qwen2_moe": {"hidden": 2048, "experts": 60, "top_k": 4, "expert_width": 1408, "heads": 16, "vocab": 151936},
    "phimoe": {
        "hidden": 4096, "experts": 16, "top_k": 2, "expert_width": 6400, "heads": 32, "kv_heads": 8, "vocab": 32064,
    },
}  # fmt: skip


def compiled(family: str) -> list[list[Any]]:
    """Every launch of a long prompt at the full-size model's shapes, in bfloat16."""
    import torch

    from scripts.gpu.offline_sm90 import compile_only
    from specter_core.draft.kernels.blocks import BlockMatrix
    from specter_core.memory.payload import ENTRY_ALIGNMENT_BYTES
    from specter_core.model.config import ModelConfig
    from specter_core.model.decoder import Decoder
    from specter_core.model.families import family_named
    from specter_core.model.fused_weights import FusedWeights
    from specter_core.model.kernels.rope import RopeTables
    from specter_core.model.norm import load_norm
    from specter_core.model.ops_cuda import CudaOps
    from specter_core.model.prefill_pass import PrefillPass, last_logits
    from specter_core.nested.layout import NestedLayout
    from specter_core.state.kv_cache import KVCache
    from specter_core.verify.kernels import nested_ffn as nested
    from specter_core.verify.kernels.combine_rows import add_rows
    from specter_core.verify.kernels.group_rows import group_rows
    from specter_core.verify.kernels.grouped_ffn import PREFILL_TILES, grouped_ffn
    from specter_core.verify.kernels.host_io import report_ids
    from tests.tiny_models import tiny_config

    brain, int32, capacity, rows = torch.bfloat16, torch.int32, 4160, 4096

    def empty(*shape: int, dtype: torch.dtype = brain) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    class MetaSource:
        """Tensors of the right shapes without content."""

        dtype, device = brain, torch.device("meta")

        def get(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
            return empty(*shapes[name], dtype=dtype or brain)

        def get_optional(self, name: str, wanted: bool) -> torch.Tensor | None:
            return self.get(name) if wanted else None

        def stack(self, *names: str) -> torch.Tensor:
            return torch.cat([self.get(name) for name in names])

    config = ModelConfig.from_dict(tiny_config(family, layers=2, **SIZES[family]).to_dict())
    shapes, source, ops = family_named(family).expected_tensors(config), MetaSource(), CudaOps()
    layers = family_named(family).build_layers(config, source, ops)  # type: ignore[arg-type]
    head = empty(config.vocab_size, config.hidden)
    norm = load_norm("model.norm", config, source, ops)  # type: ignore[arg-type]
    weights = FusedWeights.of(Decoder(config, head, layers, norm, head, None, ops))
    sides = 2 if config.rope.long_factor else 1
    turns = empty(sides, capacity, config.rope.dim, dtype=torch.float32)
    tables = RopeTables(turns, turns, config.rope.interleaved, 64)
    kv = KVCache(config, 1, capacity, "meta", brain)
    scratch = empty(PrefillPass.scratch_bytes(config, 1024, brain), dtype=torch.uint8)
    step = PrefillPass(weights, config, kv, tables, 0, rows, 1024, scratch)
    experts, top_k, hidden, width = config.num_experts, config.top_k, config.hidden, config.expert_width
    members, counts = empty(experts, capacity, dtype=int32), empty(experts, dtype=int32)
    act, out = empty(rows, top_k, width), empty(rows, top_k, hidden, dtype=torch.float32)
    lists = empty(4, dtype=int32)
    coded = NestedLayout(hidden, width).payload_bytes(1 << 20) + ENTRY_ALIGNMENT_BYTES
    codes = nested.ResidentCodes(*(
        [BlockMatrix(empty(experts, n // 16, i // 128, 256, dtype=int32),
                     empty(experts, n // 16, i // 128, 8, 2, dtype=torch.float16))]
        for n, i in ((2 * width, hidden), (hidden, width))
    ))  # fmt: skip
    with compile_only() as found:
        step.embed()
        for index, layer in enumerate(weights.layers):
            step.attend(index)
            if layer.moe_index is None:
                step.dense(index)
                continue
            step.route(index)
            report_ids(step.ids, empty(step.ids.numel(), dtype=int32), empty(1, dtype=int32))
            group_rows(step.ids, members, counts)
            shared = step.share(index)
            grouped_ffn(step.normed, empty(4, 3 * hidden * width + 128), lists, members, counts, act, out, top_k=top_k,
                        experts=lists, gate_up_tile=PREFILL_TILES[0], down_tile=PREFILL_TILES[1])  # fmt: skip
            nested.nested_ffn(
                step.normed, empty(4, coded, dtype=torch.uint8), codes, empty(1, dtype=int32), lists, members, counts,
                act, out, layout=NestedLayout(hidden, width), top_k=top_k, experts=lists,
                gate_up_tile=nested.PREFILL_TILES[0], down_tile=nested.PREFILL_TILES[1],
            )  # fmt: skip
            add_rows(out, step.weights, step.ids, shared, step.x)
        last_logits(weights.head, step.x[-1:])
    return [[kernel, built.metadata.shared, "wgmma.mma_async" in built.asm["ptx"]] for kernel, built in found]


def main() -> None:
    warnings.filterwarnings("ignore")
    mode, *names = sys.argv[1:]
    made = {"kernels": kernels, "model": models, "engine": engines, "compile": compiled}[mode]
    print(json.dumps({name: [list(row) for row in made(name)] for name in names}))


if __name__ == "__main__":
    main()
