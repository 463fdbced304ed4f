"""Checks of the two ends of a draft step, rows that end early among them; on a GPU or in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from scripts.gpu.decode_checks import Check, Env
from specter_core.draft.kernels.advance import Stopping, advance, begin_window


def draft_ends_checks(env: Env, batch: int, depth: int) -> Iterator[Check]:
    """Windows with `Stopping` and without, step by step against a loop over rows; report in device memory."""
    for least in (0.0, 0.5):
        yield from _window(env, batch, depth, least)


def _window(env: Env, batch: int, depth: int, least: float) -> Iterator[Check]:
    def integers(*shape: int) -> torch.Tensor:
        return torch.full(shape, -3, dtype=torch.int64, device=env.device)

    depths = [depth - b % 3 if b != 1 else 0 for b in range(batch)]
    depths[-1] = -1
    start = torch.tensor([range(40, 40 + batch), range(7, 7 + batch), depths], device=env.device)
    tokens, positions, context, ends, drafted = (integers(batch) for _ in range(5))
    valid = torch.zeros(batch, dtype=torch.uint8, device=env.device)
    taken = integers(batch, depth)
    lead, product = torch.zeros(batch, device=env.device), torch.zeros(batch, device=env.device)
    report = torch.zeros(depth, 1 + batch, dtype=torch.int32, device=env.device)
    stop = Stopping(lead, product, report, least, 4.0) if least else None
    begin_window(start, tokens, positions, context, valid, ends, drafted, stop)

    wanted = [[-3] * depth for _ in range(batch)]
    chance, count = [1.0] * batch, [0] * batch
    live = [d > 0 for d in depths]
    wrong = float((valid != torch.tensor(live, device=env.device)).sum())
    lines = []
    for step in range(depth + 1):  # the last one comes too late for every row
        chosen = env.randint(0, 99, batch)
        lead.copy_(env.randint(0, 12, batch) / 8)
        advance(chosen, taken, tokens, positions, context, valid, ends, drafted, stop)
        for b in [b for b in range(batch) if live[b]]:
            wanted[b][step] = int(chosen[b])
            chance[b] *= float(torch.sigmoid(4 * lead[b]))
            count[b] = step + 1
            live[b] = count[b] < depths[b] and (stop is None or chance[b] >= least)
            wrong += int(tokens[b]) != int(chosen[b]) or int(positions[b]) != 8 + b + step
            wrong += int(context[b]) != int(positions[b]) + 1
        lines.append([1, *live])
        wrong += float((valid != torch.tensor(live, device=env.device)).sum())
    last = max(count)
    wrong += float((drafted != torch.tensor(count, device=env.device)).sum())
    wrong += float((taken != torch.tensor(wanted, device=env.device)).sum())
    yield Check(f"window of {depth}, stop {least}: rows", wrong, 0.0)
    if stop is not None:
        told = torch.tensor(lines[:last], dtype=torch.int32, device=env.device)
        beyond = float(report[last:].abs().sum())
        yield Check(f"window of {depth}, stop {least}: report", float((report[:last] != told).sum()) + beyond, 0.0)
        some = sum(0 < n < d for n, d in zip(count, depths, strict=True))
        yield Check(f"window of {depth}, stop {least}: rows that ended early, less one", float(some == 0), 0.0)
