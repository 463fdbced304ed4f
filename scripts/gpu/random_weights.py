"""Seeded random full-size models, made on the device: experts go to the host store, the rest stays, no disk."""

from __future__ import annotations

import struct
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.synthetic.store import rounded_to_nearest
from specter_core.device_runtime import CudaRuntime, compact_allocator
from specter_core.draft.draft_store import DraftExperts
from specter_core.draft.int4 import Int4Matrix
from specter_core.draft.kernels.block_path import BlockExpertPath
from specter_core.memory.host_store import HostExpertStore
from specter_core.memory.payload import TRAILER_BYTES, PayloadLayout, trailer_words
from specter_core.model.config import ModelConfig
from specter_core.model.decoder import Decoder
from specter_core.model.families import family_named
from specter_core.model.norm import load_norm
from specter_core.model.ops_cuda import CudaOps
from specter_core.nested.expert import ExpertCodes, encode_experts, sanitised_codes
from specter_core.nested.layout import NestedLayout
from specter_core.opening import LoadedModel

CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v2_lite": {
        "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 2048,
        "num_hidden_layers": 27, "first_k_dense_replace": 1, "num_attention_heads": 16, "kv_lora_rank": 512,
        "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_shared_experts": 2,
        "intermediate_size": 10944, "vocab_size": 102400, "bos_token_id": 100000, "eos_token_id": 100001,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 163840, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
        "rope_scaling": {
            "rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
            "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
        },
    },
    "qwen1.5_moe": {
        "model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"], "hidden_size": 2048,
        "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 60,
        "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
        "intermediate_size": 5632, "vocab_size": 151936, "bos_token_id": 151643, "eos_token_id": 151643,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 8192, "rope_theta": 1000000.0, "torch_dtype": "bfloat16",
    },
}  # fmt: skip


COMMON = 1.0
"""Size of the direction that all tokens share: some experts are popular, as in trained models."""
EXPERT_GAIN = 1.3
"""Of the routed experts' output: smaller, and the draft is accepted more often."""


class RandomSource:
    """`TensorSource` without a checkpoint: a tensor's values depend on the seed and the order of asking.

    Matrices keep the size of their input's entries; what a layer adds to the residual stream is damped by `branch`.
    """

    def __init__(self, config: ModelConfig, seed: int, branch: float) -> None:
        self.dtype, self.device = torch.bfloat16, torch.device("cuda")
        self._shapes = family_named(config.family).expected_tensors(config)
        self._generator = torch.Generator("cuda").manual_seed(seed)
        self._branch = branch

    def get(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        shape = self._shapes[name]
        noise = torch.randn(shape, generator=self._generator, device=self.device)
        if "norm" in name:
            noise = 1.0 + 0.1 * noise
        elif name.endswith("bias"):
            noise = 0.1 * noise
        elif "embed_tokens" not in name:
            gain = 1.5 if "gate.weight" in name and "experts" not in name else 1.0
            gain = self._branch if "o_proj" in name or "down_proj" in name else gain
            noise = noise * (gain * shape[-1] ** -0.5)
        return noise.to(dtype or self.dtype)

    def get_optional(self, name: str, wanted: bool) -> Tensor | None:
        return self.get(name) if wanted else None

    def stack(self, *names: str) -> Tensor:
        return torch.cat([self.get(name) for name in names])


def random_model(
    name: str, *, seed: int = 0, branch: float = 0.3, log: bool = True, encoding: str = "plain"
) -> LoadedModel:
    """A full-size model with its round-to-nearest draft; `branch` scales what attention, MLPs and experts add."""
    started = time.perf_counter()
    compact_allocator()

    def note(what: str) -> None:
        if log:
            print(f"  {what}: {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)

    config = ModelConfig.from_dict(CONFIGS[name])
    family, source, ops = family_named(config.family), RandomSource(config, seed, branch), CudaOps()
    embedding = source.get("model.embed_tokens.weight")
    common = torch.randn(config.hidden, generator=source._generator, device="cuda")
    embedding = embedding + (common * COMMON).to(embedding.dtype)
    layers = family.build_layers(config, source, ops)  # type: ignore[arg-type]
    norm = load_norm("model.norm", config, source, ops)  # type: ignore[arg-type]
    head = source.get("lm_head.weight")
    head -= torch.outer(head @ common.to(head.dtype), (common / common.norm() ** 2).to(head.dtype))
    decoder = Decoder(config, embedding, layers, norm, head, None, ops)
    note("shared tensors")
    layout = PayloadLayout(config.hidden, config.expert_width, torch.bfloat16)
    if encoding == "nested":
        layout = PayloadLayout(config.hidden, config.expert_width, torch.bfloat16, encoding, nested_bytes(config))
    store = HostExpertStore.create(len(config.moe_layers), config.num_experts, layout)
    note(f"host store {store.segment.numel() / 1e9:.1f} GB reserved")
    runtime = CudaRuntime()
    runtime.register(store.segment)
    note("host store page-locked")
    draft = _fill(config, layout, store, seed, branch)
    torch.cuda.synchronize()
    store.mark_ready()
    note("experts and INT4 draft")
    path = BlockExpertPath(draft, config.top_k, "cuda", pdl=runtime.pdl)
    del draft
    torch.cuda.empty_cache()
    note("draft repacked")
    return LoadedModel(decoder, store, None, path, runtime)


def nested_bytes(config: ModelConfig) -> int:
    """Payload size for Gaussian weights rounded at absmax / 7: 16 % of the codes are 0, with half a byte each."""
    layout = NestedLayout(config.hidden, config.expert_width)
    return layout.payload_bytes(round(0.0815 * layout.weights))


def nest(entries: Tensor, layout: PayloadLayout, wide: Tensor, tall: Tensor, codes: list[Int4Matrix]) -> int:
    """Writes the nested payloads of experts wide [E, 2I, H], tall [E, H, I]; bytes that the largest needs."""
    inner, largest = NestedLayout(layout.hidden, layout.width), 0
    for start in range(0, wide.shape[0], 8):
        some = slice(start, start + 8)
        own = ExpertCodes(*(Int4Matrix(m.codes[some], m.scales[some]) for m in codes))
        found = sanitised_codes(wide[some], tall[some], own)
        assert not found.moved, found.moved
        payloads = encode_experts(wide[some], tall[some], own, inner, layout.payload_bytes)
        entries[some, : layout.payload_bytes] = payloads
        largest = max(largest, inner.payload_bytes(max(found.tails)))
    return largest


def _fill(config: ModelConfig, layout: PayloadLayout, store: HostExpertStore, seed: int, branch: float) -> DraftExperts:
    """Experts into the store, layer by layer, and the draft that was rounded from them."""
    experts, hidden, width = config.num_experts, config.hidden, config.expert_width
    low, high, size, encoding = trailer_words(layout)
    generator = torch.Generator("cuda").manual_seed(seed + 1)
    largest = 0
    whole = store.segment.view(store.layers, experts, layout.entry_bytes)
    gate_up, down = [], []
    for layer in range(store.layers):
        entries = torch.zeros(experts, layout.entry_bytes, dtype=torch.uint8, device="cuda")
        flat = torch.zeros(experts, 3 * hidden * width, dtype=torch.bfloat16, device="cuda")
        wide = flat[:, : 2 * hidden * width].view(experts, 2 * width, hidden)
        tall = flat[:, 2 * hidden * width :].view(experts, hidden, width)
        for target, gain in ((wide, hidden**-0.5), (tall, EXPERT_GAIN * branch * width**-0.5)):
            noise = torch.randn(target.shape, generator=generator, device="cuda", dtype=torch.bfloat16)
            target.copy_(noise * gain)
        codes = [rounded_to_nearest(wide), rounded_to_nearest(tall)]
        if layout.encoding == "nested":
            largest = max(largest, nest(entries, layout, wide, tall, codes))
        else:
            entries[:, : layout.payload_bytes] = flat.view(torch.uint8)
        words = [struct.pack("<iiiiIiI", low, high, layer, e, encoding, 0, size) + bytes(4) for e in range(experts)]
        trailers = torch.frombuffer(bytearray(b"".join(words)), dtype=torch.uint8).view(experts, TRAILER_BYTES)
        entries[:, layout.entry_bytes - TRAILER_BYTES :] = trailers.cuda()
        whole[layer].copy_(entries, non_blocking=True)
        gate_up.append(codes[0])
        down.append(codes[1])
        torch.cuda.synchronize()
    if largest:
        bits = [8 * n / (3 * hidden * width) for n in (largest, layout.payload_bytes)]
        print(f"  nested: {bits[0]:.3f} bits per weight in the largest expert, {bits[1]:.3f} in slots", file=sys.stderr)

    def stacked(parts: list[Int4Matrix]) -> Int4Matrix:
        return Int4Matrix(torch.stack([p.codes for p in parts]), torch.stack([p.scales for p in parts]))

    return DraftExperts(stacked(gate_up), stacked(down), "rtn", {"method": "rtn"})
