"""The shared instance: everything that draft and target have in common, held once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from specter_core.model.checkpoint import Checkpoint
from specter_core.model.config import ModelConfig
from specter_core.model.families import family_named
from specter_core.model.layer import DecoderLayer
from specter_core.model.norm import Norm, load_norm
from specter_core.model.ops import DecoderOps
from specter_core.model.tensor_source import TensorSource
from specter_core.model.torch_ops import TorchOps


class Decoder:
    """Embedding, layers and LM head; the routed experts are a parameter of the pass and live elsewhere.

    A pass: x = embed(tokens); per layer attend, then dense, or route + experts + combine; logits(x).
    """

    def __init__(
        self,
        config: ModelConfig,
        embedding: Tensor,
        layers: list[DecoderLayer],
        norm: Norm,
        head: Tensor,
        head_bias: Tensor | None,
        ops: DecoderOps,
    ) -> None:
        self.config = config
        self.layers = layers
        self.ops = ops
        self._embedding = embedding  # [V, H]
        self._norm = norm
        self._head = head  # [V, H]
        self._head_bias = head_bias

    @staticmethod
    def load(
        model_dir: str | Path,
        *,
        device: str | torch.device = "cpu",
        compute_dtype: torch.dtype | None = None,
        ops: DecoderOps | None = None,
    ) -> Decoder:
        """Read config.json and the non-expert tensors. compute_dtype None: as stored.

        UserError: unknown or quantized model, missing or truncated shard, missing or misshapen tensor.
        """
        config = ModelConfig.from_file(model_dir)
        family = family_named(config.family)
        chosen = ops if ops is not None else ops_for(torch.device(device))
        with Checkpoint(model_dir) as checkpoint:
            dtype = compute_dtype or config.dtype
            source = TensorSource(checkpoint, family, config, dtype, torch.device(device))
            embedding = source.get("model.embed_tokens.weight")
            layers = family.build_layers(config, source, chosen)
            norm = load_norm("model.norm", config, source, chosen)
            head = embedding if config.tie_embeddings else source.get("lm_head.weight")
            head_bias = source.get_optional("lm_head.bias", config.head_bias)
        return Decoder(config, embedding, layers, norm, head, head_bias, chosen)

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype of the hidden states."""
        return self._embedding.dtype

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens int64 [B, T] -> x [B·T, H]."""
        return self._embedding[tokens.flatten()]

    def logits(self, x: Tensor) -> Tensor:
        """x [R, H] after the last layer -> float32 [R, V]."""
        normed = self._norm(self.ops.pad(x))
        return self.ops.linear(normed, self._head, self._head_bias)[: x.shape[0]].float()

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor of the shared instance; a tied one twice."""
        yield self._embedding
        yield self._head
        if self._head_bias is not None:
            yield self._head_bias
        yield from self._norm.tensors()
        for layer in self.layers:
            yield from layer.tensors()

    @property
    def shared_bytes(self) -> int:
        """Device bytes of the shared instance."""
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in self.tensors()}.values())


def ops_for(device: torch.device) -> DecoderOps:
    """The device's own operations; Triton is imported only where it runs."""
    if device.type != "cuda":
        return TorchOps()
    from specter_core.model.ops_cuda import CudaOps

    return CudaOps()
