"""The trace on a device: spans in the device's own time, on the host's clock, apart from what the host did."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import ModuleType

import pytest
from matplotlib.text import Text

from figures import fig08_iteration, fig09_timeline, fig12_verification, traces
from specter_core.device_timeline import DeviceTimeline
from specter_core.memory.link import BusyInterval, Priority
from specter_core.trace import COMPUTE, HOST, LINK, Trace, joined
from specter_core.types import ExpertKey

TRACES = Path(__file__).resolve().parents[1] / "results" / "h200" / "traces"


class Timer:
    """An event of a device whose stream runs `lag_ns` behind the host and whose clock began at another time."""

    def __init__(self, runtime: Late) -> None:
        self._runtime = runtime
        self.at_ns = -1

    def record(self) -> None:
        self.at_ns = time.perf_counter_ns() + self._runtime.lag_ns - 77_000_000_000
        self._runtime.recorded += 1

    def ms_after(self, other: Timer) -> float:
        return (self.at_ns - other.at_ns) / 1e6


class Late:
    """As much of a runtime as a timeline needs."""

    def __init__(self) -> None:
        self.lag_ns = 0
        self.recorded = self.made = self.waited = 0

    def timer(self) -> Timer:
        self.made += 1
        return Timer(self)

    def synchronize(self) -> None:
        self.waited += 1


def timeline(runtime: Late) -> DeviceTimeline:
    return DeviceTimeline(runtime)  # type: ignore[arg-type]


def test_spans_lie_on_the_hosts_clock_at_the_devices_time() -> None:
    runtime = Late()
    found = timeline(runtime)
    runtime.lag_ns = 5_000_000_000
    before = time.perf_counter_ns()
    with found.span("work", layer=3) as args:
        args["more"] = 1
    after = time.perf_counter_ns()
    runtime.lag_ns = 0
    (span,) = found.resolve()
    assert span.name == "work" and span.args == {"layer": 3, "more": 1}
    slack = 50_000_000  # the two clocks are read one after the other
    assert before + 5_000_000_000 - slack <= span.start_ns <= span.end_ns <= after + 5_000_000_000 + slack


def test_timers_are_used_again_and_a_span_is_reported_once() -> None:
    runtime = Late()
    found = timeline(runtime)
    for _ in range(5):
        with found.span("a"), found.span("b"):
            pass
        assert [s.name for s in found.resolve()] == ["b", "a"]
    assert runtime.made == 5  # the anchor, and two for each of two open spans
    assert found.resolve() == []


def test_a_device_trace_keeps_host_and_device_apart(tmp_path: Path) -> None:
    trace = Trace()
    trace.device = timeline(Late())
    with trace.span("plan", drafted=2), trace.on_device("draft step", token=1), trace.compute("attention 0"):
        pass
    assert [e.name for e in trace.events] == ["plan"], "device spans are read after the window"
    trace.settle()
    trace.add_link([BusyInterval(5, 9, ExpertKey(1, 2), Priority.DEMAND, 64)])
    tracks = {e.name: e.track for e in trace.events}
    assert tracks == {"plan": HOST, "draft step": COMPUTE, "attention 0": COMPUTE, "demand 1.2": LINK}
    trace.write(tmp_path / "t.json", model="m")
    named = {e["args"]["name"] for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e["ph"] == "M"}
    assert named == {COMPUTE, LINK, HOST}


def test_without_a_device_the_hosts_time_is_computation() -> None:
    trace = Trace()
    with trace.on_device("only there"), trace.compute("attention 0"), trace.span("verify"):
        pass
    trace.settle()
    assert {(e.name, e.track) for e in trace.events} == {("attention 0", COMPUTE), ("verify", COMPUTE)}


@pytest.mark.parametrize("attached", [False, True])
def test_a_disabled_trace_records_nothing(attached: bool) -> None:
    runtime = Late()
    trace = Trace(enabled=False)
    trace.device = timeline(runtime) if attached else None
    recorded = runtime.recorded
    with trace.on_device("a"), trace.compute("b"), trace.span("c"):
        pass
    trace.settle()
    assert not trace.events and runtime.recorded == recorded


@pytest.mark.parametrize("figure", [fig08_iteration, fig09_timeline, fig12_verification])
def test_figures_are_drawn_from_a_gpus_trace(figure: ModuleType) -> None:
    """results/h200/traces: three tracks, device times; host events of the same names are not computation."""
    orders = getattr(figure, "ORDERS", ("expertwise",))
    tables = [traces.events(TRACES / f"{order}.json") for order in orders]
    for table in tables:
        assert {"compute", "link", "host"} <= set(table["track"])
        found = traces.windows(table)
        assert len(found) == len(table.attrs["windows"]) and (found["draft_end_ms"] <= found["verify_ms"]).all()
        assert set(found["steps"]) == {table.attrs["depth"]}
    drawn = figure.figure(*tables)
    assert len(drawn.axes) >= 1
    words = " ".join(t.get_text() for t in drawn.findobj(Text))
    assert "device cuda" in words and ("waiting for an expert" in words or figure is fig08_iteration)


def test_pieces_of_one_expert_are_one_event_unless_something_came_between() -> None:
    key, other, why = ExpertKey(1, 2), ExpertKey(1, 3), Priority.DEMAND
    pieces = [BusyInterval(0, 10, key, why, 8), BusyInterval(12, 20, key, why, 4), BusyInterval(20, 30, other, why, 8)]
    pieces += [BusyInterval(31, 40, key, why, 1), BusyInterval(90_000, 90_010, key, why, 1)]
    found = [(p.start_ns, p.end_ns, p.key, p.bytes) for p in joined(pieces)]
    assert found == [(0, 20, key, 12), (20, 30, other, 8), (31, 40, key, 1), (90_000, 90_010, key, 1)]
