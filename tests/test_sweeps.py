"""The sweeps of conf/sweep: what they vary, what they write, and what a user may change."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from harness_fixture import plan, raw_config, run
from records_fixture import LABELS, row

from harness import catalogue, depth_file, sweep_defaults
from harness.cells import DepthKey, expand
from harness.config import run_config
from harness.early_stop import settled, width
from harness.frame import load, typed
from harness.records import cell
from harness.sweep_defaults import with_defaults
from specter_core.errors import UserError

SWEEPS = catalogue.names("sweep")


pytestmark = pytest.mark.usefixtures("fakes_on_the_path")


def depth_rows(**changes):
    times = {2: 30.0, 8: 20.0, 16: 21.0}
    rows = [
        row(K=k, tpot_ms=ms + i, label=label, prompt_id=f"{label}-{i}", acceptance=0.9, config_hash=f"k{k}") | changes
        for k, ms in times.items()
        for label in LABELS
        for i in range(2)
    ]
    return typed([{name: cell(value) for name, value in r.items()} for r in rows])


def test_every_sweep_of_the_paper_is_there_and_says_its_name():
    assert set(SWEEPS) == {
        "ablation", "baselines", "batch", "depth", "kernels", "main", "memory", "prefix", "routing"
    }  # fmt: skip
    for name in SWEEPS:
        assert catalogue.load("sweep", name)["sweep"] == name
        assert catalogue.headline("sweep", name).startswith(f"python run.py sweep={name} ")


def test_the_main_run_takes_along_what_is_installed(monkeypatch):
    here: set[str] = {"llama_cpp", "vllm"}
    monkeypatch.setattr(sweep_defaults, "missing_environment", lambda name, make: None if name in here else make)
    ours = "specter,autoregressive,mo_sm,mo_sc,transformers"
    assert with_defaults([]) == [f"system=[{ours},llama_cpp]"]
    assert with_defaults(["profile=paper"]) == ["profile=paper", f"system=[{ours},vllm,llama_cpp]"]
    assert with_defaults(["system=specter"]) == ["system=specter"]
    here.clear()
    assert with_defaults([]) == []


def test_a_sweep_sets_what_the_command_line_does_not(monkeypatch):
    monkeypatch.setattr(sweep_defaults, "missing_environment", lambda name, make: make)
    arguments = with_defaults(["sweep=depth", "prompts=1"])
    assert arguments[:2] == ["sweep=depth", "prompts=1"]
    assert "repeats=3" in arguments and "system=[specter]" in arguments and "prompts=5" not in arguments
    assert "named_models=true" not in arguments
    paper = with_defaults(["sweep=batch", "profile=paper", "model=qwen15_moe"])
    assert "memory=[high]" in paper and "named_models=true" in paper
    assert not any(a.startswith("model=[") for a in paper)
    assert with_defaults(["prompts=3"]) == ["prompts=3"]


def test_the_depth_sweep_has_the_papers_depths_prompts_and_repeats():
    raw = catalogue.load("sweep", "depth")
    assert raw["depth"] == [2, 4, 6, 8, 12, 16, 20, 24, 32]
    for profile in ("reference", "paper"):
        assert (raw["by_profile"][profile]["prompts"], raw["by_profile"][profile]["repeats"]) == (5, 3)
    batch = catalogue.load("sweep", "batch")
    assert batch["batch"] == [1, 2, 4, 8, 16, 32] and batch["by_profile"]["paper"]["prompts"] >= 32


def test_k_is_chosen_by_mean_tpot_of_the_depths_that_every_prompt_has():
    choice = depth_file.choose(depth_rows())[0]
    assert (choice.depth, choice.deepest, round(choice.expected, 3)) == (8, 16, 9.0)
    assert "K = 8" in choice.line() and "E[A] = a/(1-a) = 9.0" in choice.line() and "K_max = 16" in choice.line()
    last = depth_file.report([choice, choice._replace(acceptance=0.98)])[-1]
    assert last == "mean acceptance of all: a = 0.9400, E[A] = 15.7, within K_max = 16"
    rows = depth_rows()
    assert depth_file.choose(rows[(rows["K"] != 8) | (rows["label"] == "C4")])[0].depth == 16
    assert depth_file.choose(depth_rows(acceptance=1.0))[0].expected == float("inf")


def test_rows_of_other_variants_change_no_k_and_are_reported_beside():
    own = depth_rows()
    paper = own.assign(variant="paper", tpot_ms=own["tpot_ms"] / own["K"] ** 2)  # whose best K is another
    both = pd.concat([own, paper], ignore_index=True)
    assert depth_file.choose(paper)[0].depth == 16
    assert depth_file.choose(both) == depth_file.choose(own) and depth_file.choose(own)[0].depth == 8
    (line,) = depth_file.beside(both)
    assert line.startswith("variant paper, not written: ") and "K = 16" in line
    assert depth_file.beside(own) == depth_file.beside(paper) == []
    neither = both.assign(variant=both["variant"].replace("default", "nested"))
    assert depth_file.choose(neither) == [] and len(depth_file.beside(neither)) == 2


def test_a_chosen_k_serves_runs_beside_it_where_the_setting_is_the_same(tmp_path):
    folder = tmp_path / "depth-run"
    folder.mkdir()
    choice = depth_file.choose(depth_rows())[0]
    own = choice._replace(key=DepthKey("tiny", "reference", "tight", "scaled", "cpu"))
    depth_file.write(folder / "depths.json", [own._replace(depth=3)])
    depth_file.write(folder / "depths.json", [choice, own._replace(key=own.key._replace(memory="wide"))])
    assert [r["K"] for r in json.loads((folder / "depths.json").read_text())] == [3, 8, 8]
    raw = raw_config(tmp_path / "main-run", {"specter": {"depth": "model"}})

    def depths(**changes) -> list[int]:
        config = run_config(raw | changes)
        return [g.depth for g in expand(config, "cpu", depth_file.chosen_depths(config)).blocks[0]]

    assert depths() == [8], "conf/model's, unless the run asks"
    assert depths(depths="beside") == [3]
    assert depths(depths="beside", depth=[5]) == [5]
    assert depths(depths="beside", links={"native": {}}) == [8]
    assert depths(depths=str(folder / "depths.json"), output=str(tmp_path / "a" / "b")) == [3]
    with pytest.raises(UserError, match=r"python run\.py sweep=depth writes one"):
        depths(depths=str(tmp_path / "nothing.json"))
    (folder / "depths.json").write_text("{}")
    assert depths(depths="beside") == [8]
    (folder / "depths.json").write_text("[1]")
    with pytest.raises(UserError, match="no file of chosen depths"):
        depths(depths="beside")


def test_a_depth_run_writes_what_it_chose_and_its_minutes(tmp_path, capfd):
    out = tmp_path / "depth-run"
    raw = raw_config(out, {"specter": {"depth": "model"}}, sweep="depth", depth=[2, 4])
    run(raw)
    assert {r["K"] for r in json.loads((out / "depths.json").read_text())} <= {2, 4}
    assert "mean acceptance a = 0.9000" in capfd.readouterr().err
    before = (out / "timings.csv").read_text()
    assert before.splitlines()[0].startswith("sweep,minutes,model,weights,link,device,git_commit")
    run(raw)
    assert (out / "timings.csv").read_text() == before, "a run that measures nothing takes no time"
    run(raw | {"depth": [2, 4, 6]})
    lines = (out / "timings.csv").read_text().splitlines()
    assert len(lines) == 2 and lines[1].endswith(",12")


def test_every_ablation_is_specter_with_a_variant_of_its_own(tmp_path):
    variants = catalogue.load("sweep", "ablation")["variants"]
    config = run_config(raw_config(tmp_path, {"specter": {"depth": "model"}, "mo_sm": {}}, variants=variants))
    grid = expand(config, "cpu")
    own = [g for g in grid.blocks[0] if g.system.name == "specter"]
    assert {g.system.variant for g in own} == {"default", *variants} - {"no_graphs", "plain"}  # plain is the default
    assert [s.what for s in grid.skips] == ["tiny, tight, specter (no_graphs)"]
    hashes = [h for p in plan(config).groups for h in p.hashes.values()]
    assert len(set(hashes)) == len(hashes)
    cuda = expand(config, "cuda").blocks[0]
    assert "no_graphs" in {g.system.variant for g in cuda}


def test_every_switch_of_the_ablation_is_one_of_the_engines():
    from harness.systems.specter import create

    for name, changes in catalogue.load("sweep", "ablation")["variants"].items():
        options = {k: v for k, v in changes.items() if k != "devices"}
        system = create({"variant": "default", "encoding": "nested", **options, "named": name, "depth": 8})
        assert system._variant == name and system._options.depth == 8
        assert system._options != create({"depth": 8, "encoding": "nested"})._options, name


def test_slots_and_budgets_are_memory_settings_of_their_own(tmp_path):
    config = run_config(raw_config(tmp_path, memories={}, slots=[2, 4], budgets_gb=[0.002]))
    groups = list(plan(config).groups)
    assert [p.memory.label for p in groups] == ["2 slots", "4 slots", "0.002 GB"]
    assert groups[0].memory.budget_bytes < groups[1].memory.budget_bytes
    assert (groups[2].memory.budget_bytes, groups[2].memory.slots_per_layer) == (2_000_000, None)
    for bad in ({"slots": [0]}, {"budgets_gb": ["much"]}, {"budgets_gb": [0]}):
        with pytest.raises(UserError, match=next(iter(bad))):
            run_config(raw_config(tmp_path, **bad))


def repeats(*times: float, **changes):
    rows = [row(repeat=i, tpot_ms=ms * f, prompt_id=p) for i, ms in enumerate(times) for p, f in (("a", 1), ("b", 3))]
    return [{name: cell(value) for name, value in (r | changes).items()} for r in rows]


def test_a_cell_is_settled_by_three_close_repeats_and_by_nothing_less():
    hashes = {"0123456789ab"}
    assert settled(repeats(20.0, 20.1, 19.9), hashes)
    assert not settled(repeats(20.0, 20.1), hashes) and not settled(repeats(20.0, 24.0, 17.0), hashes)
    assert not settled(repeats(20.0, 20.1, 19.9), {"other"})
    assert not settled(repeats(20.0, 20.1, 19.9)[:-1], hashes), "a repeat that is not whole"
    assert not settled([*repeats(20.0, 20.1, 19.9), *repeats(20.0, status="oom", tpot_ms=None)], hashes)
    assert width([20.0, 20.0, 20.0]) == 0


def test_repeats_end_early_when_asked_and_never_in_a_depth_sweep(tmp_path):
    raw = raw_config(tmp_path / "a", repeats=5)
    run(raw | {"stop_early": True})
    assert load(tmp_path / "a/records.csv")["repeat"].max() == 2
    assert run(raw)["rows"] == 4 * 5
    with pytest.raises(UserError, match="stop_early=true with sweep=depth"):
        run_config(raw | {"stop_early": True, "sweep": "depth"})


def test_a_prefix_that_no_document_has_is_skipped_with_the_reason(tmp_path):
    from harness.dataset_source import DatasetSource
    from harness.grid import plan_run

    raw = raw_config(
        tmp_path, prefix_tokens=[16, 2000], models={"qwen2_moe_mini": catalogue.load("model", "qwen2_moe_mini")}
    )
    raw["systems"]["specter"]["module"] = "harness.systems.specter"
    found = plan_run(run_config(raw), DatasetSource(prompts=1, seed=0))
    assert {p.group.setting.prefix_tokens for p in found.groups} == {16}
    [skip] = found.skips
    assert "prefix of 2000 tokens" in skip.what and "0 documents of >= 2000 tokens" in skip.reason
    with pytest.raises(UserError, match="documents of >= 2000 tokens"):
        plan_run(run_config(raw | {"prefix_tokens": [2000]}), DatasetSource(prompts=1, seed=0))


def test_rows_of_a_prefix_sweep_are_no_memory_sweep_though_their_budgets_differ():
    from figures import sweeps

    rows = typed(
        [
            {
                name: cell(value)
                for name, value in row(prefix_len=n, budget_bytes=10**7 + n, config_hash=f"p{n}").items()
            }
            for n in (16, 64, 256)
        ]
    )
    assert sweeps.memory(rows).empty and len(sweeps.prefix(rows)) == 3
    assert len(sweeps.memory(rows.assign(prefix_len=16))) == 3
