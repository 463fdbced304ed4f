"""A synthetic model that was opened plain -> the same with nested experts and its round-to-nearest draft."""

from __future__ import annotations

import sys

import torch

from harness.synthetic.store import draft_from_store, draft_layers
from specter_core.draft.int4 import Int4Matrix
from specter_core.nested.nesting import nested_store, new_report, sanitised_layer, write_nested
from specter_core.opening import LoadedModel


def nest(model: LoadedModel, target: torch.device, *, noise: float = 0.0) -> None:
    """Fills in the draft and puts a store of residuals, which this process owns, in the place of the plain one.

    On CUDA draft and residuals are made on the device, layer by layer. Payloads carry no CRC, as the plain ones.
    """
    plain = model.store
    if model.runtime is None:
        model.draft = draft_from_store(plain, target, noise=noise, locked=True)
        model.store, report = nested_store(plain, model.draft, device=target, checksum=False)
    else:
        from specter_core.draft.kernels.block_path import BlockExpertPath
        from specter_core.draft.kernels.blocks import canonical_of_blocks

        config, report = model.decoder.config, new_report(plain)
        made = enumerate(draft_layers(plain, target, noise=noise))
        path = BlockExpertPath.from_layers(
            (sanitised_layer(plain, layer, codes, report, device=target) for layer, codes in made),
            config.hidden, config.expert_width, config.top_k, target, pdl=model.runtime.pdl,
        )  # fmt: skip

        def codes_of(layer: int) -> tuple[Int4Matrix, Int4Matrix]:
            return canonical_of_blocks(path.gate_up[layer], halves=True), canonical_of_blocks(path.down[layer])

        runtime = model.runtime
        model.store = write_nested(plain, codes_of, report, device=target, checksum=False, register=runtime.register)
        model.fused_draft, model.fused_kind = path, "rtn"
        runtime.close()
        runtime.register(model.store.segment)
        torch.cuda.empty_cache()
    plain.discard()
    print(report, file=sys.stderr, flush=True)
