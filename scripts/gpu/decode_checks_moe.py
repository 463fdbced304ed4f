"""Checks of router, grouped experts and token kernels, in the manner of decode_checks.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.gpu.decode_checks import Check, Env, bit_mismatches, relative_error
from specter_core.model.config import RouterConfig
from specter_core.model.kernels.rope import RowTensors
from specter_core.model.kernels.router import route
from specter_core.model.kernels.tokens import ARGMAX_BLOCK, Margin, append_tokens, argmax, embed
from specter_core.model.router import softmax_top_k, sparsemixer
from specter_core.verify.kernels.combine_rows import combine_rows
from specter_core.verify.kernels.group_rows import group_rows
from specter_core.verify.kernels.grouped_ffn import DOWN_TILE, GATE_UP_TILE, GroupedTile, grouped_ffn


def router_checks(env: Env, experts: int, top_k: int, count: int) -> Iterator[Check]:
    """Ids, weights, ties, invalid rows and ELB counts of both routers."""
    valid = torch.arange(count, device=env.device) % 5 != 3
    zeros = torch.zeros(count, dtype=torch.int64, device=env.device)
    rows = RowTensors(zeros, valid, zeros, 1)
    normal = env.randn(count, experts + 1, dtype=torch.float32)
    tied = env.randint(0, 3, count, experts + 1).float()
    kinds: list[tuple[str, int, RouterConfig]] = [
        ("softmax", top_k, RouterConfig(scaling=1.5)),
        ("softmax, normalised", top_k, RouterConfig(normalise=True)),
        ("sparsemixer", 2, RouterConfig(jitter=0.01)),
    ]
    for kind, k, config in kinds:
        for data, logits in (("random", normal), ("tied", tied)):
            ids = torch.full((count, k), -7, dtype=torch.int64, device=env.device)
            weights = env.poison(count, k, dtype=torch.float32)
            counters = torch.ones(experts, dtype=torch.int32, device=env.device)
            route(logits, ids, weights, rows=rows, experts=experts, scaling=config.scaling,
                  normalise=config.normalise, jitter=config.jitter, counters=counters)  # fmt: skip
            scores = logits[:, :experts].cpu()
            if config.jitter is not None:
                wanted = sparsemixer(scores, config.jitter)
            else:
                wanted = softmax_top_k(torch.softmax(scores, dim=-1), k, config)
            ok = valid.cpu()
            name = f"router {kind} {experts}/{k} {data}"
            want_ids = torch.where(ok.unsqueeze(1), wanted.ids, -1)
            yield Check(f"{name} ids", float((ids.cpu() != want_ids).sum()), 0.0)
            yield Check(f"{name} weights", relative_error(weights.cpu()[ok], wanted.weights[ok]), 1e-5)
            used = torch.bincount(wanted.ids[ok].flatten(), minlength=experts) + 1
            yield Check(f"{name} counters", float((counters.cpu() != used).sum()), 0.0)
            halves = torch.stack([logits * 0.5, logits * 0.5])  # sums to the same bits
            again, weights_again = torch.zeros_like(ids), env.poison(count, k, dtype=torch.float32)
            gate = env.poison(count, dtype=torch.float32)
            route(halves, again, weights_again, rows=rows, experts=experts, scaling=config.scaling,
                  normalise=config.normalise, jitter=config.jitter, gate=gate)  # fmt: skip
            wrong = bit_mismatches(again, ids) + bit_mismatches(weights_again, weights)
            wrong += float((gate != logits[:, experts]).sum())
            yield Check(f"{name}: rows with other bits from partial sums", wrong, 0.0)


def swiglu_experts(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    x = x.double()
    return (F.silu(x @ gate.double().T) * (x @ up.double().T)) @ down.double().T


def grouped_checks(
    env: Env, experts: int, top_k: int, hidden: int, width: int, count: int,
    tiles: tuple[GroupedTile, GroupedTile] = (GATE_UP_TILE, DOWN_TILE),
) -> Iterator[Check]:  # fmt: skip
    """Hits from a slot table, misses from a list, any grouping and company: the same bits, the right values."""
    entry = -(-(3 * hidden * width) // 128) * 128 + 128
    buffer = env.randn(experts + 2, entry, scale=hidden**-0.5)
    buffer[:, 2 * hidden * width : 3 * hidden * width] *= (hidden / width) ** 0.5
    places = torch.randperm(experts + 2, generator=env.generator)[:experts]
    resident = torch.arange(experts) % 3 != 1
    table = torch.where(resident, places, -1).to(env.device, torch.int32)
    ids = torch.stack([torch.randperm(experts, generator=env.generator)[:top_k] for _ in range(count)])
    ids = ids.sort(dim=1).values
    if count > 2:
        ids[count // 2] = -1
        ids[: count // 2, 0] = 0  # one expert with many rows
    ids = ids.to(env.device)
    x = env.randn(count, hidden)
    weights = torch.rand(count, top_k, generator=env.generator).to(env.device)
    name = f"grouped {experts}/{top_k} {hidden}x{width} R={count}"

    def run(x: Tensor, ids: Tensor, groups: Sequence[Sequence[int]] | None) -> Tensor:
        rows = x.shape[0]
        members = torch.full((experts, count), -9, dtype=torch.int32, device=env.device)
        counts = torch.full((experts,), -9, dtype=torch.int32, device=env.device)
        group_rows(ids, members, counts)
        act, out = env.poison(rows, top_k, width), env.poison(rows, top_k, hidden, dtype=torch.float32)

        def launch(slots: Tensor, listed: Tensor | None) -> None:
            grouped_ffn(x, buffer, slots, members, counts, act, out, top_k=top_k, experts=listed,
                        gate_up_tile=tiles[0], down_tile=tiles[1])  # fmt: skip

        if groups is None:
            launch(table, None)
            groups = [[e for e in range(experts) if not resident[e]]]
        for group in groups:
            padded = torch.tensor([*group, -1], dtype=torch.int32)
            slots = torch.tensor([*places[list(group)].tolist(), -1], dtype=torch.int32)
            launch(slots.to(env.device), padded.to(env.device))
        return out

    out = run(x, ids, None)
    wanted = torch.zeros(count, top_k, hidden, dtype=torch.float64, device=env.device)
    for e in range(experts):
        payload = buffer[int(places[e]), : 3 * hidden * width].view(3, -1)
        at = (ids == e).nonzero()
        down = payload[2].view(hidden, width)
        wanted[at[:, 0], at[:, 1]] = swiglu_experts(
            x[at[:, 0]], payload[0].view(width, hidden), payload[1].view(width, hidden), down
        )
    live = ids >= 0
    yield Check(f"{name} rows", relative_error(out[live], wanted[live]), env.tolerance)
    yield Check(f"{name}: invalid pairs written", float((~torch.isnan(out[~live])).sum()), 0.0)
    order = torch.randperm(experts, generator=env.generator).tolist()
    cut = max(1, experts // 3)
    again = run(x, ids, [order[:cut], order[cut : 2 * cut], order[2 * cut :]])
    yield Check(f"{name}: pairs with other bits in other groups", bit_mismatches(again[live], out[live]), 0.0)
    wrong = 0.0
    chosen = torch.randperm(count, generator=env.generator)[:3].tolist()
    for r in chosen:
        keep = ids[r] >= 0
        if bool(keep.any()):
            wrong += bit_mismatches(run(x[r : r + 1], ids[r : r + 1], None)[0][keep], out[r][keep])
    yield Check(f"{name}: pairs with other bits alone", wrong, 0.0)
    total = combine_rows(out, weights, ids, env.poison(count, hidden, dtype=torch.float32))
    summed = torch.where(live.unsqueeze(2), out, 0.0).double() * weights.double().unsqueeze(2)
    yield Check(f"{name} combined", relative_error(total, summed.sum(dim=1)), 1e-5)


def token_checks(env: Env, vocab: int, hidden: int, count: int) -> Iterator[Check]:
    """Embedding, argmax with ties, append."""
    table, tokens = env.randn(vocab, hidden), env.randint(0, vocab, count)
    rows = embed(tokens, table, env.poison(count, hidden))
    yield Check(f"embed {vocab}x{hidden}", bit_mismatches(rows, table[tokens]), 0.0)
    parts = -(-vocab // ARGMAX_BLOCK) * count

    def parts_of_ids() -> Tensor:
        return torch.full((parts,), -9, dtype=torch.int32, device=env.device)

    def choose(logits: Tensor) -> Tensor:
        out = torch.full((logits.shape[0],), -7, dtype=torch.int64, device=env.device)
        return argmax(logits, out, env.poison(parts, dtype=torch.float32), parts_of_ids())

    logits = env.randint(-40, 4, count, vocab).float()
    logits[0] = -5.0
    best = logits.amax(dim=1, keepdim=True)
    first = torch.where(logits == best, torch.arange(vocab, device=env.device), vocab).amin(dim=1)
    yield Check(f"argmax {vocab}", float((choose(logits) != first).sum()), 0.0)
    lead = Margin(env.poison(count, dtype=torch.float32), env.poison(parts, dtype=torch.float32))
    chosen = torch.empty(count, dtype=torch.int64, device=env.device)
    finer = logits + env.randn(count, vocab).float()
    finer[0] = -5.0
    argmax(finer, chosen, env.poison(parts, dtype=torch.float32), parts_of_ids(), lead)
    two = finer.topk(2, dim=1).values
    yield Check(f"argmax {vocab}: its lead", bit_mismatches(lead.out[:, None], two[:, :1] - two[:, 1:]), 0.0)
    yield Check(f"argmax {vocab}: the same with its lead", float((chosen != choose(finer)).sum()), 0.0)
    yield Check(f"argmax {vocab} of NaN", float((choose(torch.full_like(logits, torch.nan)) != vocab - 1).sum()), 0.0)

    capacity = 7
    sequence = env.randint(0, 50, count, capacity)
    lengths = env.randint(1, capacity + 1, count)
    valid = env.randint(0, 3, count) > 0
    positions, context = lengths - 1, lengths.clone()
    want_sequence, want = sequence.clone(), [lengths.clone(), positions.clone(), context.clone()]
    for b in range(count):
        if valid[b]:
            if want[0][b] < capacity:
                want_sequence[b, want[0][b]] = tokens[b]
                want[0][b] += 1
            want[1][b] += 1
            want[2][b] += 1
    append_tokens(tokens, sequence, lengths, positions, context, valid)
    wrong = float((sequence != want_sequence).sum())
    wrong += sum(float((a != b).sum()) for a, b in zip((lengths, positions, context), want, strict=True))
    yield Check(f"append B={count}", wrong, 0.0)
