"""Nested experts on CUDA: python -m scripts.gpu.bench_nested [--tiles]

Bits per weight and the encoder's time on Gaussian and Student-t weights, the decode kernel against the original bit for
bit, and grouped FFNs of a verification pass, nested against plain: microseconds, bytes read per second, bits of the
results. --tiles times candidate tiles of the nested kernels. Prints the HBM ceiling first; the last line is one JSON
object. Writes nested.csv and nested_aims.csv to $OUT (or outputs/).
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness import aim
from harness.environment import git_commit
from scripts.gpu.bench_decode_kernels import ceiling_tb_per_s, event_us, graph_us
from scripts.gpu.decode_checks import Env
from scripts.gpu.nested_checks import nested_checks, rebuild_checks, round_to_nearest
from specter_core.draft.int4 import Int4Matrix
from specter_core.draft.kernels.blocks import BlockMatrix, repack_to_blocks
from specter_core.memory.payload import ExpertViews, PayloadLayout
from specter_core.nested.expert import batch_of, encode_experts, sanitised_codes
from specter_core.nested.kernels.decode import decode_rows
from specter_core.nested.layout import NestedLayout
from specter_core.verify.kernels.group_rows import group_rows
from specter_core.verify.kernels.grouped_ffn import GroupedTile, grouped_ffn
from specter_core.verify.kernels.nested_ffn import DOWN_TILE, GATE_UP_TILE, ResidentCodes, nested_ffn

ROOT = Path(__file__).resolve().parents[2]


class Shape(NamedTuple):
    name: str
    hidden: int
    width: int
    experts: int
    top_k: int


BITS = "bits per weight, resident code not counted"
REBUILT = "weights that differ"
OTHER_BITS = "nested against plain FFN: results with other bits"
SHAPES = (Shape("deepseek_v2_lite", 2048, 1408, 64, 6), Shape("phi3.5_moe", 4096, 6400, 4, 2))


class Layer(NamedTuple):
    """One layer's experts, plain and nested. plain bfloat16 [E, entry/2], nested uint8 [E, entry]."""

    plain: Tensor
    nested: Tensor
    codes: ResidentCodes
    layout: NestedLayout


class Bench:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.tiles: dict[str, dict[str, int | None]] = {}

    def row(self, shape: str, what: str, value: float, unit: str, note: str = "") -> None:
        self.rows.append({"shape": shape, "what": what, "value": round(value, 4), "unit": unit, "note": note})
        print(f"{shape:18s} {what:58s} {value:10.3f} {unit} {note}", flush=True)


def random_expert(shape: Shape, kind: str, generator: torch.Generator) -> ExpertViews:
    def matrix(rows: int, inputs: int) -> Tensor:
        w = torch.randn(rows, inputs, generator=generator, device="cuda")
        if kind == "student5":
            parts = [torch.randn(rows, inputs, generator=generator, device="cuda").square_() for _ in range(5)]
            w *= (torch.stack(parts).sum(0) / 5).rsqrt_()
        return (w * inputs**-0.5).bfloat16()

    return ExpertViews(
        matrix(shape.width, shape.hidden), matrix(shape.width, shape.hidden), matrix(shape.hidden, shape.width)
    )


def codec(bench: Bench, shape: Shape, kind: str) -> None:
    """Bits, encoder time and the decode kernel for one expert."""
    layout = NestedLayout(shape.hidden, shape.width)
    weights = random_expert(shape, kind, torch.Generator("cuda").manual_seed(3))
    started = round_to_nearest(weights)
    times = []
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        found = sanitised_codes(*batch_of(weights), started)
        size = layout.payload_bytes(found.tails[0])
        payload = encode_experts(*batch_of(weights), found.codes, layout, size)[0]
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    bench.row(shape.name, f"{kind}: {BITS}", 8 * size / layout.weights, "bits",
              f"{found.moved} codes moved")  # fmt: skip
    bench.row(shape.name, f"{kind}: encoder with its own check", times[-1] / (2 * layout.weights) * 1e9, "s per GB")
    wrong = 0
    outs, runs = [], []
    for i, (weight, matrix) in enumerate(zip((torch.cat(weights[:2]), weights.down), found.codes, strict=True)):
        blocks = BlockMatrix(*(t[0] for t in repack_to_blocks(matrix)))
        rows = slice(0, 2 * shape.width) if i == 0 else slice(2 * shape.width, layout.rows)
        split = 2 * shape.width * shape.hidden
        symbols = payload[layout.symbols_at : layout.tails_at].view(torch.int32)
        symbols = symbols[: split // 4] if i == 0 else symbols[split // 4 :]
        starts, flags = (header[rows] for header in payload[: 8 * layout.rows].view(torch.int32).view(2, -1))
        out = torch.zeros(weight.shape, dtype=torch.int16, device="cuda")
        tails = torch.cat([payload, payload.new_zeros(256)])[layout.tails_at :]

        def run(blocks: BlockMatrix = blocks, symbols: Tensor = symbols, starts: Tensor = starts, flags: Tensor = flags,
                out: Tensor = out, tails: Tensor = tails) -> None:  # fmt: skip
            decode_rows(blocks, symbols, tails, starts, flags, out)

        run()
        wrong += int((out != weight.contiguous().view(torch.int16)).sum())
        outs.append(out)
        runs.append(run)
    bench.row(shape.name, f"{kind}: decode kernel, weights that differ", wrong, "", f"of {layout.weights}")
    bench.row(shape.name, f"{kind}: decode kernel", event_us(lambda: [run() for run in runs], 20), "us per expert")


def make_layer(shape: Shape, experts: int) -> Layer:
    layout = NestedLayout(shape.hidden, shape.width)
    generator = torch.Generator("cuda").manual_seed(5)
    weights = [random_expert(shape, "gauss", generator) for _ in range(experts)]
    found = [sanitised_codes(*batch_of(w), round_to_nearest(w)) for w in weights]
    size = layout.payload_bytes(max(f.tails[0] for f in found))
    entry = PayloadLayout(shape.hidden, shape.width, torch.bfloat16, "nested", size).entry_bytes
    nested = torch.zeros(experts, entry, dtype=torch.uint8, device="cuda")
    plain_entry = PayloadLayout(shape.hidden, shape.width, torch.bfloat16).entry_bytes
    plain = torch.zeros(experts, plain_entry // 2, dtype=torch.bfloat16, device="cuda")
    for e, (w, f) in enumerate(zip(weights, found, strict=True)):
        nested[e, :size] = encode_experts(*batch_of(w), f.codes, layout, size)[0]
        plain[e, : layout.weights] = torch.cat([m.flatten() for m in w])

    def stacked(parts: list[Int4Matrix], halves: bool) -> list[BlockMatrix]:
        whole = Int4Matrix(torch.cat([p.codes for p in parts]), torch.cat([p.scales for p in parts]))
        return [repack_to_blocks(whole, halves)]

    codes = ResidentCodes(
        stacked([f.codes.gate_up for f in found], True), stacked([f.codes.down for f in found], False)
    )
    return Layer(plain, nested, codes, layout)


class Case:
    """R rows routed to `distinct` of E experts; inputs of the kernels."""

    def __init__(self, shape: Shape, experts: int, count: int, distinct: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(experts, generator=generator)[:distinct]
        pool = chosen.repeat(-(-count * shape.top_k // distinct))[: count * shape.top_k]
        ids = pool.view(shape.top_k, count).t()  # neighbours in the pool are other experts
        self.ids = ids.sort(dim=1).values.contiguous().cuda()
        self.x = torch.randn(count, shape.hidden, generator=generator).bfloat16().cuda()
        self.members = torch.zeros(experts, count, dtype=torch.int32, device="cuda")
        self.counts = torch.zeros(experts, dtype=torch.int32, device="cuda")
        group_rows(self.ids, self.members, self.counts)
        self.act = torch.zeros(count, shape.top_k, shape.width, dtype=torch.bfloat16, device="cuda")
        self.slots = torch.arange(experts, dtype=torch.int32, device="cuda")
        self.top_k = shape.top_k
        self.distinct = int((self.counts > 0).sum())

    def plain(self, layer: Layer, out: Tensor) -> None:
        grouped_ffn(self.x, layer.plain, self.slots, self.members, self.counts, self.act, out, top_k=self.top_k)

    def nested(self, layer: Layer, out: Tensor, gate_up: GroupedTile, down: GroupedTile) -> None:
        nested_ffn(self.x, layer.nested, layer.codes, layer.codes.layers, self.slots, self.members, self.counts,
                   self.act, out, layout=layer.layout, top_k=self.top_k, gate_up_tile=gate_up,
                   down_tile=down)  # fmt: skip


LOADS = {64: ((1, 6), (9, 28), (17, 56)), 4: ((9, 4),)}
"""Experts of the layer -> (rows, distinct experts) of the passes to time."""


def ffn(bench: Bench, shape: Shape, layer: Layer, tiles: bool) -> None:
    experts = layer.plain.shape[0]
    for count, distinct in LOADS[experts]:
        cases = [Case(shape, experts, count, distinct, seed) for seed in range(6)]
        outs = [torch.full((count, shape.top_k, shape.hidden), float("nan"), device="cuda") for _ in range(2)]
        cases[0].plain(layer, outs[0])
        cases[0].nested(layer, outs[1], GATE_UP_TILE, DOWN_TILE)
        wrong = int((outs[0].view(torch.int32) != outs[1].view(torch.int32)).sum())
        note = f"of {outs[0].numel()}, {count} rows, {cases[0].distinct} experts"
        bench.row(shape.name, OTHER_BITS, wrong, "", note)
        us = graph_us([partial(case.plain, layer, outs[0]) for case in cases])
        ffn_row(bench, shape, "plain", cases[0], us, 2 * layer.layout.weights)
        nested_us(bench, shape, layer, cases, GATE_UP_TILE, DOWN_TILE, "nested")
    if tiles:
        best = sweep(bench, shape, layer, experts)
        for count, distinct in LOADS[experts]:
            cases = [Case(shape, experts, count, distinct, seed) for seed in range(6)]
            nested_us(bench, shape, layer, cases, *best, "nested, best tiles")


def nested_us(
    bench: Bench, shape: Shape, layer: Layer, cases: list[Case], gate_up: GroupedTile, down: GroupedTile, name: str
) -> None:
    out = torch.zeros(cases[0].x.shape[0], shape.top_k, shape.hidden, device="cuda")
    us = graph_us([partial(case.nested, layer, out, gate_up, down) for case in cases])
    ffn_row(bench, shape, name, cases[0], us, layer.nested.shape[1] + layer.layout.weights * 0.516)


def ffn_row(bench: Bench, shape: Shape, name: str, case: Case, us: float, bytes_per_expert: float) -> None:
    what = f"grouped FFN, {name}, {case.x.shape[0]} rows, {case.distinct} experts"
    bench.row(shape.name, what, us, "us", f"{case.distinct * bytes_per_expert / us / 1e6:.2f} TB/s")


GATE_UP_CANDIDATES = ((32, 4, 3, 96), (64, 8, 3, 128), (32, 4, 2, 96))
DOWN_CANDIDATES = ((64, 4, 3, None), (32, 4, 3, 96), (64, 8, 3, 128))
"""Outputs per program, warps, stages, registers: besides the kernels' own tiles."""


def candidates(which: str) -> Iterator[tuple[str, GroupedTile]]:
    for block_n, warps, stages, registers in GATE_UP_CANDIDATES if which == "gate_up" else DOWN_CANDIDATES:
        name = f"N{block_n} W{warps} S{stages} R{registers}"
        yield name, GroupedTile(block_n=block_n, warps=warps, stages=stages, registers=registers)


def sweep(bench: Bench, shape: Shape, layer: Layer, experts: int) -> tuple[GroupedTile, GroupedTile]:
    cases = [Case(shape, experts, 17, 56, seed) for seed in range(4)]
    out = torch.zeros(cases[0].x.shape[0], shape.top_k, shape.hidden, device="cuda")
    own = graph_us([partial(case.nested, layer, out, GATE_UP_TILE, DOWN_TILE) for case in cases])
    best: dict[str, tuple[float, GroupedTile]] = {"gate_up": (own, GATE_UP_TILE), "down": (own, DOWN_TILE)}
    for which in best:
        for name, tile in candidates(which):
            pair = (tile, best["down"][1]) if which == "gate_up" else (best["gate_up"][1], tile)
            try:
                us = graph_us([partial(case.nested, layer, out, *pair) for case in cases])
            except Exception as error:
                print(f"  {which} {name}: {type(error).__name__} {str(error)[:100]}", flush=True)
                continue
            bench.row(shape.name, f"tiles of {which} {name}", us, "us")
            if us < best[which][0]:
                best[which] = (us, tile)
    print(best, flush=True)
    bench.tiles = {which: asdict(tile) for which, (_, tile) in best.items()}
    return best["gate_up"][1], best["down"][1]


def checks(bench: Bench) -> None:
    """Bits, on adversarial weights too, before anything is timed."""
    env = Env.make("cuda", torch.bfloat16, 7)
    for found in (rebuild_checks(env, 2816, 2048), nested_checks(env, 12, 6, 2048, 1408, 17)):
        for check in found:
            bench.row("checks", check.name[:58], check.value, "" if check.ok else "FAILED")


def aims(rows: list[dict[str, Any]], commit: str) -> list[aim.Aim]:
    """Bits per weight of each shape on Gaussian weights; what the kernels rebuild or compute with other bits."""
    found = [
        aim.Aim(f"bits per weight, Gaussian, RTN-MSE codes, slot size, {r['shape']}", r["value"], "bits", "<= 9.6",
                commit, r["note"])
        for r in rows if r["what"] == f"gauss: {BITS}"
    ]  # fmt: skip
    for what, name in ((REBUILT, "weights that nested kernels rebuild differently"),
                       (OTHER_BITS, "results of nested grouped FFNs with other bits than plain")):  # fmt: skip
        counted = [r["value"] for r in rows if what in r["what"]]
        if counted:
            found.append(aim.Aim(name, sum(counted), "", "<= 0", commit, f"in {len(counted)} checks"))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--quick", action="store_true", help="Gaussian weights and the first shape only")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here; run this on a machine that has one", file=sys.stderr)
        return 2
    ceiling = ceiling_tb_per_s()
    print(f"HBM ceiling: copy {ceiling['copy']:.2f}, read {ceiling['read']:.2f} TB/s")
    bench = Bench()
    steps = [
        checks,
        *(partial(codec, shape=SHAPES[0], kind=kind) for kind in ("gauss", "student5")[: 2 - options.quick]),
    ]
    for step in steps:
        try:
            step(bench)
        except Exception:
            traceback.print_exc(limit=-5)
    for shape in SHAPES[: 2 - options.quick]:
        start = time.perf_counter()
        layer = make_layer(shape, shape.experts)
        print(f"  {shape.experts} experts made in {time.perf_counter() - start:.1f} s")
        try:
            ffn(bench, shape, layer, options.tiles and shape is SHAPES[0])
        except Exception:
            traceback.print_exc(limit=-5)
        del layer
        torch.cuda.empty_cache()
    out = Path(os.environ.get("OUT") or ROOT / "outputs")
    out.mkdir(parents=True, exist_ok=True)
    with (out / "nested.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(bench.rows[0]))
        writer.writeheader()
        writer.writerows(bench.rows)
    aim.write(out / "nested_aims.csv", aims(bench.rows, git_commit()))
    (out / "tiles.json").write_text(json.dumps(bench.tiles), encoding="utf-8")
    print(json.dumps({"device": torch.cuda.get_device_name(), "ceiling": ceiling, "rows": bench.rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
