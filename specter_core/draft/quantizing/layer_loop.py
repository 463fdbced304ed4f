"""Layer after layer: run the calibration text through the shared decoder and quantise each layer's routed
experts.

One expert is in memory at a time. The hidden states that enter a layer come from layers whose experts are
already quantised, as GPTQ prescribes; inside an expert, down is calibrated behind the quantised gate and
up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from specter_core.draft.int4 import Int4Matrix, dequantize
from specter_core.draft.quantizing.draft_writer import DraftWriter
from specter_core.model.config import ModelConfig
from specter_core.model.decoder import Decoder
from specter_core.model.layer import DecoderLayer
from specter_core.model.rows import Rows
from specter_core.model.torch_ops import TorchOps
from specter_core.state.kv_cache import KVCache
from specter_core.types import ExpertKey

Quantize = Callable[[Tensor, Tensor], Int4Matrix]


class CalibrationOps(TorchOps):
    """Whole-batch linear layers: calibration needs speed, not row-invariance."""

    def linear(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return F.linear(x, w, b)


def memory_bound_bytes(config: ModelConfig, shared_bytes: int, tokens: int) -> int:
    """Bound on what the loop allocates, besides Python, the libraries and the text's tokens.

    The shared tensors; three float32 copies of the hidden states (hidden, normed, routed sum) and one on its
    way to the file; the layer's finished INT4 experts three times (codes, GPTQ tensors, file); and for the
    one expert in memory: its weights four times in float32, its inputs and activations if every token chose
    it, and eight matrices of the size of GPTQ's larger Hessian.
    """
    hidden, width = config.hidden, config.expert_width
    states = 4 * tokens * hidden * 4
    written = 3 * config.num_experts * config.expert_params * 17 // 32
    expert = 4 * config.expert_params * 4 + tokens * (2 * hidden + 3 * width) * 4
    return shared_bytes + states + written + expert + 8 * max(hidden, width) ** 2 * 4


class LayerLoop:
    """GPTQ over a whole model. experts(key) gives (gate [I, H], up [I, H], down [H, I]) of the target."""

    def __init__(
        self,
        decoder: Decoder,
        config: ModelConfig,
        experts: Callable[[ExpertKey], Sequence[Tensor]],
        quantize: Quantize,
        min_tokens: int,
    ) -> None:
        self.decoder = decoder
        self.config = config
        self.experts = experts
        self.quantize = quantize
        self.min_tokens = min_tokens

    @torch.no_grad()
    def run(self, tokens: Tensor, writer: DraftWriter, progress: Callable[[int, str], None]) -> None:
        """tokens int64 [N, T]. Layers that the writer already has are skipped or, at most one, replayed."""
        samples, length = tokens.shape
        kv = KVCache(self.config, 1, length, self.decoder.device, self.decoder.dtype)
        hidden, first = self._resume(tokens, writer)
        rows = Rows.prefill(0, 0, length, length)
        for layer in self.decoder.layers[first:]:
            for sample in range(samples):
                block = slice(sample * length, (sample + 1) * length)
                hidden[block] = layer.attend(hidden[block], kv, rows)
                if layer.moe_index is None:
                    hidden[block] = layer.dense(hidden[block])
            if layer.moe_index is None:
                continue
            self._moe_layer(layer, hidden, rows, samples, writer, progress)
            writer.save_hidden(layer.moe_index, hidden)

    def _resume(self, tokens: Tensor, writer: DraftWriter) -> tuple[Tensor, int]:
        """Hidden states [N*T, H] and the decoder layer to go on with."""
        saved = writer.load_hidden()
        if saved is None:
            return torch.cat([self.decoder.embed(block.unsqueeze(0)) for block in tokens]), 0
        layer, hidden = saved
        return hidden.to(self.decoder.device), self.config.moe_layers[layer] + 1

    def _moe_layer(
        self,
        layer: DecoderLayer,
        hidden: Tensor,
        rows: Rows,
        samples: int,
        writer: DraftWriter,
        progress: Callable[[int, str], None],
    ) -> None:
        """Quantises the layer's experts, writes them, and moves the hidden states [N*T, H] behind them in place."""
        assert layer.moe_index is not None
        normed = torch.empty_like(hidden)
        ids = torch.empty(hidden.shape[0], self.config.top_k, dtype=torch.int64, device=hidden.device)
        weights = torch.empty(ids.shape, device=hidden.device)  # float32
        blocks = [slice(i * rows.count, (i + 1) * rows.count) for i in range(samples)]
        for block in blocks:
            normed[block], ids[block], weights[block] = layer.route(hidden[block], rows)
        routed = torch.zeros(normed.shape, dtype=torch.float32, device=normed.device)
        written: list[tuple[Int4Matrix, Int4Matrix, Int4Matrix]] = []
        counts: list[int] = []
        borrowed: list[int] = []
        for expert in range(self.config.num_experts):
            row, choice = (ids == expert).nonzero(as_tuple=True)
            chosen = row.numel()
            counts.append(chosen)
            if chosen < self.min_tokens:
                borrowed.append(expert)
                row = torch.cat((row, self._spread(normed.shape[0], self.min_tokens - chosen, row)))
            matrices, outputs = self._expert(ExpertKey(layer.moe_index, expert), normed[row].to(torch.float32))
            written.append(matrices)
            scaled = outputs[:chosen] * weights[row[:chosen], choice].unsqueeze(-1)
            routed.index_add_(0, row[:chosen], scaled)
        writer.write_layer(layer.moe_index, written, {"borrowed": ",".join(map(str, borrowed))})
        progress(layer.moe_index, f"{min(counts)} to {max(counts)} tokens per expert, {len(borrowed)} borrowed")
        for block in blocks:
            hidden[block] = layer.combine(hidden[block], normed[block], routed[block])

    def _expert(self, key: ExpertKey, inputs: Tensor) -> tuple[tuple[Int4Matrix, Int4Matrix, Int4Matrix], Tensor]:
        """inputs float32 [n, H] -> (gate, up, down) and the quantised expert's outputs float32 [n, H]."""
        gate, up, down = (part.to(inputs.device, torch.float32) for part in self.experts(key))
        width = gate.shape[0]
        # Rows of a matrix are quantised independently: gate and up share one Hessian and one call.
        gate_up = self.quantize(torch.cat((gate, up)), inputs)
        hidden = inputs @ dequantize(gate_up).to(inputs.device).t()
        activations = F.silu(hidden[:, :width]) * hidden[:, width:]
        below = self.quantize(down, activations)
        outputs = activations @ dequantize(below).to(inputs.device).t()
        halves = [Int4Matrix(gate_up.codes[part], gate_up.scales[part]) for part in (slice(width), slice(width, None))]
        return (halves[0], halves[1], below), outputs

    @staticmethod
    def _spread(total: int, wanted: int, taken: Tensor) -> Tensor:
        """Up to `wanted` row numbers at even distances among the rows that are not in `taken`."""
        free = torch.ones(total, dtype=torch.bool, device=taken.device)
        free[taken] = False
        others = free.nonzero().squeeze(-1)
        wanted = min(wanted, others.numel())
        return others[torch.arange(wanted, device=taken.device) * others.numel() // max(wanted, 1)]
