"""All routed experts of the draft, INT4, resident on one device (paper, section "Quantized Draft Model")."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from specter_core.draft import rtn
from specter_core.draft.gptq_reader import GptqFormat, read_matrix
from specter_core.draft.int4 import GROUP, Int4Matrix, pack, unpack
from specter_core.errors import UserError
from specter_core.model.checkpoint import Checkpoint
from specter_core.types import ExpertKey

CARD_NAME = "draft_card.json"
# Names of (gate, up, down) of expert e of decoder layer n in a draft folder, tried in order.
_NAMES = (
    ("model.layers.{n}.mlp.experts.{e}.", ("gate_proj", "up_proj", "down_proj")),
    ("model.layers.{n}.block_sparse_moe.experts.{e}.", ("w1", "w3", "w2")),
)


class ExpertShape(Protocol):
    """What the draft needs to know of a model; `ModelConfig` has it."""

    @property
    def hidden(self) -> int: ...
    @property
    def expert_width(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def moe_layers(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class DraftExperts:
    """INT4 codes and scales of every routed expert.

    gate_up: codes uint8 [L, E, 2I, H/2], scales float16 [L, E, 2I, H/128]; rows 0 … I-1 gate, I … 2I-1 up.
    down:    codes uint8 [L, E, H, I/2],  scales float16 [L, E, H, I/128].
    kind is the method that made them, "gptq" or "rtn"; card is the draft folder's draft_card.json.
    """

    gate_up: Int4Matrix
    down: Int4Matrix
    kind: str
    card: Mapping[str, Any]

    @property
    def layers(self) -> int:
        return self.gate_up.codes.shape[0]

    @property
    def experts(self) -> int:
        return self.gate_up.codes.shape[1]

    @property
    def hidden(self) -> int:
        return self.down.codes.shape[2]

    @property
    def width(self) -> int:
        return self.gate_up.codes.shape[2] // 2

    @property
    def bytes(self) -> int:
        """Device bytes of codes and scales: 4.125 bits per weight."""
        return self.gate_up.bytes + self.down.bytes

    @property
    def device(self) -> torch.device:
        return self.gate_up.codes.device

    def to(self, device: torch.device | str) -> DraftExperts:
        def moved(matrix: Int4Matrix) -> Int4Matrix:
            return Int4Matrix(matrix.codes.to(device), matrix.scales.to(device))

        return replace(self, gate_up=moved(self.gate_up), down=moved(self.down))

    def with_noise(self, sigma: float, seed: int) -> DraftExperts:
        """A worse draft for tests: every code moves by round(N(0, sigma²)), clamped to -8 … 7."""
        generator = torch.Generator().manual_seed(seed)

        def noisy(matrix: Int4Matrix) -> Int4Matrix:
            codes = unpack(matrix.codes.cpu())
            moves = torch.randn(codes.shape, generator=generator).mul_(sigma).round_()
            codes = pack((codes + moves).clamp_(-8, 7).to(torch.int8))
            return Int4Matrix(codes.to(matrix.codes.device), matrix.scales)

        card = {**self.card, "noise": {"sigma": sigma, "seed": seed}}
        return replace(self, gate_up=noisy(self.gate_up), down=noisy(self.down), card=card)


def load_draft(draft_dir: Path | str, config: ExpertShape, device: torch.device | str = "cpu") -> DraftExperts:
    """Reads the routed experts of a GPTQ-format folder, and only these, into their place on `device`.

    A folder with draft_card.json says how it was made; without one (a draft published by others) it is
    GPTQ as its quantization config says. UserError for a format, shape or name that does not fit `config`.
    """
    draft_dir = Path(draft_dir)
    check_groups(config)
    form = GptqFormat.from_dir(draft_dir)
    card = _read_card(draft_dir, form)
    checkpoint = Checkpoint(draft_dir)
    prefix, parts = _names_in(checkpoint.names, draft_dir, config)
    hidden, width = config.hidden, config.expert_width
    shapes = ((width, hidden), (width, hidden), (hidden, width))

    def read(key: ExpertKey) -> list[Int4Matrix]:
        stem = prefix.format(n=config.moe_layers[key.layer], e=key.expert)
        return [
            read_matrix(checkpoint, stem + part, outputs, inputs, form)
            for part, (outputs, inputs) in zip(parts, shapes, strict=True)
        ]

    return _fill(config, read, str(card["method"]), card, device)


def quantize_rtn(
    weights: Callable[[ExpertKey], Sequence[Tensor]], config: ExpertShape, device: torch.device | str = "cpu"
) -> DraftExperts:
    """Round-to-nearest draft of the experts `weights(key)` returns: gate [I, H], up [I, H], down [H, I]."""
    check_groups(config)

    def read(key: ExpertKey) -> list[Int4Matrix]:
        name = f"expert {key.expert} of MoE layer {key.layer}"
        return [rtn.quantize(weight, name) for weight in weights(key)]

    card = {"method": "rtn", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
    return _fill(config, read, "rtn", card, device)


def draft_bytes(config: ExpertShape) -> int:
    """Device bytes of the INT4 routed experts, without loading them."""
    weights = len(config.moe_layers) * config.num_experts * 3 * config.hidden * config.expert_width
    return weights // 2 + 2 * (weights // GROUP)


def check_groups(config: ExpertShape) -> None:
    """UserError unless both expert dimensions are whole groups."""
    for name, size in (("hidden size", config.hidden), ("expert width", config.expert_width)):
        if size % GROUP:
            raise UserError(f"{name} is {size}, the INT4 draft needs multiples of {GROUP}: use another model")


def _fill(
    config: ExpertShape,
    read: Callable[[ExpertKey], Sequence[Int4Matrix]],
    kind: str,
    card: Mapping[str, Any],
    device: torch.device | str,
) -> DraftExperts:
    layers, experts = len(config.moe_layers), config.num_experts
    hidden, width = config.hidden, config.expert_width

    def empty(outputs: int, inputs: int) -> Int4Matrix:
        return Int4Matrix(
            torch.empty(layers, experts, outputs, inputs // 2, dtype=torch.uint8, device=device),
            torch.empty(layers, experts, outputs, inputs // GROUP, dtype=torch.float16, device=device),
        )

    gate_up, down = empty(2 * width, hidden), empty(hidden, width)
    for layer in range(layers):
        for expert in range(experts):
            gate, up, below = read(ExpertKey(layer, expert))
            for part in range(2):  # codes, scales
                gate_up[part][layer, expert, :width] = gate[part]
                gate_up[part][layer, expert, width:] = up[part]
                down[part][layer, expert] = below[part]
    return DraftExperts(gate_up, down, kind, card)


def _names_in(names: Iterable[str], draft_dir: Path, config: ExpertShape) -> tuple[str, tuple[str, ...]]:
    present = set(names)
    first = config.moe_layers[0]
    for prefix, parts in _NAMES:
        stem = prefix.format(n=first, e=0)
        if f"{stem}{parts[0]}.qweight" in present:
            extra = f"{prefix.format(n=first, e=config.num_experts)}{parts[0]}.qweight"
            if extra in present:
                raise UserError(
                    f"{draft_dir} holds {extra}, the model has {config.num_experts} experts per layer: "
                    "use the draft that belongs to the model"
                )
            return prefix, parts
    wanted = _NAMES[0][0].format(n=first, e=0)
    raise UserError(
        f"{draft_dir} holds no {wanted}gate_proj.qweight, the model's first MoE layer is {first}: "
        "make a draft with initialization/quantize_draft.py"
    )


def _read_card(draft_dir: Path, form: GptqFormat) -> dict[str, Any]:
    path = draft_dir / CARD_NAME
    if not path.is_file():
        return {"method": "gptq", "producer": form.producer}
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
        method = card["method"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error!r}): fetch it again") from error
    if method not in ("gptq", "rtn"):
        raise UserError(f"{path}: method is {method!r}, known are 'gptq' and 'rtn': fetch it again")
    return dict(card)
