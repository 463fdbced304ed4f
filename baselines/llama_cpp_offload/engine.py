"""The far side: llama-cpp-python's C interface, one context, greedy decoding of one batch at a time. Runs under the
interpreter of .venvs/llama_cpp (numpy and llama_cpp; nothing of ours but the standard-library part of the harness)."""

from __future__ import annotations

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness.isolated_child import Refusal, Step

TYPES = {"f32": 0, "f16": 1, "bf16": 30}
FLASH_AUTO, FLASH_OFF, FLASH_ON = -1, 0, 1
READ_BYTES = 1 << 28


class BufferOverride(ctypes.Structure):
    """struct llama_model_tensor_buft_override"""

    _fields_ = [("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p)]


class LlamaCpp:
    """One model in one context. facts of load: path, n_gpu_layers, cpu_tensors, threads, batch, max_sequence, device,
    kv_type, flash, op_offload, vocab_size, eos_ids."""

    def __init__(self) -> None:
        import llama_cpp  # fails here when the package is missing

        self.api: Any = llama_cpp
        self.model: Any = None
        self.context: Any = None

    def load(self, facts: dict[str, Any]) -> dict[str, Any]:
        api = self.api
        api.llama_backend_init()
        if facts["device"] == "cuda" and not api.llama_supports_gpu_offload():
            raise Refusal("this llama_cpp was built without CUDA; make it again with: make baseline-llama CUDA=1")
        bandwidth = read_gb_per_s(facts["threads"])
        start = time.monotonic()
        self.facts, self.vocabulary = facts, int(facts["vocab_size"])
        self.model = self._load_model(facts)
        if not self.model:
            raise Refusal(f"llama.cpp does not read {facts['path']}; its log says why")
        self.context = self._open_context(facts)
        if not self.context:
            raise MemoryError("llama.cpp found no room for its context")
        return {
            "version": str(api.__version__),
            "system": api.llama_print_system_info().decode(),
            "load_s": time.monotonic() - start,
            "host_read_gb_per_s": bandwidth,
            "threads": facts["threads"],
        }

    def _load_model(self, facts: dict[str, Any]) -> Any:
        api = self.api
        params = api.llama_model_default_params()
        params.n_gpu_layers = facts["n_gpu_layers"] if facts["device"] == "cuda" else 0
        params.load_mode = api.LLAMA_LOAD_MODE_MMAP
        if facts["cpu_tensors"] and facts["device"] == "cuda":
            buffer_type = cpu_buffer_type(Path(api.__file__).parent / "lib")
            entries = [BufferOverride(p.encode(), buffer_type) for p in facts["cpu_tensors"]]
            self.overrides = (BufferOverride * (len(entries) + 1))(*entries, BufferOverride(None, None))
            params.tensor_buft_overrides = ctypes.cast(self.overrides, ctypes.c_void_p)
        return api.llama_model_load_from_file(facts["path"].encode(), params)

    def _open_context(self, facts: dict[str, Any]) -> Any:
        api = self.api
        batch, length = facts["batch"], -(-facts["max_sequence"] // 64) * 64
        params = api.llama_context_default_params()
        params.n_ctx = length * batch
        params.n_seq_max = batch
        params.n_batch = params.n_ubatch = min(512, length * batch)
        params.n_outputs_max = batch
        params.n_threads = params.n_threads_batch = facts["threads"]
        params.type_k = params.type_v = TYPES[facts["kv_type"]]
        params.flash_attn_type = {"on": FLASH_ON, "off": FLASH_OFF, "auto": FLASH_AUTO}[facts["flash"]]
        params.op_offload = facts["op_offload"]
        params.offload_kqv = True
        params.no_perf = True
        return api.llama_init_from_model(self.model, params)

    def generate(self, requests: list[dict[str, Any]], step: Step) -> dict[str, Any]:
        """Prompts of all rows in one go, then one token per row and step; argmax of the logits, the lowest id first."""
        if any(r["temperature"] for r in requests):
            raise Refusal("llama_cpp runs at temperature 0 only here; leave it out at other temperatures")
        self._forget()
        last = self._prompts([r["prompt"] for r in requests])
        positions = [len(r["prompt"]) for r in requests]
        left = [int(r["max_new_tokens"]) for r in requests]
        while True:
            step(last)
            for row, token in enumerate(last):
                if token is not None:
                    left[row] -= 1
                    if not requests[row]["ignore_eos"] and token in self.facts["eos_ids"]:
                        left[row] = 0
            alive = [row for row, count in enumerate(left) if count > 0]
            if not alive:
                return {}
            found = self._decode([(last[row], positions[row], row, True) for row in alive])
            last = [None] * len(requests)
            for row, token in zip(alive, found, strict=True):
                last[row] = token
                positions[row] += 1

    def logits(self, tokens: list[int]) -> list[float]:
        self._forget()
        self._prompts([tokens])
        return [float(x) for x in self._row(-1)]

    def close(self) -> None:
        if self.context:
            self.api.llama_free(self.context)
        if self.model:
            self.api.llama_model_free(self.model)
        self.context = self.model = None

    def _forget(self) -> None:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)

    def _prompts(self, prompts: list[list[int]]) -> list[int | None]:
        """First tokens of all rows, whose prompts are decoded in pieces of at most the context's batch."""
        entries = [
            (token, position, row, position == len(prompt) - 1)
            for row, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        limit = self.api.llama_n_batch(self.context)
        found: list[int | None] = []
        for begin in range(0, len(entries), limit):
            found += self._decode(entries[begin : begin + limit])
        return found

    def _decode(self, entries: list[tuple[Any, int, int, bool]]) -> list[int | None]:
        """(token, position, row, wanted) each; argmax of every wanted one, in order."""
        api = self.api
        batch = api.llama_batch_init(len(entries), 0, 1)
        try:
            batch.n_tokens = len(entries)
            for i, (token, position, row, wanted) in enumerate(entries):
                batch.token[i], batch.pos[i] = token, position
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
                batch.logits[i] = wanted
            code = api.llama_decode(self.context, batch)
            if code:
                raise RuntimeError(f"llama_decode returned {code} for {len(entries)} tokens")
            return [int(self._row(i).argmax()) for i, entry in enumerate(entries) if entry[3]]
        finally:
            api.llama_batch_free(batch)

    def _row(self, index: int) -> Any:
        import numpy as np

        pointer = self.api.llama_get_logits_ith(self.context, index)
        if not pointer:
            raise RuntimeError(f"llama.cpp has no logits of position {index}")
        return np.ctypeslib.as_array(pointer, (self.vocabulary,))


def cpu_buffer_type(folder: Path) -> int:
    """ggml_backend_cpu_buffer_type() of the library that is loaded already."""
    for path in sorted(folder.glob("libggml*")):
        try:
            function = ctypes.CDLL(str(path)).ggml_backend_cpu_buffer_type
        except (OSError, AttributeError):
            continue
        function.restype = ctypes.c_void_p
        return int(function())
    raise Refusal(f"no ggml_backend_cpu_buffer_type in {folder}; use llama-cpp-python 0.3.36")


def read_gb_per_s(threads: int) -> float:
    """Host memory, read by `threads` threads, GB/s (1e9): what experts in host memory can be computed with at best."""
    import numpy as np

    arrays = [np.ones(READ_BYTES // 8) for _ in range(min(threads, 32))]
    with ThreadPoolExecutor(len(arrays)) as pool:
        list(pool.map(np.sum, arrays))
        start = time.perf_counter()
        list(pool.map(np.sum, arrays))
        return sum(a.nbytes for a in arrays) / (time.perf_counter() - start) / 1e9


def create() -> LlamaCpp:
    return LlamaCpp()
