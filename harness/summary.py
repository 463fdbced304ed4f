"""Means per system, and its TPOT over Specter's with a confidence interval over prompts."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pandas as pd

from harness.outliers import flags

stats: Any = importlib.import_module("figures.stats")
per_prompt, ratio = stats.per_prompt, stats.paired_ratio
SETTING = ["model", "weights", "memory", "link", "device", "B", "prefix_len", "new_tokens"]
ELSE = [name for name in SETTING if name != "new_tokens"]
MEANS = {
    "tpot_ms": "tpot_ms",
    "ttft_ms": "ttft_ms",
    "throughput": "throughput",
    "acceptance": "acceptance",
    "tokens_per_window": "tokens_per_window",
    "coverage": "coverage",
    "coverage_ceiling": "coverage_ceiling",
    "distinct_experts": "distinct_experts",
    "access_hit_rate": "access_hit_rate",
    "prefetch_precision": "prefetch_precision",
    "link_utilisation": "link_utilisation",
    "stall_ms": "stall_ms",
}


def summarise(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per (setting, system, variant, K): means over requests with status ok, `ratio` = geometric
    mean over prompts of TPOT(system) / TPOT(Specter) with its interval (above 1: Specter is faster),
    `exact_share` of the rows that have a reference, `outliers` (harness/outliers.py) counted and kept,
    h2d_mb_per_token in MB = 1e6 bytes. Unbudgeted rows (memory "resident") get no ratio. A system that was measured
    with another number of new tokens than Specter is compared with Specter's rows of the same prompts all the same."""
    lines = []
    any_length = {key: base_rows(b) for key, b in rows[rows["status"] == "ok"].groupby(ELSE, dropna=False)}
    for key, block in rows.groupby(SETTING, sort=False, dropna=False):
        ok = block[block["status"] == "ok"]
        specter = per_prompt(base_rows(ok))
        if specter.empty:
            whole = dict(zip(SETTING, key, strict=True))
            specter = per_prompt(any_length.get(tuple(whole[name] for name in ELSE), base_rows(ok)))
        outliers = flags(block)
        for system, variant, depth, group in _lines(block):
            good = group[group["status"] == "ok"]
            line = dict(zip(SETTING, key, strict=True)) | {"system": system, "variant": variant, "K": depth}
            line |= {"M": good["M"].mean(), "n": len(good), "failed": len(group) - len(good)}
            line |= {"outliers": int(outliers[group.index].sum())}
            line |= {name: good[column].mean() for name, column in MEANS.items()}
            line["h2d_mb_per_token"] = (good["h2d_bytes"] / good["new_tokens"]).astype("float64").mean() / 1e6
            line["exact_share"] = good["exact_match"].astype("Float64").mean()
            line |= dict(zip(("ratio", "ratio_low", "ratio_high"), ratio(per_prompt(good), specter), strict=True))
            lines.append(line)
    return pd.DataFrame(lines)


def _lines(block: pd.DataFrame) -> Iterator[tuple[Any, Any, Any, pd.DataFrame]]:
    """Rows by (system, variant, K). A system that chooses K itself has one line, at its mean K: no prompt was
    measured twice."""
    for (system, variant), group in block.groupby(["system", "variant"], sort=False):
        if group.duplicated(["dataset", "prompt_id", "repeat"]).any():
            yield from ((system, variant, depth, part) for depth, part in group.groupby("K", sort=False))
        else:
            yield system, variant, round(group["K"].mean()), group


def base_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Specter's rows, of the variant `default` where there are several."""
    own = rows[rows["system"] == "specter"]
    default = own[own["variant"] == "default"]
    return default if len(default) else own
