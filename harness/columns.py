"""The columns of records.csv, in order, and what each may hold. One row per request."""

from __future__ import annotations

from typing import NamedTuple


class Column(NamedTuple):
    """kind: text | int | float | bool. required: filled in every row, failures included. bounds:
    inclusive."""

    name: str
    kind: str
    required: bool = False
    least: float | None = None
    most: float | None = None


STATUSES = ("ok", "refused", "oom", "timeout", "crashed", "failed", "not_run")

COLUMNS: tuple[Column, ...] = (
    Column("system", "text", True),
    Column("variant", "text", True),
    Column("model", "text", True),
    Column("weights", "text", True),
    Column("dtype", "text", True),
    Column("encoding", "text"),
    Column("dataset", "text", True),
    Column("label", "text", True),
    Column("prompt_id", "text", True),
    Column("repeat", "int", True, 0),
    Column("seed", "int", True, 0),
    Column("temperature", "float", True, 0),
    Column("B", "int", True, 1),
    Column("K", "int", True, 0),
    Column("M", "float", False, 0),
    Column("budget_bytes", "int", False, 0),
    Column("memory", "text", True),
    Column("prefix_len", "int", True, 1),
    Column("new_tokens", "int", True, 0),
    Column("ttft_ms", "float", False, 0),
    Column("tpot_ms", "float", False, 0),
    Column("throughput", "float", False, 0),
    Column("acceptance", "float", False, 0, 1),
    Column("tokens_per_window", "float", False, 0),
    Column("access_hit_rate", "float", False, 0, 1),
    Column("coverage", "float", False, 0, 1),
    Column("coverage_ceiling", "float", False, 0, 1),
    Column("distinct_experts", "float", False, 0),
    Column("prefetch_precision", "float", False, 0, 1),
    Column("prefetch_recall", "float", False, 0, 1),
    Column("h2d_bytes", "int", False, 0),
    Column("h2d_bytes_used", "int", False, 0),
    Column("d2h_bytes", "int", False, 0),
    Column("link_utilisation", "float", False, 0),
    Column("stall_ms", "float", False, 0),
    Column("stall_by_cause", "text"),
    Column("peak_device_bytes", "int", False, 0),
    Column("within_budget", "bool"),
    Column("energy_j", "float", False, 0),
    Column("exact_match", "bool"),
    Column("status", "text", True),
    Column("reason", "text"),
    Column("link", "text", True),
    Column("link_rate_bytes_per_s", "float", False, 0),
    Column("device", "text", True),
    Column("config_hash", "text", True),
    Column("git_commit", "text", True),
)
NAMES = tuple(c.name for c in COLUMNS)
LATER = frozenset({"distinct_experts"})
"""Columns that older files lack: read as empty, and left out of such a file when it is continued."""
KEY = ("config_hash", "prompt_id", "repeat")
