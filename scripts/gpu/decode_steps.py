"""Whole passes of the shared instance at full width with random weights, all but the routed experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from scripts.gpu.decode_checks import Check, Env, bit_mismatches
from scripts.gpu.decode_shapes import Case, Launch, Maker, Shape, norm_of
from specter_core.model.config import MLAConfig, ModelConfig, NormKind, RopeConfig, RouterConfig
from specter_core.model.fused_pass import FusedPass
from specter_core.model.fused_weights import FusedWeights, GqaWeights, HeadWeights, LayerWeights, MlaWeights
from specter_core.model.kernels.rope import RopeTables
from specter_core.model.kernels.tiles import Preset
from specter_core.state.kv_cache import KVCache


def config_of(shape: Shape, dtype: torch.dtype) -> ModelConfig:
    dense = 1 if shape.dense else 0
    mla = MLAConfig(shape.rank, None, shape.nope, shape.rope, shape.head_dim) if shape.rank else None
    return ModelConfig(
        family=shape.name, vocab_size=shape.vocab, hidden=shape.hidden, layers=shape.moe_layers + dense,
        moe_layers=tuple(range(dense, shape.moe_layers + dense)), num_experts=shape.experts, top_k=shape.top_k,
        expert_width=shape.width, shared_width=shape.shared, dense_width=shape.dense, heads=shape.heads,
        kv_heads=shape.kv_heads, head_dim=shape.head_dim, attention_scale=0.1,
        norm=NormKind.LAYER if shape.layer_norm else NormKind.RMS, norm_eps=1e-6, qkv_bias=shape.qkv_bias,
        output_bias=False, head_bias=False, rope=RopeConfig(shape.rope, 10000.0), mla=mla,
        router=RouterConfig(jitter=shape.jitter), eos_ids=(), bos_id=None, max_positions=4096, dtype=dtype,
        tie_embeddings=False,
    )  # fmt: skip


def weights_of(shape: Shape, config: ModelConfig, make: Maker) -> FusedWeights:
    h, heads, d = shape.hidden, shape.heads, shape.head_dim

    def matrix(out: int, width: int) -> torch.Tensor:
        return make.randn(out, width, scale=width**-0.5)

    def attention() -> GqaWeights | MlaWeights:
        if not shape.rank:
            qkv = (heads + 2 * shape.kv_heads) * d
            return GqaWeights(matrix(qkv, h), make.randn(qkv) if shape.qkv_bias else None, matrix(h, heads * d), None)
        down = heads * (shape.nope + shape.rope) + shape.rope + shape.rank
        key_up = make.randn(heads, shape.nope, shape.rank, scale=shape.nope**-0.5)
        value_up = make.randn(heads, shape.rank, d, scale=shape.rank**-0.5)
        gain = make.randn(shape.rank)
        return MlaWeights(matrix(down, h), None, gain, 1e-6, key_up, value_up, matrix(h, heads * d), None)

    def layer(index: int) -> LayerWeights:
        moe = config.moe_index.get(index)
        width = shape.dense if moe is None else shape.shared
        gated = moe is not None and shape.qkv_bias and width > 0
        return LayerWeights(
            moe, norm_of(shape, make), attention(), norm_of(shape, make),
            None if moe is None else matrix(shape.experts + int(gated), h),
            matrix(2 * width, h) if width else None, matrix(h, width) if width else None, gated,
        )  # fmt: skip

    head = HeadWeights(make.randn(shape.vocab, h), norm_of(shape, make), matrix(shape.vocab, h), None)
    return FusedWeights(tuple(layer(i) for i in range(config.layers)), head)


def weight_bytes(weights: FusedWeights) -> int:
    """What one pass reads: every matrix but the embedding, once."""
    found = weights.head.head.nbytes
    for layer in weights.layers:
        for part in (layer.router, layer.gate_up, layer.mlp_down):
            found += 0 if part is None else part.nbytes
        if isinstance(layer.attention, GqaWeights):
            found += layer.attention.qkv.nbytes + layer.attention.output.nbytes
        else:
            own = layer.attention
            found += own.down.nbytes + own.key_up.nbytes + own.value_up.nbytes + own.output.nbytes
    return found


def step_cases(shape: Shape, make: Maker) -> Iterator[Case]:
    """One draft token and a 17-row verification at context 160 and 4096: everything but the routed experts."""
    config = config_of(shape, make.dtype)
    weights = weights_of(shape, config, make)
    for context in (160, 4096):
        for rows, preset, pdl in (
            (1, Preset.DRAFT, False), (1, Preset.DRAFT, True), (17, Preset.TARGET, False), (17, Preset.TARGET, True)
        ):  # fmt: skip

            def build(
                copies: int, rows: int = rows, preset: Preset = preset, context: int = context, pdl: bool = pdl
            ) -> list[Launch]:
                kv = KVCache(config, 1, context, make.device, make.dtype)
                angles = [make.randn(1, kv.capacity, shape.rope, dtype=torch.float32) for _ in range(2)]
                tables = RopeTables(*angles, bool(shape.rank), 1 << 30)
                step = FusedPass(weights, config, kv, tables, rows, context, preset, pdl=pdl)
                position = torch.arange(context - rows, context, device=make.device)
                step.positions.copy_(position)
                step.context.copy_(position + 1)
                step.valid.fill_(True)
                counters = torch.zeros(config.num_experts, dtype=torch.int32, device=make.device)

                def launch() -> None:
                    step.embed()
                    for index, layer in enumerate(weights.layers):
                        step.attend(index)
                        if layer.moe_index is None:
                            step.dense(index)
                        else:
                            step.route(index, counters)
                            step.combine(index)
                    step.head()
                    step.choose()

                return [launch] * copies

            yield Case(
                f"whole pass, no routed experts ctx={context}{' PDL' if pdl else ''}",
                rows,
                weight_bytes(weights),
                build,
            )


def pass_checks(shape: Shape, env: Env) -> Iterator[Check]:
    """Two layers at full width: logits, experts and KV of T rows at once have the bits of T passes of one row."""
    small = dataclasses.replace(shape, moe_layers=2, vocab=4099)
    make = Maker(env.device, env.dtype)
    config = config_of(small, env.dtype)
    weights = weights_of(small, config, make)
    angles = [make.randn(1, 512, small.rope, dtype=torch.float32) for _ in range(2)]
    tables = RopeTables(*angles, bool(small.rank), 1 << 30)
    start = 55

    def fresh(batch: int) -> KVCache:
        kv = KVCache(config, batch, 500, env.device, env.dtype)
        for buffer, old in zip((*kv.keys, *kv.values, *kv.latents), history, strict=True):
            buffer.copy_(old.expand_as(buffer))
        return kv

    template = KVCache(config, 1, 500, env.device, env.dtype)
    history = [env.randn(*t.shape) for t in (*template.keys, *template.values, *template.latents)]
    steps = 33
    tokens = env.randint(0, small.vocab, steps)

    def run(kv: KVCache, first: int, count: int, bucket: int, pdl: bool = False) -> torch.Tensor:
        """Rows first … first+count-1 of every sequence; sequence b > 0 has other tokens. -> bits of sequence 0."""
        step = FusedPass(weights, config, kv, tables, count, bucket, Preset.TARGET, pdl=pdl)
        for b in range(kv.batch):
            part = slice(b * count, (b + 1) * count)
            step.tokens[part] = (tokens[first : first + count] + 7 * b) % small.vocab
            step.positions[part] = torch.arange(start + first, start + first + count, device=env.device) + 3 * b
        step.context.copy_(step.positions + 1)
        step.valid.fill_(True)
        if kv.batch > 1:
            step.valid[-1] = False
        step.embed()
        chosen = []
        for index, layer in enumerate(weights.layers):
            step.attend(index)
            if layer.moe_index is None:
                step.dense(index)
            else:
                step.route(index)
                step.routed.copy_(step.normed.float() * step.weights.sum(dim=1, keepdim=True).clamp_max(1.0))
                chosen.append(step.ids[:count].float())
                step.combine(index)
        step.head()
        step.choose()
        return torch.cat([step.logits[:count], step.chosen[:count, None].float(), *chosen], dim=1)

    alone = fresh(1)
    wanted = torch.cat([run(alone, t, 1, start + steps) for t in range(steps)])
    yield Check(f"{shape.name}: NaN in logits", float(torch.isnan(wanted).sum()), 0.0)
    plans = [(1, 33, 88, False), (1, 17, 500, False), (3, 5, 128, False), (2, 33, 500, False), (1, 2, 500, False)]
    if env.device == "cuda":
        plans += [(1, 1, 500, True), (1, 17, 128, True), (3, 5, 500, True)]
    for batch, count, bucket, pdl in plans:
        kv = fresh(batch)
        found = torch.cat([run(kv, t, min(count, steps - t), bucket, pdl) for t in range(0, steps, count)])
        name = f"{shape.name} pass B={batch} T={count} bucket={bucket}{' PDL' if pdl else ''}"
        yield Check(f"{name}: rows with other bits than alone", bit_mismatches(found, wanted), 0.0)
        pairs = zip((*kv.keys, *kv.values, *kv.latents), (*alone.keys, *alone.values, *alone.latents), strict=True)
        wrong = sum(bit_mismatches(a[0, :500], b[0, :500]) for a, b in pairs)
        yield Check(f"{name}: KV entries with other bits than alone", wrong, 0.0)
