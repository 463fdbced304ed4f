"""Fits the knobs of synthetic weights: python scripts/calibrate_synthetic.py --model qwen15_moe [--stage router|gains]

router: shares of topic and token in the routers' logits, by a search over Gaussian logits along ring walks (CPU,
minutes), against published consecutive-token reuse and LRU coverage. gains: sizes and votes of the routed experts, by a
pass over the full-size weights per grid point (CUDA: seconds each; --small: a narrow model of the same construction on
the CPU), against acceptance and, for Qwen, agreement of draft and target routers. Prints the best fits and appends all
points to --output (CSV). The chosen values are harness/synthetic/spec.py's KNOBS, put there by hand.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.synthetic import SyntheticSpec, spec_for
from harness.synthetic.measure import behaviour, distinct, token_lru
from harness.synthetic.vocabulary import walk


class Target(NamedTuple):
    """coverage: slots -> hit rate of a per-layer LRU; the first is the consecutive-token reuse. acceptance of the INT4
    draft; sets: share of token-layers with equal top-k of draft and target, None where nothing is published."""

    coverage: Mapping[int, float]
    acceptance: float
    sets: float | None


TARGETS = {
    # arXiv:2505.16056 (reuse, 12 and 24 slots), arXiv:2511.14102 (6, 16 and 32 slots); acceptance: the paper
    "deepseek_v2_lite": Target({6: 0.29, 12: 0.42, 16: 0.51, 24: 0.62, 32: 0.77}, 0.99, None),
    "qwen15_moe": Target({4: 0.19, 8: 0.28, 12: 0.36, 16: 0.43}, 0.966, 0.91),
    "phi35_moe": Target({2: 0.43, 4: 0.63, 6: 0.76, 8: 0.85}, 0.966, None),
}
SMALL = {
    "deepseek_v2_lite": ("small_deepseek_v2", {"experts": 64, "layers": 14}),
    "qwen15_moe": ("small_qwen2_moe", {"experts": 60, "layers": 14}),
    "phi35_moe": ("small_phimoe", {"experts": 16, "layers": 14}),
}
LENGTHS = ((70, 300), (100, 500), (100, 600), (200, 1200))
COMMON = (0.0, 0.05, 0.1, 0.2, 0.25)
SHORT = (0.2, 0.25, 0.3, 0.35, 0.4)
LONG = (0.0, 0.05, 0.1, 0.2)
GAINS = (0.5, 1.0, 2.0)
"""Times the present expert_gain."""
DECAYS = (0.5, 0.65, 0.8, 0.9, 1.0)
COHERENCES = (0.3, 0.6, 0.85)


def router_points(spec: SyntheticSpec, slots: Sequence[int], sequences: int, tokens: int) -> Iterator[dict[str, Any]]:
    """Coverage of every combination of shares, for routers that are Gaussian in common, topic and token parts."""
    config = spec.model_config
    for lengths, common, short, long in itertools.product(LENGTHS, COMMON, SHORT, LONG):
        token = 1 - common - short - long
        if token < 0.15:
            continue
        rng = np.random.default_rng(0)
        ids = []
        for _ in range(sequences):
            place = rng.choice(spec.knobs.steps, tokens).cumsum()
            scores = common**0.5 * rng.standard_normal(config.num_experts)
            scores = scores + token**0.5 * rng.standard_normal((tokens, config.num_experts))
            for share, length in zip((short, long), lengths, strict=True):
                block = (place + rng.integers(0, length)) // length
                liking = rng.standard_normal((int(block[-1]) + 1, config.num_experts))
                scores += share**0.5 * liking[block]
            ids.append(np.argpartition(-scores, config.top_k, axis=1)[:, : config.top_k])
        routed: NDArray[np.int64] = np.stack(ids)[None]  # [1, B, T, k]
        yield {
            "topic_lengths": lengths,
            "router_common": common,
            "router_topics": (short, long),
            **{f"lru_{size}": value for size, value in token_lru(routed, slots).items()},
            "distinct_9": distinct(routed, 9),
            "distinct_17": distinct(routed, 17),
        }


def gain_points(model: str, small: bool, sequences: int, tokens: int, slots: Sequence[int]) -> Iterator[dict[str, Any]]:
    name, sizes = SMALL[model] if small else (model, {})
    shape = {"hidden": 512, "width": 256, "vocab": 12000, "topic_dims": 32, **sizes} if small else {}
    present = spec_for(model).knobs.expert_gain
    for gain, decay, coherence in itertools.product(GAINS, DECAYS, COHERENCES):
        knobs = {"expert_gain": gain * present, "vote_decay": decay, "vote_coherence": coherence}
        spec = spec_for(name, **shape, **knobs)
        device = "cpu" if small else "cuda"
        found = behaviour(spec, device, walk(spec, sequences, tokens), slots=slots, noises=(1.0,))
        yield knobs | {
            "acceptance": found.acceptance,
            "noisy": found.noisy_acceptance[1.0],
            "zeroed_change": found.zeroed_change,
            "sets": found.set_agreement,
            **{f"lru_{size}": value for size, value in found.lru.items()},
        }


def miss(point: Mapping[str, Any], target: Target) -> float:
    """Largest distance from what the target says of this point's quantities."""
    misses = [abs(point[f"lru_{size}"] - wanted) for size, wanted in target.coverage.items()]
    if "acceptance" in point:
        misses = [3 * abs(point["acceptance"] - target.acceptance)]
        misses += [abs(point["sets"] - target.sets)] if target.sets else []
        misses.append(max(0.0, 0.5 - point["zeroed_change"]))
    return max(misses)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=tuple(TARGETS), default="deepseek_v2_lite")
    parser.add_argument("--stage", choices=("router", "gains"), default="router")
    parser.add_argument("--small", action="store_true", help="gains on the CPU with a narrow model")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--points", type=int, help="stop after so many grid points")
    parser.add_argument("--output", type=Path, help="CSV that all points go to")
    options = parser.parse_args(argv)
    target = TARGETS[options.model]
    slots = tuple(target.coverage)
    if options.stage == "gains" and not options.small and not torch.cuda.is_available():
        print("error: 0 CUDA devices are visible, full-size weights need one; use --small", file=sys.stderr)
        return 2
    if options.stage == "router":
        points = router_points(spec_for(options.model), slots, options.sequences, options.tokens)
    else:
        points = gain_points(options.model, options.small, options.sequences, options.tokens, slots)
    found = [point | {"miss": miss(point, target)} for point in itertools.islice(points, options.points)]
    found.sort(key=lambda point: point["miss"])
    for point in found[:8]:
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in point.items()})
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        with options.output.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(found[0]))
            writer.writeheader()
            writer.writerows(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
