"""When a row drafts no further (`draft_stop`): how likely the target is to choose as the draft does."""

from __future__ import annotations

import torch
from torch import Tensor

SHARPNESS = 4.0
"""Per unit of logit between the draft's two best tokens. Fitted to the reference models with GPTQ drafts, where the
target shares the draft's greedy choice in about sigmoid(4 x difference) of the cases."""


def agreement(logits: Tensor) -> Tensor:
    """Estimated chance that the target's best token is the draft's: logits [B, V] float32 -> [B] float32.

    The probability of the draft's token itself tells less: of several continuations that are all likely, the draft's is
    the target's too, as long as it leads.
    """
    best = logits.topk(2, dim=-1).values
    return torch.sigmoid(SHARPNESS * (best[:, 0] - best[:, 1]))
