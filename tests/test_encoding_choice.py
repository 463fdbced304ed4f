"""`encoding: auto`: nested where it gains, plain elsewhere; what is given explicitly stays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from harness_fixture import SHAPE, plan, raw_config
from records_fixture import row

from figures import sweeps
from figures.looks import split_nested
from harness import catalogue, listing
from harness.cells import config_hash, expand
from harness.config import run_config
from harness.depth_file import choose
from harness.grid import PlannedGroup
from harness.memory import memory_spec
from harness.system import ModelSpec
from scripts.gpu import run_fig14
from specter_core.errors import UserError
from specter_core.options import ENCODING_CHOICES, resolve_encoding

GPU = {"device": "cuda", "dtype": "bfloat16", "with_draft": True, "variant": "default"}
DRAFTED = ModelSpec("tiny", "deepseek_v2", "here", "here/draft", "official", "bfloat16", "cafe", SHAPE)
CONF = catalogue.load("system", "specter")["options"]


def test_auto_is_nested_on_a_gpu_for_bf16_with_a_draft_and_plain_without_any_of_these():
    assert resolve_encoding("auto", **GPU) == "nested"
    for change in ({"device": "cpu"}, {"dtype": "float16"}, {"dtype": "float32"}, {"with_draft": False},
                   {"variant": "paper"}, {"variant": "reference"}):  # fmt: skip
        assert resolve_encoding("auto", **(GPU | change)) == "plain", change


def test_an_explicit_encoding_always_wins_and_an_unknown_one_is_named():
    for change in ({}, {"device": "cpu"}, {"dtype": "float16"}, {"with_draft": False}, {"variant": "paper"}):
        for encoding in ("plain", "nested"):
            assert resolve_encoding(encoding, **(GPU | change)) == encoding
    with pytest.raises(UserError, match="encoding is 'squeezed', known are auto, plain, nested"):
        resolve_encoding("squeezed", **GPU)
    assert {"variant": "default", "encoding": ENCODING_CHOICES[0]} == CONF


def options(
    tmp_path: Path, sweep: str, device: str, *, spec: ModelSpec | None = DRAFTED, **changes: Any
) -> dict[str, dict[str, Any]]:
    """variant -> options of Specter's groups at the model's K, as conf/ has the sweep."""
    config = run_config(
        raw_config(
            tmp_path, {"specter": {"depth": "model", "options": CONF | changes}, "mo_sm": {}},
            variants=catalogue.load("sweep", sweep).get("variants"),
        )
    )  # fmt: skip
    groups = expand(config, device, None, {} if spec is None else {"tiny": spec}).blocks[0]
    own = [g.system for g in groups if g.system.name == "specter"]
    assert len({s.variant for s in own}) == len(own) and len(groups) == len(own) + 1
    assert all(s.options["encoding"] in ("plain", "nested") for s in own)
    return {s.variant: dict(s.options) for s in own}


def encodings(tmp_path: Path, sweep: str, device: str, **changes: Any) -> dict[str, str]:
    return {v: o["encoding"] for v, o in options(tmp_path, sweep, device, **changes).items()}


def test_a_sweep_measures_plain_beside_nested_and_nothing_twice(tmp_path):
    both, alone = {"default": "nested", "plain": "plain"}, {"default": "plain"}
    fp16, no_draft = replace(DRAFTED, dtype="float16"), replace(DRAFTED, draft_path=None)
    for sweep in ("main", "baselines", "depth", "batch", "prefix"):
        assert encodings(tmp_path, sweep, "cuda") == both
        assert encodings(tmp_path, sweep, "cpu") == alone
        assert (
            encodings(tmp_path, sweep, "cuda", spec=fp16) == encodings(tmp_path, sweep, "cuda", spec=no_draft) == alone
        )
        assert encodings(tmp_path, sweep, "cuda", encoding="plain") == alone
        assert encodings(tmp_path, sweep, "cpu", encoding="nested") == {"default": "nested"}
        assert encodings(tmp_path, sweep, "cuda", variant="paper")["paper"] == "plain"
    assert encodings(tmp_path, "memory", "cuda") == both
    for device, changes in (("cpu", {}), ("cuda", {"encoding": "plain"})):
        assert encodings(tmp_path, "memory", device, **changes) == {"default": "plain", "nested": "nested"}


def test_the_ablation_has_every_switch_off_in_the_defaults_encoding_and_the_paper_plain(tmp_path):
    for device, encoding in (("cpu", "plain"), ("cuda", "nested")):
        found = encodings(tmp_path, "ablation", device)
        assert found.pop("paper") == "plain" and found.pop("plain", "plain") == "plain"
        assert len(found) > 8 and set(found.values()) == {encoding}
    assert encodings(tmp_path, "ablation", "cuda", encoding="nested")["paper"] == "plain"


def test_plain_decoding_at_depth_0_keeps_no_draft_for_nested_experts(tmp_path):
    config = run_config(raw_config(tmp_path, {"specter": {"depth": "model", "options": CONF}}, depth=[0, 4]))
    groups = expand(config, "cuda", None, {"tiny": DRAFTED}).blocks[0]
    assert {g.depth: g.nested for g in groups} == {0: False, 4: True}


def test_a_settled_cell_has_the_hash_that_the_same_explicit_cell_has(tmp_path):
    def hashes(device: str, **changes: Any) -> dict[str, str]:
        config = run_config(
            raw_config(
                tmp_path, {"specter": {"depth": "model", "options": CONF | changes}},
                variants={"paper": {"variant": "paper"}} | {name: {"encoding": name} for name in ("plain", "nested")},
            )
        )  # fmt: skip
        groups = expand(config, device, None, {"tiny": DRAFTED}).blocks[0]
        specs = {g.system.variant: (g, memory_spec(g, DRAFTED, device)) for g in groups}
        return {v: config_hash(g, DRAFTED, memory, "builtin", config) for v, (g, memory) in specs.items()}

    assert hashes("cpu") == hashes("cpu", encoding="plain")
    assert set(hashes("cpu")) == {"default", "paper", "nested"}
    gpu, plain = hashes("cuda"), hashes("cuda", encoding="plain")
    assert gpu["default"] == hashes("cuda", encoding="nested")["default"] != plain["default"]
    assert gpu["paper"] == plain["paper"]
    assert len({*gpu.values(), *plain.values()}) == 5  # default twice, plain, nested, paper


def test_the_comparison_leaves_nothing_to_auto(tmp_path):
    for sweep in ("main", "memory"):
        given = ["--ids", "none", "--out", str(tmp_path), "--encoding", "plain,nested", "--sweep", sweep]
        config = run_fig14.compose(run_fig14._parser().parse_args(given), {"model": ["deepseek_v2_lite"]})
        groups = expand(config, "cuda").blocks[0]
        own = {g.system.variant: dict(g.system.options) for g in groups if g.system.name == "specter"}
        assert own == {
            "default": {"variant": "default", "encoding": "plain"},
            "nested": {"variant": "default", "encoding": "nested", "named": "nested"},
        }


def test_rows_and_plan_say_which_encoding_was_chosen(tmp_path):
    from harness.prompts import BenchPrompt
    from harness.rows import known_columns

    config = run_config(raw_config(tmp_path, {"specter": {"depth": "model", "options": CONF}}))
    shown = {}
    for device in ("cpu", "cuda"):
        (group,) = expand(config, device, None, {"tiny": DRAFTED}).blocks[0]
        memory = memory_spec(group, DRAFTED, device)
        prompt = BenchPrompt("builtin", "GK", "p", (1, 2))
        line = listing.memory_line(PlannedGroup(group, DRAFTED, memory, {}, {}))
        shown[device] = (
            known_columns(group, DRAFTED, memory, prompt)["encoding"],
            "nested" in group.name,
            "nested" in line,
        )
    assert shown == {"cpu": ("plain", False, False), "cuda": ("nested", True, True)}
    (planned,) = plan(config).groups
    assert planned.group.system.options == {"variant": "default", "encoding": "plain"}


def test_k_is_chosen_from_the_defaults_rows():
    rows = [row(K=k, tpot_ms=ms, config_hash=f"k{k}") for k, ms in ((4, 2.0), (8, 1.0))]
    rows += [row(K=k, tpot_ms=ms, config_hash=f"p{k}", variant="plain") for k, ms in ((4, 1.0), (8, 90.0))]
    assert [c.depth for c in choose(pd.DataFrame(rows))] == [8]
    assert [c.depth for c in choose(pd.DataFrame(rows[2:]))] == [4]


def test_an_ablation_of_nested_experts_holds_the_plain_variants_too():
    def looked(*variants: tuple[str, str]) -> pd.DataFrame:
        rows = [row(variant=v, encoding=e, config_hash=v + e) for v, e in variants]
        looks = {"system_label": "Specter", "system_colour": "#D55E00", "system_order": 0, "system_figure": True}
        return split_nested(pd.DataFrame(rows).assign(**looks))

    new = looked(("default", "nested"), ("no_prefetch", "nested"), ("paper", "plain"), ("plain", "plain"))
    assert set(sweeps.ablation(new)["variant"]) == {"default", "no_prefetch", "paper", "plain"}
    mixed = pd.concat([new, looked(("default", "plain"))])
    assert (sweeps.ablation(mixed)["variant"] == "default").sum() == 1
    assert sweeps.ablation(looked(("default", "plain"), ("nested", "nested"), ("paper", "plain"))).empty
