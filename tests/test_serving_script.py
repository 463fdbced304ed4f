"""scripts/gpu/run_serving_baselines.py: the faster placement of every cell is the one that figures see."""

from __future__ import annotations

import csv

from harness.columns import NAMES
from scripts.gpu.run_serving_baselines import report_better


def row(variant: str, tpot_ms: float | None, **more: object) -> dict[str, object]:
    status = "ok" if tpot_ms else "oom"
    return dict.fromkeys(NAMES) | {
        "system": "llama_cpp", "variant": variant, "model": "m", "memory": "high", "B": 1, "tpot_ms": tpot_ms,
        "status": status,
    } | more  # fmt: skip


def reported(tmp_path, rows):
    (tmp_path / "measured").mkdir()
    with (tmp_path / "measured" / "records.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, NAMES)
        writer.writeheader()
        writer.writerows(rows)
    counts = report_better(tmp_path)
    files = [list(csv.DictReader((tmp_path / f"{n}.csv").open())) for n in ("records", "placements")]
    assert counts == (len(files[0]), len(files[1]))
    return files


def test_the_faster_variant_of_a_cell_is_reported_and_all_are_kept(tmp_path):
    best, everything = reported(tmp_path, [
        row("experts", 12.0), row("experts", 14.0), row("layers", 12.5),
        row("experts", 30.0, memory="low"), row("layers", 20.0, memory="low"),
        row("resident", 3.0, system="llama_cpp_resident", memory="resident"),
    ])  # fmt: skip
    assert [(r["memory"], r["variant"], float(r["tpot_ms"])) for r in best] == [
        ("high", "offload", 12.5), ("low", "offload", 20.0), ("resident", "resident", 3.0),
    ]  # fmt: skip
    assert len(everything) == 6 and {r["variant"] for r in everything} == {"experts", "layers", "resident"}


def test_a_variant_that_failed_is_never_the_better_one(tmp_path):
    best, everything = reported(tmp_path, [row("experts", None), row("layers", 50.0)])
    assert [r["tpot_ms"] for r in best] == ["50.0"] and len(everything) == 2
