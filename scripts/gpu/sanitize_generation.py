"""A few tokens on the device, for compute-sanitizer: python -m scripts.gpu.sanitize_generation (see sanitize.sh)."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from specter_core.assembly import build_engine
from specter_core.opening import open_model
from specter_core.options import EngineOptions
from specter_core.types import Request


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("reference/deepseek_v2_mini"))
    parser.add_argument("--limit-s", type=float, default=1e9, help="start no further run after this long")
    options = parser.parse_args()
    begin, found = time.perf_counter(), []
    requests = [Request(f"r{i}", tuple(range(5 + i, 12 + 2 * i)), 4, ignore_eos=True) for i in range(2)]
    with open_model(options.model, device="cuda") as model:
        for graphs in (True, False):
            if time.perf_counter() - begin > options.limit_s:
                break
            engine_options = EngineOptions(depth=2, context_tokens=32, max_batch=2, graphs=graphs)
            with build_engine(model, engine_options, slots_per_layer=2) as engine:
                found.append([r.tokens for r in engine.generate(requests).results])
            print(f"ok   graphs {graphs}: {time.perf_counter() - begin:.1f} s", flush=True)
    print(json.dumps({"runs": len(found), "equal": all(f == found[0] for f in found)}))
    return 0 if all(f == found[0] for f in found) else 1


if __name__ == "__main__":
    sys.exit(main())
