"""What a decoder needs to know about a model, read from Hugging Face `config.json` by its family."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from specter_core.errors import UserError

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class NormKind(Enum):
    RMS = "rms"
    LAYER = "layer"


class RopeKind(Enum):
    DEFAULT = "default"
    YARN = "yarn"
    LONGROPE = "longrope"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding over `dim` channels. `scale` multiplies cos and sin (yarn's attention factor; 1
    otherwise).

    interleaved: pairs are (0, 1), (2, 3), … as in DeepSeek; else (i, i + dim/2). The longrope fields hold
    dim/2 factors each; a row whose context is longer than `original_positions` uses the long ones and
    `long_scale`.
    """

    dim: int
    theta: float
    kind: RopeKind = RopeKind.DEFAULT
    interleaved: bool = False
    scale: float = 1.0
    factor: float = 1.0
    original_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    short_scale: float = 1.0
    long_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): widths of its projections."""

    kv_rank: int
    q_rank: int | None
    nope_dim: int
    rope_dim: int
    v_dim: int

    @property
    def latent_dim(self) -> int:
        """Width of one cached entry: latent, then the rotated shared key."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """How the top-k experts and their weights come from the router's scores.

    jitter: sparsemixer's tie width (PhiMoE). groups > 1: DeepSeek-V2's group-limited top-k.
    """

    scaling: float = 1.0
    normalise: bool = False
    groups: int = 1
    top_groups: int = 1
    jitter: float | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model, in the symbols of the paper. Decoder layers count 0 … layers-1; MoE layers count 0 … L-1.

    moe_layers: the decoder layer of each MoE layer. shared_width, dense_width: 0 where the model has none.
    dtype: as stored. max_positions: longest sequence (prompt + generated), in tokens.
    """

    family: str
    vocab_size: int
    hidden: int
    layers: int
    moe_layers: tuple[int, ...]
    num_experts: int
    top_k: int
    expert_width: int
    shared_width: int
    dense_width: int
    heads: int
    kv_heads: int
    head_dim: int
    attention_scale: float
    norm: NormKind
    norm_eps: float
    qkv_bias: bool
    output_bias: bool
    head_bias: bool
    rope: RopeConfig
    router: RouterConfig
    eos_ids: tuple[int, ...]
    bos_id: int | None
    max_positions: int
    dtype: torch.dtype
    tie_embeddings: bool
    mla: MLAConfig | None = None

    def __post_init__(self) -> None:
        assert self.heads % self.kv_heads == 0
        if not 1 <= self.top_k <= self.num_experts:
            raise UserError(f"top-k {self.top_k} of {self.num_experts} experts is impossible; correct config.json")
        if self.expert_width % 2 or self.shared_width % 2 or self.dense_width % 2 or self.rope.dim % 2:
            raise UserError(
                f"odd widths ({self.expert_width}, shared {self.shared_width}, dense {self.dense_width},"
                f" rope {self.rope.dim}) are not supported; use even ones"
            )

    @property
    def expert_params(self) -> int:
        """Parameters of one routed expert: 3·H·I."""
        return 3 * self.hidden * self.expert_width

    @property
    def moe_index(self) -> dict[int, int]:
        """Decoder layer -> MoE layer."""
        return {layer: index for index, layer in enumerate(self.moe_layers)}

    @staticmethod
    def from_file(path: str | Path) -> ModelConfig:
        """Read `config.json` (or the folder that holds it). UserError when absent, malformed or
        unsupported.
        """
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"{path} does not exist; give a folder in Hugging Face format") from None
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read as JSON ({error}); download it again") from None
        if not isinstance(raw, dict):
            raise UserError(f"{path} holds a {type(raw).__name__}, not an object; download it again")
        return ModelConfig.from_dict(raw)

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> ModelConfig:
        """Config of a target model from the content of `config.json`; UserError when it is not a supported
        one.
        """
        from specter_core.model.families import family_for

        family = family_for(raw)
        quantized = raw.get("quantization_config")
        if quantized:
            method = quantized.get("quant_method", "unknown") if isinstance(quantized, dict) else quantized
            raise UserError(
                f"this {family.name} checkpoint is quantized ({method}), a target must be bfloat16, float16"
                " or float32; pass it as the draft and give the original checkpoint as the model"
            )
        return family.read_config(raw)


class Fields:
    """Typed look-ups in `config.json` that end in one-line UserErrors."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._raw.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int):
            raise UserError(f"config.json: {name} is {value!r}, expected an integer; correct the file")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._raw.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UserError(f"config.json: {name} is {value!r}, expected a number; correct the file")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._raw.get(name)
        return default if value is None else bool(value)

    def optional(self, name: str) -> Any:
        return self._raw.get(name)

    def require_silu(self) -> None:
        act = self._raw.get("hidden_act", "silu")
        if act != "silu":
            raise UserError(f"config.json: hidden_act {act!r} is not supported, known: 'silu'; use another model")

    def eos_ids(self) -> tuple[int, ...]:
        value = self._raw.get("eos_token_id")
        if value is None:
            return ()
        return tuple(value) if isinstance(value, list) else (int(value),)

    def bos_id(self) -> int | None:
        value = self._raw.get("bos_token_id")
        return None if value is None else int(value)

    def dtype(self) -> torch.dtype:
        name = str(self._raw.get("dtype") or self._raw.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        if name not in _DTYPES:
            raise UserError(f"config.json: dtype {name!r} is not supported, known: {', '.join(_DTYPES)}; convert it")
        return _DTYPES[name]

    def rope_parameters(self) -> dict[str, Any]:
        """`rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (before), as one dict."""
        found: dict[str, Any] = dict(self._raw.get("rope_scaling") or {})
        found.update(self._raw.get("rope_parameters") or {})
        theta = self._raw.get("rope_theta")
        if theta is not None:
            found.setdefault("rope_theta", theta)
        original = self._raw.get("original_max_position_embeddings")
        if original is not None:
            found["original_max_position_embeddings"] = original
        found.setdefault("rope_type", found.get("type", "default"))
        return found
