"""Makes the INT4 draft of a target checkpoint: its routed experts, symmetric 4-bit, group 128.

    python initialization/quantize_draft.py --model DIR --output DIR --calibration FILE
    python initialization/quantize_draft.py --model DIR --output DIR --method rtn

Method gptq (the paper's) runs GPTQModel's GPTQ over the calibration text, layer by layer, one expert in
memory at a time; a stopped job goes on at the layer where it was. Method rtn rounds to nearest and needs no
text. The folder's draft_card.json says which it was. A one-line JSON with the card ends the output.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch

from specter_core.draft import rtn
from specter_core.draft.draft_store import check_groups
from specter_core.draft.int4 import GROUP
from specter_core.draft.quantizing.calibration import load_calibration, load_tokenizer
from specter_core.draft.quantizing.draft_writer import DraftWriter
from specter_core.draft.quantizing.gptq import GptqModelQuantizer
from specter_core.draft.quantizing.layer_loop import CalibrationOps, LayerLoop, memory_bound_bytes
from specter_core.errors import UserError, exit_code
from specter_core.model.checkpoint import Checkpoint
from specter_core.model.config import ModelConfig
from specter_core.model.decoder import Decoder
from specter_core.model.experts_loader import ExpertReader, expert_dtype
from specter_core.types import ExpertKey


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    with redirect_stdout(sys.stderr):  # GPTQModel prints a banner and warnings
        card = quantize_draft(options)
    print(json.dumps(card))
    return 0


def quantize_draft(options: argparse.Namespace) -> dict[str, Any]:
    """Does the whole job and returns the card."""
    config = ModelConfig.from_file(options.model)
    check_groups(config)
    if options.device != "cpu" and not torch.cuda.is_available():
        raise UserError(f"device {options.device} is asked for, this machine has no CUDA: use --device cpu")
    weights = weights_hash(options.model)
    card: dict[str, Any] = {
        "method": options.method,
        "bits": 4,
        "group_size": GROUP,
        "sym": True,
        "desc_act": False,
        "family": config.family,
        "target_weights_sha256": weights,
    }
    make = _gptq if options.method == "gptq" else _rtn
    make(options, config, card)
    return card


def weights_hash(model_dir: Path) -> str:
    """SHA-256 over the names and SHA-256 of the folder's safetensors files, in order of name."""
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise UserError(f"{model_dir} holds no .safetensors file: give a folder in Hugging Face format")
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def _gptq(options: argparse.Namespace, config: ModelConfig, card: dict[str, Any]) -> None:
    if options.calibration is None:
        raise UserError("method gptq has no --calibration file, it needs one: give text, or choose --method rtn")
    quantizer = GptqModelQuantizer()
    text = load_calibration(
        options.calibration, load_tokenizer(options.model), options.samples, options.sequence_length
    )
    if int(text.tokens.max()) >= config.vocab_size:
        raise UserError(
            f"the tokenizer gives id {int(text.tokens.max())}, the model's vocabulary has {config.vocab_size}: "
            "put the model's own tokenizer beside it"
        )
    card |= {
        "gptqmodel_version": quantizer.version,
        "gptqmodel_settings": quantizer.settings,
        "calibration_file": text.file,
        "calibration_sha256": text.sha256,
        "samples": options.samples,
        "sequence_length": options.sequence_length,
        "min_tokens_per_expert": options.min_tokens,
    }
    writer = DraftWriter(options.output, config.moe_layers, card)
    decoder = Decoder.load(options.model, device=options.device, compute_dtype=torch.float32, ops=CalibrationOps())
    bound = memory_bound_bytes(config, decoder.shared_bytes, text.tokens.numel())
    _say(
        f"{config.family}: {len(config.moe_layers)} MoE layers of {config.num_experts} experts; "
        f"memory bound {bound / 2**30:.2f} GiB"
    )
    loop = LayerLoop(decoder, config, _reader(options.model, config).read, quantizer.quantize, options.min_tokens)
    loop.run(text.tokens.to(options.device), writer, _Progress(len(config.moe_layers)).layer)
    card["experts_with_borrowed_tokens"] = {
        str(layer): borrowed for layer, note in enumerate(writer.notes()) if (borrowed := note["borrowed"])
    }
    card["memory_bound_bytes"] = bound
    writer.finish(card)
    _say(f"peak resident memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


def _rtn(options: argparse.Namespace, config: ModelConfig, card: dict[str, Any]) -> None:
    experts = _reader(options.model, config)
    writer = DraftWriter(options.output, config.moe_layers, card)
    progress = _Progress(len(config.moe_layers))
    for layer in range(writer.done, len(config.moe_layers)):
        triples = []
        for expert in range(config.num_experts):
            name = f"expert {expert} of MoE layer {layer}"
            triples.append([rtn.quantize(part, name) for part in experts.read(ExpertKey(layer, expert))])
        writer.write_layer(layer, triples, {"borrowed": ""})
        progress.layer(layer, "rounded to nearest")
    writer.finish(card)


def _reader(model_dir: Path, config: ModelConfig) -> ExpertReader:
    checkpoint = Checkpoint(model_dir)
    return ExpertReader(checkpoint, config, expert_dtype(checkpoint, config))


class _Progress:
    """One line per finished layer, with the time left."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.start = time.perf_counter()
        self.first: int | None = None

    def layer(self, layer: int, note: str) -> None:
        self.first = layer if self.first is None else self.first
        passed = time.perf_counter() - self.start
        left = passed / (layer + 1 - self.first) * (self.layers - layer - 1)
        _say(f"MoE layer {layer + 1}/{self.layers}: {note}; {passed:.0f} s passed, {left:.0f} s left")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="INT4 draft of a target checkpoint's routed experts",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--model",
        type=Path,
        required=True,
        help="target checkpoint, Hugging Face format, tokenizer beside it",
    )
    parser.add_argument("--output", type=Path, required=True, help="draft folder to make")
    parser.add_argument(
        "--method", choices=("gptq", "rtn"), default="gptq", help="rtn needs neither text nor GPTQModel"
    )
    parser.add_argument("--calibration", type=Path, help=".txt, .jsonl or C4's .json.gz; for gptq")
    parser.add_argument("--samples", type=int, default=128, help="calibration sequences")
    parser.add_argument("--sequence-length", type=int, default=512, help="tokens per sequence")
    parser.add_argument(
        "--min-tokens",
        type=int,
        default=256,
        help="an expert that fewer tokens chose is calibrated on others of its layer too",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    return parser


if __name__ == "__main__":
    sys.exit(exit_code(main))
