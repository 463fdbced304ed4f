"""Hugging Face Transformers with whole layers offloaded: the generic baseline. README.md says what is
adapted."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList

from baselines.transformers_offload.layer_offload import OffloadCounters, PacedLayers
from baselines.transformers_offload.offloaded_bytes import OffloadedBytes
from baselines.transformers_offload.placement import place
from harness.system import NAN, MemorySpec, ModelSpec, RequestRecord
from harness.weights_in_memory import is_in_memory
from specter_core.errors import UserError
from specter_core.types import Request

CONTEXT_BYTES = 1_000_000_000  # CUDA context and workspace, kept out of max_memory
PAD_ID = 0
FASTEST_EXPERTS = {"cpu": "eager", "cuda": "batched_mm"}  # measured at batch 1
LEANEST_EXPERTS = "grouped_mm"
"""batched_mm gathers a copy of the weights of every (token, expert) pair: gigabytes for a prompt of 16 tokens."""


class TokenClock(StoppingCriteria):
    """Never stops; notes the host time at which `generate` has appended each token."""

    def __init__(self) -> None:
        self.times_ns: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Any, **unused: Any) -> Tensor:
        self.times_ns.append(time.perf_counter_ns())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class TransformersSystem:
    """options: variant offload (under the budget) or resident (everything stays); experts_implementation of
    transformers 5 (eager | batched_mm | grouped_mm), auto: the fastest at batch 1 on the device; under a budget on
    a GPU grouped_mm, which gathers no copies of weights."""

    def __init__(self, variant: str = "offload", experts_implementation: str = "auto") -> None:
        if variant not in ("offload", "resident"):
            raise UserError(f"transformers variant {variant!r} is unknown; known: offload, resident")
        self.variant = variant
        self.experts_implementation = experts_implementation

    def load(self, model: ModelSpec, memory: MemorySpec) -> None:
        """Loads the checkpoint; float32 on a CPU (from BF16-stored weights), as stored on a GPU."""
        if not is_in_memory(model) and not (Path(model.path) / "config.json").exists():
            raise UserError(f"no checkpoint in {model.path}: config.json is missing; fetch it again")
        self.spec, self.memory = model, memory
        if memory.device == "cpu":
            self._load_cpu()
        else:
            self._load_cuda()
        self.model.eval()

    def _load_cpu(self) -> None:
        self.model = self._from_pretrained(dtype=torch.float32)
        stored = getattr(torch, self.spec.dtype)
        experts = expert_modules(self.model)
        own = {id(p) for module in experts for p in module.parameters()}
        layer_bytes = sum(p.numel() for p in experts[0].parameters()) * stored.itemsize
        shared = sum(p.numel() for p in self.model.parameters() if id(p) not in own) * stored.itemsize
        budget = self.memory.budget_bytes if self.variant == "offload" else None
        self.placement = place(budget, shared + self._kv_bytes(), layer_bytes, len(experts))
        self.layers = PacedLayers(experts[self.placement.resident :], stored, self.memory.link_rate_bytes_per_s)

    def _load_cuda(self) -> None:
        budget = self.memory.budget_bytes if self.variant == "offload" else None
        placed: dict[str, Any] = {"device_map": {"": 0}}
        if budget is not None:
            room = budget - CONTEXT_BYTES - self._kv_bytes()
            if room <= 0:
                raise UserError(
                    f"budget {budget / 1e9:.1f} GB cannot hold context and KV "
                    f"({(CONTEXT_BYTES + self._kv_bytes()) / 1e9:.1f} GB); raise it"
                )
            placed = {"device_map": "auto", "max_memory": {0: room, "cpu": 1 << 40}}
        if is_in_memory(self.spec):
            self.model = self._from_state_dict(**placed)
        else:
            self.model = self._from_pretrained(dtype="auto", **placed)
        self.layers = PacedLayers([], torch.bfloat16, None)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.counted = OffloadedBytes(self.model)
        print(f"device map: {self.counted.offloaded_modules} modules offloaded, {self.counted.pass_bytes} bytes a pass")

    def _from_pretrained(self, **how: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(
            self.spec.path, experts_implementation=self._experts, local_files_only=True, **how
        )

    def _from_state_dict(self, **how: Any) -> Any:
        """The same loading from generated tensors instead of files. They lie on the device until it is done; what
        counts is what stays there."""
        from harness.synthetic import spec_for, tensors

        spec = spec_for(self.spec.name)
        config = AutoConfig.for_model(**spec.config)
        model_class = getattr(transformers, spec.config["architectures"][0].replace("PhiMoE", "Phimoe"))
        return model_class.from_pretrained(
            None,
            config=config,
            state_dict=dict(tensors(spec, "cuda")),
            dtype=torch.bfloat16,
            experts_implementation=self._experts,
            **how,
        )

    @property
    def _experts(self) -> str:
        if self.experts_implementation != "auto":
            return self.experts_implementation
        budgeted = self.memory.device == "cuda" and self.variant == "offload" and self.memory.budget_bytes is not None
        return LEANEST_EXPERTS if budgeted else FASTEST_EXPERTS[self.memory.device]

    def _kv_bytes(self) -> int:
        per_token = self.spec.shape.kv_bytes_per_token if self.spec.shape else 0
        return per_token * self.memory.batch * self.memory.max_sequence

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request]) -> list[RequestRecord]:
        """One native batch, left-padded. TPOT and throughput are those of the batch: all rows advance
        together."""
        first = requests[0]
        if any((r.temperature, r.top_p, r.top_k) != (first.temperature, first.top_p, first.top_k) for r in requests):
            raise UserError("transformers batches share one temperature, top_p and top_k; send such requests apart")
        self.layers.counters = counters = OffloadCounters()
        ids, mask = left_padded([r.prompt for r in requests], self.model.device)
        clock = TokenClock()
        torch.manual_seed(first.seed)
        start_ns = time.perf_counter_ns()
        out = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=self._generation(requests),
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        wall_s = (time.perf_counter_ns() - start_ns) / 1e9
        generated = out[:, ids.shape[1] :].tolist()
        rows = [trimmed(tokens, r, self._eos_ids()) for tokens, r in zip(generated, requests, strict=True)]
        total = sum(len(tokens) for tokens in rows)
        return [
            self._record(request, tokens, clock, start_ns, wall_s, total, counters, len(requests))
            for request, tokens in zip(requests, rows, strict=True)
        ]

    def close(self) -> None:
        self.model = None

    def _generation(self, requests: Sequence[Request]) -> GenerationConfig:
        first = requests[0]
        ignore = all(r.ignore_eos for r in requests)
        sampling = (
            {"do_sample": True, "temperature": first.temperature, "top_p": first.top_p, "top_k": first.top_k}
            if first.temperature > 0
            else {"do_sample": False}
        )
        return GenerationConfig(
            max_new_tokens=max(r.max_new_tokens for r in requests),
            eos_token_id=None if ignore else self._eos_ids(),
            pad_token_id=PAD_ID,
            **sampling,
        )

    def _eos_ids(self) -> list[int]:
        ids = self.model.config.eos_token_id
        return list(ids) if isinstance(ids, list) else [] if ids is None else [ids]

    def _record(
        self,
        request: Request,
        tokens: list[int],
        clock: TokenClock,
        start_ns: int,
        wall_s: float,
        total: int,
        counters: OffloadCounters,
        batch: int,
    ) -> RequestRecord:
        times = clock.times_ns[: len(tokens)]
        on_cpu = self.memory.device == "cpu"
        rate = self.memory.link_rate_bytes_per_s
        return RequestRecord(
            request.request_id,
            tuple(tokens),
            ttft_ms=(times[0] - start_ns) / 1e6,
            tpot_ms=(times[-1] - times[0]) / 1e6 / (len(times) - 1) if len(times) > 1 else NAN,
            throughput=total / wall_s,
            variant=self.variant,
            dtype=self.spec.dtype,
            h2d_bytes=(counters.bytes if on_cpu else self.counted.pass_bytes * len(clock.times_ns)) // batch,
            h2d_bytes_used=counters.bytes_used // batch if on_cpu else None,
            link_utilisation=counters.bytes / (rate * wall_s) if rate and on_cpu else NAN,
            stall_ms={"layer": counters.stall_ns / 1e6} if on_cpu else {},
            peak_device_bytes=self.placement.total_bytes if on_cpu else torch.cuda.max_memory_reserved(),
        )


def create(options: Mapping[str, Any]) -> TransformersSystem:
    known = {k: v for k, v in options.items() if k != "depth"}
    unknown = sorted(set(known) - {"variant", "experts_implementation"})
    if unknown:
        raise UserError(f"transformers has no option {unknown[0]!r}; known: variant, experts_implementation")
    return TransformersSystem(**known)


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """The modules with fused routed experts, in layer order. UserError when the model has none."""
    found = [m for name, m in model.named_modules() if name.endswith(".experts") and hasattr(m, "gate_up_proj")]
    if not found:
        raise UserError(f"{type(model).__name__} has no fused routed experts; transformers >= 5 models only")
    return found


def left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """(ids [B, T], mask [B, T]) int64."""
    longest = max(len(p) for p in prompts)
    ids = torch.full((len(prompts), longest), PAD_ID, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


def trimmed(tokens: list[int], request: Request, eos_ids: Sequence[int]) -> list[int]:
    """A row's own tokens: at most its length, up to and including its end of sequence."""
    tokens = tokens[: request.max_new_tokens]
    if not request.ignore_eos:
        for at, token in enumerate(tokens):
            if token in eos_ids:
                return tokens[: at + 1]
    return tokens
