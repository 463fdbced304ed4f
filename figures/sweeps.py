"""Which sweep rows belong to: told by the columns that vary. Every function takes and returns records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pandas as pd

from figures.looks import PAPER_SUFFIX, SUFFIX, usual_variant
from figures.style import MEMORIES, shown

MAIN = "specter"
NESTED, PAPER = MAIN + SUFFIX, MAIN + PAPER_SUFFIX
SPECULATIVE = (MAIN, NESTED, PAPER)
BUDGETS = 3  # memory settings that make a sweep over budgets; the main run has two
FULL_SIZE = ("high", "low")
SIZE = r"[0-9.]+ GB"
BESIDE_BUDGETS = ["model", "link", "device", "B", "prefix_len"]
VARIANTS = 3  # variants of Specter that make an ablation; a main run may hold two


def measured(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with a time, of systems that belong in figures."""
    if rows.empty:
        return rows
    return shown(rows[(rows["status"] == "ok") & rows["tpot_ms"].notna()])


def depth(rows: pd.DataFrame, least: int = 3, system: str = MAIN) -> pd.DataFrame:
    """Specter (system: or NESTED) at so many depths K > 0 or more, everything else equal."""
    rows = measured(rows)
    if rows.empty:
        return rows
    rows = main_variant(rows[(rows["system"] == system) & (rows["K"] > 0)])
    return _varying(rows, "K", least, ["model", "memory", "weights", "link", "device", "B", "prefix_len"])


def batch(rows: pd.DataFrame) -> pd.DataFrame:
    """Systems at two or more batch sizes."""
    rows = main_variant(measured(rows))
    return _varying(rows, "B", 2, ["system", "model", "memory", "weights", "link", "device"])


def prefix(rows: pd.DataFrame) -> pd.DataFrame:
    """Systems at three or more prefix lengths."""
    rows = main_variant(measured(rows))
    return _varying(rows, "prefix_len", 3, ["system", "model", "memory", "weights", "link", "device", "B"])


def memory(rows: pd.DataFrame) -> pd.DataFrame:
    """Systems at three or more budgets, everything else equal; and whatever stands at two or more budgets that are
    named by their size."""
    rows = best_depth(main_variant(measured(rows)))
    if rows.empty:
        return rows
    many = _varying(rows, "budget_bytes", BUDGETS, ["system", "weights", *BESIDE_BUDGETS, "new_tokens"])
    sized = _varying(rows[rows["memory"].str.fullmatch(SIZE)], "budget_bytes", 2, BESIDE_BUDGETS)
    return rows.loc[rows.index.isin(many.index.union(sized.index))]


def over_budgets(swept: pd.DataFrame, compared: pd.DataFrame) -> pd.DataFrame:
    """Rows of memory sweeps and, at the budgets of full-size models, of main runs beside them. Where both hold a system
    at a budget, the main run's count. Column asked_tokens: the new tokens of most rows."""
    compared = compared[compared["memory"].isin(FULL_SIZE)] if len(swept) and len(compared) else compared
    if len(swept) and len(compared):
        keys = ["system", *BESIDE_BUDGETS, "temperature", "budget_bytes"]
        there = set(compared[keys].itertuples(index=False, name=None))
        swept = swept[[key not in there for key in swept[keys].itertuples(index=False, name=None)]]
    blocks = [block for block in (compared, swept) if len(block)]
    if not blocks:
        return pd.DataFrame()
    rows = budgets(pd.concat(blocks, ignore_index=True))
    tokens = rows.groupby([*BESIDE_BUDGETS, "temperature"])["new_tokens"].transform(lambda n: n.mode().max())
    return rows.assign(asked_tokens=tokens.astype(int))


def budgets(rows: pd.DataFrame) -> pd.DataFrame:
    """Models of which any system was measured at two budgets or more, Specter at the best depth of each; where a
    setting is given in slots, its bytes grow with the KV, so with B, with the prefix and with K."""
    return _varying(best_depth(main_variant(measured(rows))), "budget_bytes", 2, BESIDE_BUDGETS)


def ablation(rows: pd.DataFrame) -> pd.DataFrame:
    """Specter in three or more variants; where its default has nested experts, variants with plain ones among them."""
    rows = measured(rows)
    if rows.empty:
        return rows
    rows = rows[rows["system"].isin(SPECULATIVE) & (rows["K"] > 0)]
    rows = rows.assign(system=rows["system"].replace(PAPER, MAIN))
    default = rows["variant"] == usual_variant(MAIN)
    if (default & (rows["system"] != MAIN)).any():
        rows = rows[~default | (rows["system"] != MAIN)].assign(system=MAIN)
    rows = rows[rows["system"] == MAIN]
    return _varying(rows, "variant", VARIANTS, ["model", "memory", "weights", "link", "device", "B"])


PLACE = ["model", "memory", "link", "device", "B", "prefix_len", "temperature"]
SIDE_BY_SIDE = [*PLACE, "new_tokens"]
"""What systems that are compared with each other share."""


def main(rows: pd.DataFrame) -> pd.DataFrame:
    """Two or more systems side by side at one workload: rows that belong to no sweep above."""
    return pooled([rows])


def unswept(rows: pd.DataFrame, single: bool = False) -> pd.DataFrame:
    """Measured rows that belong to no sweep of several systems. The named memory settings are no sweep over budgets.
    single: of systems measured at several batch sizes the rows with B = 1 stay."""
    rows = measured(rows)
    for sweep in (batch, prefix, memory):
        if rows.empty:
            break
        swept = sweep(rows)
        if sweep is memory and len(swept):
            swept = swept[~swept["memory"].isin(MEMORIES)]
        if sweep is batch and single and len(swept):
            swept = swept[swept["B"] > 1]
        rows = rows.drop(swept.index)
    return rows


def pooled(folders: Iterable[pd.DataFrame], single: bool = False) -> pd.DataFrame:
    """The main rows of several folders, of which one may hold a single system; column asked_tokens (`asked`). Where two
    hold the same system in the same setting, the folder that compares most systems there counts. single: of unswept."""
    blocks = []
    for number, rows in enumerate(folders):
        rows = best_depth(main_variant(unswept(rows, single)))
        if len(rows):
            beside = rows.groupby(SIDE_BY_SIDE, dropna=False)["system"].transform("nunique")
            blocks.append(rows.assign(folder=number, beside=beside))
    if not blocks:
        return pd.DataFrame()
    rows = pd.concat(blocks, ignore_index=True).sort_values(
        ["beside", "folder"], ascending=[False, True], kind="stable"
    )
    first = rows.groupby(["system", "weights", *SIDE_BY_SIDE], dropna=False)["folder"].transform("first")
    rows = asked(rows[rows["folder"] == first].drop(columns=["folder", "beside"]).sort_index())
    return _varying(rows, "system", 2, [*PLACE, "asked_tokens"])


def asked(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with asked_tokens, the new tokens of the comparison that they belong to: their own, but of a system that was
    measured with other lengths only than most others (than Specter, of two equal lots), those of the others."""
    side = rows.assign(own=rows["system"] == MAIN).groupby(SIDE_BY_SIDE, dropna=False)
    systems = side["system"].transform("nunique")
    weight = systems + 0.5 * side["own"].transform("any")
    most = rows.assign(weight=weight).groupby(PLACE, dropna=False)["weight"].transform("max")
    common = rows["new_tokens"].where(weight == most)
    common = rows.assign(common=common).groupby(PLACE, dropna=False)["common"].transform("max")
    there = rows.assign(there=rows["new_tokens"] == common)
    there = there.groupby([*PLACE, "system"], dropna=False)["there"].transform("any")
    elsewhere = (most >= 2) & ~there
    return rows.assign(asked_tokens=rows["new_tokens"].where(~elsewhere, common).astype(int))


def one_workload(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows that other sweeps hold of a main run: B = 1, the shortest prefix, and Specter at its best depth."""
    rows = main_variant(measured(rows))
    if rows.empty:
        return rows
    rows = asked(best_depth(rows[(rows["B"] == 1) & (rows["prefix_len"] == rows["prefix_len"].min())]))
    return _varying(rows, "system", 2, [*PLACE, "asked_tokens"])


def best_depth(rows: pd.DataFrame) -> pd.DataFrame:
    """Specter's rows at the K of least mean TPOT in each setting; all rows of the others, which choose K themselves."""
    if rows.empty:
        return rows
    own = rows[rows["system"].isin(SPECULATIVE)]
    keys = ["system", "weights", *SIDE_BY_SIDE]
    mean = own.groupby([*keys, "K"], dropna=False)["tpot_ms"].transform("mean")
    best = own.assign(mean=mean).groupby(keys, dropna=False)["mean"].transform("min")
    return rows.drop(own.index[mean > best])


def of_a_sweep(folder: str) -> bool:
    """Whether a folder of records is named after a sweep: its rows are compared among themselves only."""
    return folder.split("/")[-1].startswith(("depth", "batch", "prefix", "memory", "ablation", "routing", "kernels"))


SWEEPS = {"main": main, "depth": depth, "batch": batch, "prefix": prefix, "memory": memory, "ablation": ablation}


CELL = ["system", "model", "memory", "weights", "link", "device"]


def main_variant(rows: pd.DataFrame) -> pd.DataFrame:
    """One variant per cell: that of conf/system where it is there, else the one with most rows (a system may choose its
    variant per model and memory setting)."""
    if rows.empty:
        return rows
    counts = rows.groupby([*CELL, "variant"], dropna=False).size().rename("rows").reset_index()
    usual = counts["variant"] == counts["system"].map({s: usual_variant(str(s)) for s in counts["system"].unique()})
    ranked = counts.assign(usual=usual).sort_values(["usual", "rows"], ascending=False, kind="stable")
    chosen = ranked.drop_duplicates(CELL)[[*CELL, "variant"]]
    keys = rows[[*CELL, "variant"]].merge(chosen.assign(chosen=True), on=[*CELL, "variant"], how="left")
    return rows[keys["chosen"].notna().to_numpy()]


def _varying(rows: pd.DataFrame, column: str, least: int, fixed: list[str]) -> pd.DataFrame:
    """The rows of those groups in which column takes `least` values or more."""
    if rows.empty:
        return rows
    values = rows.groupby(fixed, dropna=False)[column].transform("nunique")
    return rows[values >= least]


SETTING = ["weights", "link", "device", "temperature", "new_tokens", "prefix_len", "B"]


def settings(rows: pd.DataFrame, free: str | None = None) -> Iterator[tuple[str, pd.DataFrame]]:
    """(suffix for a file name, rows) for each setting: rows of different settings never share a figure. free: the
    sweep's own axis. Rows of systems with dummy weights stand beside those of every other kind, under their name."""
    tokens = "asked_tokens" if "asked_tokens" in rows else "new_tokens"
    columns = [tokens if c == "new_tokens" else c for c in SETTING if c != free]
    dummy = rows[rows["weights"] == "dummy"]
    rest = rows[rows["weights"] != "dummy"]
    if rest.empty:
        rest, dummy = dummy, rest
    varying = [c for c in columns if rest[c].nunique() > 1]
    for key, block in rest.groupby(columns, sort=True):
        same = dummy
        for column, value in zip(columns, key, strict=True):
            if column != "weights":
                same = same[same[column] == value]
        same = same[same["model"].isin(block["model"])]
        suffix = "".join(f"-{_word(c, v)}" for c, v in zip(columns, key, strict=True) if c in varying)
        yield suffix, pd.concat([block, same]) if len(same) else block


def _word(column: str, value: object) -> str:
    name = "new_tokens" if column == "asked_tokens" else column
    return str(value) if column in ("weights", "link", "device") else f"{name}{value}"
