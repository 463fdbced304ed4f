"""Experts stream into the host store without a second copy: peak memory on a checkpoint of more than 3 GiB."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specter_core.model.config import ModelConfig
from specter_core.model.families import family_named
from tests.tiny_models import tiny_checkpoint

ROOT = Path(__file__).resolve().parents[1]
GIB = 1 << 30
LOAD = """
import resource, sys, time
from pathlib import Path
from specter_core.opening import fill_host_store
from specter_core.model.config import ModelConfig
folder = Path(sys.argv[1])
config = ModelConfig.from_file(folder)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
start = time.perf_counter()
store = fill_host_store(folder, config, threads=2)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(before, peak, store.handle.bytes, time.perf_counter() - start)
store.close(); store.unlink()
"""


@pytest.mark.slow
def test_peak_memory_of_loading_is_at_most_1_1_times_the_weights(tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < 5 * GIB:
        pytest.skip("needs 5 GiB of disk")
    folder = tiny_checkpoint("qwen2_moe", tmp_path, seed=1, layers=4, experts=8)
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"hidden_size": 2048, "moe_intermediate_size": 1408, "num_experts": 48, "num_attention_heads": 16}
    raw |= {"num_key_value_heads": 16, "shared_expert_intermediate_size": 128}
    raw.pop("head_dim", None)
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    (folder / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.from_file(folder)
    expected = family_named(config.family).expected_tensors(config)
    index: dict[str, str] = {}
    experts = [name for name in expected if ".experts." in name]
    for shard in range(8):
        names = experts[shard::8]
        block = {n: torch.randn(expected[n], dtype=torch.float32).to(torch.bfloat16) for n in names}
        save_file(block, folder / f"part-{shard}.safetensors")
        index |= dict.fromkeys(names, f"part-{shard}.safetensors")
        del block
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    before, peak, weights, _ = (float(part) for part in done.stdout.split())
    assert weights >= 3 * GIB
    assert peak - before <= 1.1 * weights
