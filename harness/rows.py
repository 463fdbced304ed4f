"""Rows of records.csv: what is known before a request runs, and what its record adds."""

from __future__ import annotations

import json
from typing import Any

from harness.cells import Group
from harness.columns import NAMES
from harness.prompts import BenchPrompt
from harness.system import NAN, MemorySpec, ModelSpec, RequestRecord


def known_columns(group: Group, model: ModelSpec, memory: MemorySpec, prompt: BenchPrompt) -> dict[str, Any]:
    """Every column, with those that no measurement is needed for; `new_tokens` are those asked for."""
    return dict.fromkeys(NAMES) | {
        "system": group.system.name,
        "variant": group.system.variant,
        "model": model.name,
        "weights": group.system.weights_as.get(model.weights, model.weights),
        "dtype": model.dtype,
        "encoding": group.system.options.get("encoding"),
        "dataset": prompt.dataset,
        "label": prompt.label,
        "prompt_id": prompt.prompt_id,
        "repeat": group.setting.repeat,
        "B": memory.batch,
        "K": group.depth,
        "budget_bytes": memory.budget_bytes,
        "memory": memory.label,
        "prefix_len": len(prompt.tokens),
        "new_tokens": group.setting.new_tokens,
        "link": memory.link,
        "link_rate_bytes_per_s": memory.link_rate_bytes_per_s,
        "device": memory.device,
    }


def measured_columns(record: RequestRecord, memory: MemorySpec) -> dict[str, Any]:
    """The columns that a system's record fills."""
    peak, budget = record.peak_device_bytes, memory.budget_bytes
    causes = {cause: round(ms, 4) for cause, ms in sorted(record.stall_ms.items())}
    return {
        "variant": record.variant,
        "dtype": record.dtype,
        "encoding": record.encoding,
        "K": record.depth,
        "M": record.slots,
        "new_tokens": len(record.tokens),
        "ttft_ms": record.ttft_ms,
        "tpot_ms": record.tpot_ms,
        "throughput": record.throughput,
        "acceptance": record.acceptance,
        "tokens_per_window": record.tokens_per_window,
        "access_hit_rate": record.access_hit_rate,
        "coverage": record.coverage,
        "coverage_ceiling": record.coverage_ceiling,
        "distinct_experts": record.distinct_experts,
        "prefetch_precision": record.prefetch_precision,
        "prefetch_recall": record.prefetch_recall,
        "h2d_bytes": record.h2d_bytes,
        "h2d_bytes_used": record.h2d_bytes_used,
        "d2h_bytes": record.d2h_bytes,
        "link_utilisation": record.link_utilisation,
        "stall_ms": sum(record.stall_ms.values()) if record.stall_ms else NAN,
        "stall_by_cause": json.dumps(causes) if causes else None,
        "peak_device_bytes": peak,
        "within_budget": None if peak is None or budget is None else peak <= budget,
        "energy_j": record.energy_j,
        "status": "ok",
    }
