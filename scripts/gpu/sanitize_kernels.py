"""Every kernel once, at small odd shapes, to be run under compute-sanitizer: see sanitize.sh.

python -m scripts.gpu.sanitize_kernels [--only PART] [--limit-s S]

Values are checked too. One line per part, one JSON object last; exit code 1 when a check fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.gpu import decode_checks as checks
from scripts.gpu import decode_checks_attention as attention
from scripts.gpu import decode_checks_linear as linear
from scripts.gpu import decode_checks_moe as moe
from scripts.gpu import nested_checks as nested
from scripts.gpu import prefill_checks as prefill
from scripts.gpu.int4_checks import Case, check_case
from specter_core.draft.kernels.block_configs import BlockConfig
from specter_core.model.kernels import elementwise
from specter_core.model.kernels.tiles import GemvTile, LinearTile
from specter_core.verify.kernels.grouped_ffn import GroupedTile

Found = Iterator[checks.Check]


def parts(env: checks.Env) -> dict[str, Callable[[], Found]]:
    """One entry per kernel family."""
    few, many = attention.Sequences((3, 70), 3, (3, 2)), attention.Sequences((500,), 5, (5,))
    tile, wide = GroupedTile(16, 16, 32), GroupedTile(64, 32, 64)
    half = env.dtype
    ragged, split = BlockConfig(4, 4, 1), BlockConfig(2, 16)
    return {
        "grouped": lambda: moe.grouped_checks(env, 5, 2, 40, 24, 6, (tile, tile)),
        "gemv": lambda: linear.gemv_checks(env, 10, 40, 5, GemvTile(4, 64), (1, 3)),
        "mla": lambda: attention.mla_checks(env, 4, 24, 8, 40, 24, few, 192, (1, 2)),
        "gqa": lambda: attention.gqa_checks(env, 4, 2, 24, few, 192),
        "int4, one token": lambda: int4(Case(256, 128, 5, 3, 1, half), ragged),
        "int4, 18 tokens": lambda: int4(Case(128, 384, 5, 4, 18, half), split),
        "router": lambda: moe.router_checks(env, 13, 3, 7),
        "tokens": lambda: moe.token_checks(env, 2100, 40, 3),
        "linear": lambda: linear.linear_checks(env, 40, 72, LinearTile(16, 16, 32), (1, 18)),
        "linear, split": lambda: linear.linear_checks(env, 24, 80, LinearTile(16, 16, 32, split=2), (3,)),
        "head_linear": lambda: linear.head_linear_checks(env, 3, 24, 40, (1, 18)),
        "norm": lambda: linear.norm_checks(env, 40, (1, 5)),
        "elementwise": lambda: elementwise_checks(env),
        "gqa, longrope": lambda: attention.gqa_checks(env, 2, 2, 16, many, 900, switch=503),
        "prefill, mla": lambda: prefill.mla_prefill_checks(env, 4, 8, 40, 37, 64, (7,)),
        "prefill, gqa": lambda: prefill.gqa_prefill_checks(env, 4, 2, 24, 70, 128, (33,)),
        "prefill, sum": lambda: prefill.add_rows_checks(env, 5, 3, 40),
        "rebuild": lambda: nested.rebuild_checks(env, 32, 512),
        "nested": lambda: nested.nested_checks(env._replace(dtype=torch.bfloat16), 3, 2, 256, 128, 5),
        "prefill, grouped": lambda: moe.grouped_checks(env, 5, 2, 40, 24, 70, (wide, wide)),
    }


def int4(case: Case, config: BlockConfig) -> Found:
    for name, value, limit in check_case(case, config, config, device="cuda"):
        yield checks.Check(str(name), float(value), float(limit))


def elementwise_checks(env: checks.Env) -> Found:
    gate, up = env.randn(5, 24), env.randn(5, 24)
    found = elementwise.silu_mul(gate, up, env.poison(5, 24))
    wanted = torch.nn.functional.silu(gate.double()) * up.double()
    yield checks.Check("silu_mul", checks.relative_error(found, wanted), env.tolerance)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="parts whose name starts with this")
    parser.add_argument("--limit-s", type=float, default=1e9, help="start no further part after this long")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here; run this on a machine that has one", file=sys.stderr)
        return 2
    begin, failed, skipped, count = time.perf_counter(), [], [], 0
    env = checks.Env.make("cuda", torch.float16, seed=3)
    for name, run in parts(env).items():
        if not name.startswith(options.only):
            continue
        if time.perf_counter() - begin > options.limit_s:
            skipped.append(name)
            continue
        found = list(run())
        torch.cuda.synchronize()
        count += len(found)
        bad = [f"{name}: {c.name} = {c.value:.3g} > {c.limit:.3g}" for c in found if not c.ok]
        failed += bad
        spent = time.perf_counter() - begin
        print(f"{'FAIL' if bad else 'ok':4s} {name}: {len(found)} checks, {spent:.1f} s", flush=True)
    print(json.dumps({"checks": count, "failed": failed, "skipped": skipped}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
