"""What vLLM and llama.cpp are told to keep on the device fits the budget, and no more than needed leaves it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baselines.llama_cpp_offload.gguf_plan import gguf_plan
from baselines.llama_cpp_offload.placement import facts, layer_bytes, place
from baselines.vllm_offload.offload import OVERHEAD_BYTES, PREFETCH_LAYERS, kv_bytes, offload
from baselines.vllm_offload.system import check_offloaded
from harness import catalogue
from harness.config import model_entry
from harness.synthetic import spec_for
from specter_core.errors import UserError

FULL = ("deepseek_v2_lite", "qwen15_moe", "phi35_moe")


def shape(name: str):
    return model_entry(name, catalogue.load("model", name)).shape


def layers_of(name: str):
    spec = spec_for(name)
    plan = gguf_plan(spec.model_config, spec.config)
    return layer_bytes(plan, shape(name).kv_bytes_per_token, 192)


@pytest.mark.parametrize("name", FULL)
def test_the_planned_file_has_the_models_parameters(name):
    spec = spec_for(name)
    plan = gguf_plan(spec.model_config, spec.config)
    counted = sum(torch.Size(t.shape).numel() for t in plan.tensors.values())
    extra = sum(t.numel() for t in plan.constants.values())
    known = shape(name)
    assert counted - extra == known.shared_params + known.moe_layers * known.experts * known.expert_params


@given(st.sampled_from(FULL), st.floats(3e9, 90e9), st.sampled_from(["experts", "layers"]))
def test_a_placement_fits_and_one_layer_more_would_not(name, budget, kind):
    budget = int(budget)
    layers, head = layers_of(name)
    try:
        placed = place(kind, budget, layers, head)
    except UserError as error:
        assert "raise the budget" in str(error)
        return
    assert placed.device_bytes <= budget
    if kind == "layers" and placed.gpu_layers < len(layers):
        assert placed.device_bytes + layers[-1 - placed.gpu_layers].total > budget
    if kind == "experts" and placed.cpu_experts:
        assert placed.device_bytes + layers[placed.cpu_experts - 1].experts > budget
        assert layers[placed.cpu_experts - 1].experts > 0, "the last layer named has experts"


def test_without_a_budget_everything_is_on_the_device():
    layers, head = layers_of("qwen15_moe")
    for kind in ("experts", "layers"):
        placed = place(kind, None, layers, head)
        assert placed.gpu_layers == 24 and placed.cpu_experts == 0
        assert facts(placed) == {"n_gpu_layers": 25, "cpu_tensors": []}


def test_the_experts_of_the_first_layers_and_nothing_else_stay_on_the_host():
    layers, head = layers_of("deepseek_v2_lite")
    placed = place("experts", 24_000_000_000, layers, head)
    patterns = [re.compile(p) for p in facts(placed)["cpu_tensors"]]
    plan = gguf_plan(spec_for("deepseek_v2_lite").model_config, spec_for("deepseek_v2_lite").config)
    host = {n for n in plan.tensors if any(p.search(n) for p in patterns)}
    parts = ("gate", "up", "down")
    assert host == {f"blk.{n}.ffn_{p}_exps.weight" for n in range(1, placed.cpu_experts) for p in parts}


@given(st.sampled_from(FULL), st.floats(3e9, 90e9), st.sampled_from(["uva", "prefetch"]), st.integers(1, 32))
def test_vllm_moves_what_the_budget_demands_and_nothing_without_need(name, budget, offloader, batch):
    model, budget = shape(name), int(budget)
    try:
        plan = offload(offloader, budget, model, batch, 160)
    except UserError as error:
        assert "raise the budget" in str(error)
        return
    layer = 2 * model.expert_params * model.experts
    whole = 2 * model.shared_params + layer * model.moe_layers + kv_bytes(model, batch, 160) + OVERHEAD_BYTES
    if whole <= budget:
        assert plan.options == {} and plan.offloaded_bytes == 0
        return
    assert plan.device_bytes <= budget
    if offloader == "uva":
        taken, parameters = 0, model.moe_layers * [layer * 2 // 3, layer // 3]
        for size in parameters:  # vLLM's rule: parameters are taken until there are as many bytes as it was told
            if taken >= plan.options["cpu_offload_gb"] * 2**30:
                break
            taken, last = taken + size, size
        assert plan.offloaded_bytes == taken and plan.device_bytes == whole - taken
        assert taken - last < whole - budget <= taken
    else:
        group, number = plan.options["offload_group_size"], plan.options["offload_num_in_group"]
        first = model.decoder_layers - model.moe_layers
        gone = [at for at in range(first, model.decoder_layers) if at % group >= group - number]
        assert len(gone) * layer == plan.offloaded_bytes
        assert whole - plan.offloaded_bytes + PREFETCH_LAYERS * layer == plan.device_bytes
        assert plan.options["offload_prefetch_step"] == PREFETCH_LAYERS


def test_bytes_on_the_device_show_that_nothing_was_offloaded():
    ready = {"version": "0.25.1", "offloaded_bytes": 0}
    check_offloaded(20_000_000_000, 20_400_000_000, ready)
    check_offloaded(None, 30_000_000_000, ready)
    with pytest.raises(UserError, match=r"holds 29\.8 GB on the device with a budget of 20\.0 GB: it did not offload"):
        check_offloaded(20_000_000_000, 29_800_000_000, ready)


@pytest.mark.parametrize("name", ["deepseek_v2_mini", "qwen2_moe_mini", "phimoe_mini"])
def test_padding_is_in_the_file_and_in_no_budget(name):
    folder = Path(catalogue.ROOT / "reference" / name)
    raw = json.loads((folder / "config.json").read_text())
    from specter_core.model.config import ModelConfig

    config = ModelConfig.from_file(folder)
    plan = gguf_plan(config, raw)
    layers, _ = layer_bytes(plan, 0, 0)
    assert len(layers) == plan.layers == (27 if config.mla else config.layers)
    assert sum(layer.others > 0 for layer in layers) == config.layers
