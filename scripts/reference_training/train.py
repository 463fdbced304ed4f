"""`train`: one model, from token files to a model folder, inside a wall-time budget."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .card import write_card
from .data import Corpus
from .evaluate import evaluate
from .export import reload_error, round_to_bf16, save_model
from .model import TrainableMoe, make_config
from .optim import Optimiser, orthogonalise
from .rope import rope_tables
from .settings import Settings, Training, load_settings
from .sizes import LIMIT_BYTES, folder_sizes

Loss = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
PROGRESS_S = 15.0


class Clock:
    """Elapsed share of the run: by steps when their number is given, else by wall time since the start."""

    def __init__(self, started_s: float, training: Training, reserve_s: float) -> None:
        self.steps = training.steps
        self.end_s = started_s + training.minutes * 60 - reserve_s
        self.first_s: float | None = None

    def share(self, step: int) -> float:
        if self.steps is not None:
            return step / self.steps
        now = time.monotonic()
        if self.first_s is None or now <= self.first_s:
            return 0.0
        return min(1.0, (now - self.first_s) / max(1e-9, self.end_s - self.first_s))


class LongropeRows:
    """Rotary tables of a batch: the one pair, or a pair drawn per row among short, long and crossing."""

    def __init__(self, model: TrainableMoe, tokens: int, device: torch.device, seed: int) -> None:
        pairs = rope_tables(model.config, tokens)
        self.cos = torch.stack([p[0] for p in pairs]).to(device)  # [1 or 3, S, D/2]
        self.sin = torch.stack([p[1] for p in pairs]).to(device)
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.cos.shape[0] == 1:
            return self.cos, self.sin
        share = torch.tensor([0.5, 0.25, 0.25])
        pick = torch.multinomial(share, rows, replacement=True, generator=self.generator).to(self.cos.device)
        return self.cos[pick], self.sin[pick]


def first_loss(
    model: TrainableMoe, device: torch.device, compile_it: bool, example: tuple[Any, ...]
) -> tuple[Loss, bool]:
    """The loss function: compiled if that works on `example`, backward included, else eager with a notice."""
    if compile_it:
        try:
            compiled = torch.compile(model.loss, dynamic=False)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                nll, balance, _ = compiled(*example)
            (nll + balance).backward()
            model.zero_grad(set_to_none=True)
            return compiled, True
        except Exception as error:  # any backend or toolchain trouble: train eagerly instead
            print(
                f"torch.compile failed, training eagerly: {type(error).__name__}: {str(error)[:300]}",
                flush=True,
            )
            torch._dynamo.reset()
            model.zero_grad(set_to_none=True)
    return model.loss, False


def train_model(
    settings: Settings, work: Path, device: torch.device, compile_it: bool, started_s: float
) -> tuple[TrainableMoe, dict[str, Any]]:
    """Train; returns the model with float32 master weights and the run's figures."""
    training = settings.training
    torch.manual_seed(settings.seed)
    torch.set_float32_matmul_precision("high")
    corpus = Corpus(work, device, settings.seed)
    model = TrainableMoe(make_config(settings)).to(device)
    rope = LongropeRows(model, training.sequence_tokens, device, settings.seed)
    optimiser = Optimiser(model, training, fused=device.type == "cuda")
    reserve_s = min(30.0, 0.25 * training.minutes * 60)
    clock = Clock(started_s, training, reserve_s)

    def batch() -> tuple[torch.Tensor, ...]:
        return (*corpus.batch(training.batch_rows, training.sequence_tokens), *rope.draw(training.batch_rows))

    loss, compiled = first_loss(model, device, compile_it, batch())
    if compiled and device.type == "cuda":
        optimiser.muon.orthogonalise = torch.compile(orthogonalise, dynamic=False)
    print(
        f"{settings.name}: first step after {time.monotonic() - started_s:.0f} s, compiled {compiled}",
        flush=True,
    )
    step, last_print_s, first_nll, nll_value = 0, 0.0, None, float("nan")
    while True:
        share = clock.share(step)
        if share >= 1.0:
            break
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            nll, balance, loads = loss(*batch())
        (nll + training.aux_loss * balance).backward()
        try:
            optimiser.step(share)
        except Exception as error:
            if optimiser.muon.orthogonalise is orthogonalise:
                raise
            print(
                f"compiled Muon failed, stepping eagerly: {type(error).__name__}: {str(error)[:200]}",
                flush=True,
            )
            optimiser.muon.orthogonalise = orthogonalise
            optimiser.step(share)
        step += 1
        if step == 3 and clock.first_s is None:  # compilation is over
            if device.type == "cuda":
                torch.cuda.synchronize()
            clock.first_s = time.monotonic()
        if step % 4 == 0 and device.type == "cuda":
            torch.cuda.synchronize()
        now = time.monotonic()
        if now - last_print_s >= PROGRESS_S or first_nll is None:
            nll_value = nll.item()
            first_nll = nll_value if first_nll is None else first_nll
            rate = (step - 3) * training.batch_rows * training.sequence_tokens / max(1e-9, now - (clock.first_s or now))
            print(
                f"{settings.name}: {now - started_s:4.0f} s {100 * share:3.0f}% step {step} "
                f"nll {nll_value:.3f} balance {balance.item():.3f} "
                f"load max {loads.max().item():.2f} {max(0.0, rate) / 1e3:.0f} k tokens/s, "
                f"{max(0.0, clock.end_s - now):.0f} s left",
                flush=True,
            )  # fmt: skip
            if nll_value != nll_value:
                raise RuntimeError(f"{settings.name}: loss is not a number at step {step}")
            last_print_s = now
    nll_value = nll.item()
    figures = {
        "steps": step,
        "tokens": step * training.batch_rows * training.sequence_tokens,
        "train_seconds": time.monotonic() - (clock.first_s or started_s),
        "first_nll": first_nll,
        "last_nll": nll_value,
        "compiled": compiled,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
    }
    return model, figures


def train_command(args: argparse.Namespace) -> None:
    """Train, round to BF16, evaluate that, save, reload, write the card and a report beside the folder."""
    started_s = time.monotonic() - float(os.environ.get("REFERENCE_STARTED_AGO_S", "0"))
    settings = load_settings(args.config)
    changes = {
        "minutes": args.minutes,
        "steps": args.steps,
        "batch_rows": args.batch_rows,
        "sequence_tokens": args.sequence_tokens,
    }
    training = dataclasses.replace(settings.training, **{k: v for k, v in changes.items() if v is not None})
    settings = dataclasses.replace(settings, training=training)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model, figures = train_model(settings, args.work, device, not args.no_compile and device.type == "cuda", started_s)
    round_to_bf16(model)
    corpus = Corpus(args.work, torch.device("cpu"), settings.seed)
    tables = rope_tables(model.config, 512)[0]
    held_out = evaluate(model, corpus, tables, device, 32_768 if device.type == "cuda" else 1_024)
    model = model.cpu()
    save_model(model, settings, args.work, args.output)
    figures["reload_error"] = reload_error(model, args.output, corpus.valid[:128].view(1, -1))
    if figures["reload_error"] > 1e-4:
        raise RuntimeError(f"{args.output} reloads with logits off by {figures['reload_error']:.2e}, more than 1e-4")
    report = {"name": settings.name, "seed": settings.seed, **figures, "held_out": held_out}
    write_card(args.output, settings, corpus.manifest, report)
    report["sizes"] = folder_sizes(args.output)
    if report["sizes"]["total_bytes"] > LIMIT_BYTES:
        raise RuntimeError(
            f"{args.output}: {report['sizes']['total_bytes']} bytes with the draft, more than {LIMIT_BYTES}"
        )
    (args.output.parent / f"{settings.name}.json").write_text(json.dumps(report, indent=1) + "\n")
    print(
        f"{settings.name}: done after {time.monotonic() - started_s:.0f} s, {figures['steps']} steps, held-out "
        f"perplexity {held_out['perplexity']:.2f}, {held_out['bits_per_byte']:.3f} bits/byte, "
        f"load {held_out['load_min']:.2f}..{held_out['load_max']:.2f}, "
        f"{report['sizes']['total_bytes']} bytes with the draft",
        flush=True,
    )
