"""From what an engine counted to what the harness records; for every system built on Specter's engine."""

from __future__ import annotations

from collections.abc import Sequence

from harness.system import NAN, RequestRecord
from specter_core.engine import SpecterEngine
from specter_core.types import GenerationRun, RequestResult, WindowStats


def records(run: GenerationRun, engine: SpecterEngine, *, variant: str) -> list[RequestRecord]:
    """One record per request of the batch. Counters of windows belong to the whole batch and are repeated in
    each record; bytes are divided evenly, prefill included."""
    windows, batch = run.windows, len(run.results)
    used = sum(w.h2d_bytes_used for w in windows) + engine.prefill_stats.h2d_bytes_used
    moved = sum(w.h2d_bytes for w in windows) + engine.prefill_stats.h2d_bytes
    written = sum(w.d2h_bytes for w in windows) + engine.prefill_stats.d2h_bytes
    throughput = _throughput(run.results)
    return [
        RequestRecord(
            request_id=result.request_id,
            tokens=tuple(result.tokens),
            ttft_ms=result.ttft_ms,
            tpot_ms=result.tpot_ms,
            throughput=throughput,
            variant=variant,
            dtype=str(engine.decoder.config.dtype).removeprefix("torch."),
            encoding=engine.options.experts_encoding,
            depth=engine.options.depth,
            slots=sum(engine.slots.slots_per_layer) / len(engine.slots.slots_per_layer),
            acceptance=result.acceptance,
            tokens_per_window=_ratio(sum(w.committed for w in windows) / batch, len(windows)),
            access_hit_rate=_ratio(sum(w.access_hits for w in windows), sum(w.accesses for w in windows)),
            coverage=_ratio(_sum(windows, "hits"), _sum(windows, "distinct")),
            coverage_ceiling=_ceiling(windows),
            distinct_experts=_ratio(_sum(windows, "distinct"), sum(len(w.distinct) for w in windows)),
            prefetch_precision=_ratio(
                sum(w.prefetch_planned_used for w in windows), sum(w.prefetch_planned for w in windows)
            ),
            prefetch_recall=_ratio(sum(w.absent_planned for w in windows), sum(w.absent for w in windows)),
            h2d_bytes=moved // batch,
            h2d_bytes_used=used // batch,
            d2h_bytes=written // batch,
            link_utilisation=_utilisation(windows, engine.experts.loader.link.rate_bytes_per_s),
            stall_ms=_stalls(windows),
            peak_device_bytes=engine.slots.total,
        )
        for result in run.results
    ]


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else NAN


def _sum(windows: Sequence[WindowStats], name: str) -> int:
    return sum(sum(getattr(w, name)) for w in windows)


def _ceiling(windows: Sequence[WindowStats]) -> float:
    """Mean of min(1, M / distinct) over layer-windows, weighted by distinct experts, so that coverage <=
    ceiling."""
    pairs = [pair for w in windows for pair in zip(w.coverage_ceiling, w.distinct, strict=True)]
    return _ratio(sum(c * d for c, d in pairs), sum(d for _, d in pairs))


def _throughput(results: Sequence[RequestResult]) -> float:
    """Generated tokens of the batch over the wall time until its last request ends, tokens/s."""
    start, end = min(r.start_ns for r in results), max(r.token_times_ns[-1] for r in results)
    return sum(len(r.tokens) for r in results) / ((end - start) / 1e9)


def _utilisation(windows: Sequence[WindowStats], rate_bytes_per_s: float) -> float:
    """Bytes moved over what the standalone link would have moved in the windows' link spans."""
    span_s = sum(w.link_span_ms for w in windows) / 1e3
    return _ratio(sum(w.h2d_bytes + w.d2h_bytes for w in windows), rate_bytes_per_s * span_s)


def _stalls(windows: Sequence[WindowStats]) -> dict[str, float]:
    causes = dict.fromkeys(cause for w in windows for cause in w.stall_ms)
    return {cause: sum(w.stall_ms.get(cause, 0.0) for w in windows) for cause in causes}
