"""conf/ is complete and consistent: every file composes, and the numbers are the published ones."""

from __future__ import annotations

import pytest
from harness_fixture import raw_config

from harness import catalogue
from harness.config import model_entry, run_config, system_entry
from harness.entries import MemoryEntry
from harness.footprint import draft_bytes, entry_bytes, parts, slots_budget_bytes, slots_in
from harness.weights import absent, tensor_sizes, weights_hash
from specter_core.errors import UserError

FULL = ("deepseek_v2_lite", "qwen15_moe", "phi35_moe")


@pytest.mark.parametrize("name", catalogue.names("model"))
def test_every_model_has_a_depth_and_its_default_weights(name):
    entry = model_entry(name, catalogue.load("model", name))
    assert entry.default_weights in entry.weights
    if name in FULL:
        assert set(entry.budgets_bytes) == {"high", "low"} and {"official", "synthetic"} <= set(entry.weights)
    else:
        assert entry.weights["reference"]["draft"] == f"reference/{name}/draft"


def test_depths_of_the_full_models_are_the_papers():
    assert [catalogue.load("model", name)["depth"] for name in FULL] == [16, 8, 16]


@pytest.mark.parametrize(
    ("name", "total_bytes", "expert_bytes", "all_int4_gib"),
    [
        ("deepseek_v2_lite", 31_412_968_448, 17_301_504, 6.913),
        ("qwen15_moe", 28_631_568_384, 17_301_504, 5.982),
        ("phi35_moe", 83_746_306_688, 157_286_400, 19.336),
    ],
)
def test_shapes_of_the_full_models_add_up_to_the_published_sizes(name, total_bytes, expert_bytes, all_int4_gib):
    entry = model_entry(name, catalogue.load("model", name))
    shape = entry.shape
    assert shape is not None and shape.expert_params * 2 == expert_bytes
    experts = shape.moe_layers * shape.experts * shape.expert_params
    assert (experts + shape.shared_params) * 2 == total_bytes == entry.download["target_bytes"]
    assert draft_bytes(shape) / 2**30 == pytest.approx(all_int4_gib, abs=0.001)


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("budget", ["high", "low"])
def test_each_budget_holds_specter_with_more_than_one_slot_per_layer_and_not_every_expert(name, budget):
    entry = model_entry(name, catalogue.load("model", name))
    slots = slots_in(entry.shape, int(entry.budgets_bytes[budget]), parts(entry.shape, 1, 256, entry.depth))
    assert 1 < slots < entry.shape.experts


def test_a_budget_that_was_made_for_slots_gives_those_slots_back():
    shape = model_entry("qwen15_moe", catalogue.load("model", "qwen15_moe")).shape
    for slots in (1, 3, 17):
        assert slots_in(shape, slots_budget_bytes(shape, slots, 2, 100, 8), parts(shape, 2, 100, 8)) == slots
    assert parts(shape, 1, 100, 0)["draft"] == 0 and entry_bytes(shape) % 256 == 0


@pytest.mark.parametrize("name", catalogue.names("system"))
def test_every_system_says_where_its_code_is_or_why_it_cannot_run(name):
    system = system_entry(name, catalogue.load("system", name))
    assert system.module and system.label and system.colour.startswith("#")
    assert system.available or system.reason


def test_systems_in_figures_have_colours_and_places_of_their_own():
    shown = [system_entry(n, catalogue.load("system", n)) for n in catalogue.names("system")]
    shown = [s for s in shown if s.figure]
    assert len({s.colour for s in shown}) == len({s.order for s in shown}) == len(shown)


@pytest.mark.parametrize("group", catalogue.GROUPS)
def test_every_file_begins_with_the_command_that_uses_it(group):
    for name in catalogue.names(group):
        assert catalogue.headline(group, name).startswith(("python run.py", "Not for system=")), (group, name)


def test_mini_memory_settings_stay_within_a_quarter_of_the_experts():
    for name in ("tight", "wide"):
        assert catalogue.load("memory", name)["slots_per_layer"] <= 16 // 4


def test_unknown_and_missing_fields_are_named(tmp_path):
    with pytest.raises(UserError, match=r"conf/system/x: unknown field 'modul'; known: available"):
        system_entry("x", {"modul": "y"})
    with pytest.raises(UserError, match="conf/system/x: field 'colour' is missing"):
        system_entry("x", {"module": "y", "label": "z", "order": 1})
    with pytest.raises(UserError, match="unknown field 'speed'"):
        run_config(raw_config(tmp_path, speed=1))
    with pytest.raises(UserError, match="give slots_per_layer or budget"):
        MemoryEntry("m", "m")


def test_weights_are_absent_until_config_and_a_shard_are_there(tmp_path):
    entry = model_entry(
        "m",
        {
            "label": "M",
            "family": "f",
            "depth": 1,
            "default_weights": "reference",
            "weights": {"reference": {"path": str(tmp_path)}},
        },
    )
    assert "no checkpoint in" in (absent(entry) or "")
    assert "has no weights=official; known: reference" in (absent(entry, "official") or "")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert absent(entry) is None
    before = weights_hash([tmp_path])
    (tmp_path / "model.safetensors").write_bytes(b"y")
    assert weights_hash([tmp_path]) != before
    with pytest.raises(UserError, match="truncated or no safetensors"):
        list(tensor_sizes(tmp_path))
