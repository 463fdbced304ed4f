"""The far side: vLLM's engine in one process, stepped by us, one line per step. Runs under the interpreter of
.venvs/vllm (vllm; nothing of ours but the standard-library part of the harness)."""

from __future__ import annotations

import os
import time
from typing import Any

from harness.isolated_child import Refusal, Step

VARIABLES = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the second one ignores cpu_offload_gb and says nothing
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",  # FP8 only
    "HF_HUB_OFFLINE": "1",
}
TORCH = "2.11"


class Vllm:
    """facts of load: model (folder), load_format, device, dtype, batch, max_sequence, kv_bytes, utilisation, compile,
    offload (vLLM's own options), offloads (whether bytes must leave the device)."""

    def __init__(self) -> None:
        os.environ.update(VARIABLES)
        os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)  # our workers'; vLLM sets its allocator itself
        import torch

        if not torch.__version__.startswith(TORCH):
            raise ModuleNotFoundError(f"torch {torch.__version__} is here, vllm 0.25.1 is built for {TORCH}.0")
        self.torch: Any = torch
        self.engine: Any = None
        self.served = 0

    def load(self, facts: dict[str, Any]) -> dict[str, Any]:
        start = time.monotonic()
        if facts["device"] == "cuda" and not self.torch.cuda.is_available():
            raise Refusal(f"vllm: torch for CUDA {self.torch.version.cuda} sees no GPU: no card, or too old a driver")
        import vllm
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        if facts["load_format"] == "dummy" and facts["device"] == "cuda":
            draw_on_the_device(self.torch)
        offload = {k: set(v) if isinstance(v, list) else v for k, v in facts["offload"].items()}
        batch, length = facts["batch"], facts["max_sequence"]
        sizes = sorted({1, batch} | {n for n in (2, 4, 8, 16, 24, 32) if n < batch})
        compilation: dict[str, Any] = {"cudagraph_capture_sizes": sizes}
        if not facts["compile"]:
            compilation |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        arguments = EngineArgs(
            model=facts["model"],
            load_format=facts["load_format"],
            skip_tokenizer_init=True,
            dtype=facts["dtype"],
            max_model_len=length,
            max_num_seqs=batch,
            max_num_batched_tokens=max(batch, min(2048, batch * length)),
            enable_prefix_caching=False,
            max_logprobs=-1,  # for `logits`
            gpu_memory_utilization=facts["utilisation"],
            kv_cache_memory_bytes=facts["kv_bytes"],
            compilation_config=compilation,
            disable_log_stats=True,
            seed=0,
            **offload,
        )
        self.engine = LLMEngine.from_engine_args(arguments)
        moved = offloaded_bytes()
        if facts["offloads"] and not moved:
            raise Refusal(f"vllm {vllm.__version__} moved no weights to the host although told to; try 0.25.1")
        return {
            "version": vllm.__version__,
            "load_s": time.monotonic() - start,
            "offloaded_bytes": moved,
            "reserved_bytes": self.torch.cuda.memory_reserved() if facts["device"] == "cuda" else 0,
        }

    def generate(self, requests: list[dict[str, Any]], step: Step) -> dict[str, Any]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        rows = {}
        for number, request in enumerate(requests):
            self.served += 1
            rows[str(self.served)] = number
            parameters = SamplingParams(
                temperature=request["temperature"],
                seed=request["seed"] if request["temperature"] else None,
                max_tokens=request["max_new_tokens"],
                ignore_eos=request["ignore_eos"],
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            self.engine.add_request(str(self.served), {"prompt_token_ids": request["prompt"]}, parameters)
        while self.engine.has_unfinished_requests():
            new: list[list[int]] = [[] for _ in requests]
            for output in self.engine.step():
                new[rows[output.request_id]] += list(output.outputs[0].token_ids)
            for position in range(max(map(len, new))):
                step([own[position] if position < len(own) else None for own in new])
        return {}

    def logits(self, tokens: list[int]) -> list[float]:
        """Log-probabilities of every token after `tokens`: logits up to a constant."""
        from vllm import SamplingParams

        self.served += 1
        parameters = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False, logprobs=-1)
        self.engine.add_request(str(self.served), {"prompt_token_ids": tokens}, parameters)
        found: dict[int, Any] = {}
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.outputs[0].logprobs:
                    found = output.outputs[0].logprobs[0]
        return [found[token].logprob for token in range(len(found))]

    def close(self) -> None:
        self.engine = None


def draw_on_the_device(torch: Any) -> None:
    """Dummy weights that lie in host memory (prefetch) are drawn on the device: a second instead of a minute."""
    from vllm.model_executor.model_loader import weight_utils

    draw = weight_utils.initialize_single_dummy_weight

    def drawn(parameter: Any, *arguments: Any, **named: Any) -> None:
        if parameter.device.type == "cpu" and parameter.is_floating_point():
            made = torch.empty_like(parameter.data, device="cuda")
            draw(made, *arguments, **named)
            parameter.data.copy_(made)
        else:
            draw(parameter, *arguments, **named)

    weight_utils.initialize_single_dummy_weight = drawn


def offloaded_bytes() -> int:
    """What vLLM's offloader says it moved."""
    from vllm.model_executor.offloader.base import get_offloader

    offloader = get_offloader()
    return int(getattr(offloader, "cpu_offload_bytes", 0) or getattr(offloader, "total_offloaded_bytes", 0))


def create() -> Vllm:
    return Vllm()
