"""What a card does while a worker runs, seen from outside: NVML sampled in the harness's own process."""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

from harness.gpu_guard import gpu_handle
from harness.system import NAN

INTERVAL_S = 0.02
"""50 samples per second."""


class Lap(NamedTuple):
    """Between two calls. peak_bytes: most memory in use less the level before the worker; energy_j of the whole card,
    idle power included. status: empty, or why something is missing."""

    peak_bytes: int | None
    energy_j: float
    samples: int
    status: str


class DeviceMeter:
    """Samples one card in a thread from `open` to `close`. Without NVML every lap says so in its status.

    The worker's level is zero at `open`, so open it before the worker starts. Not safe for several callers.
    """

    def __init__(self, gpu: str | None, *, nvml: Any = None, interval_s: float = INTERVAL_S) -> None:
        self._gpu, self._interval_s = gpu, interval_s
        self._nvml = nvml
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._handle: Any = None
        self._base = self._peak = self._samples = 0
        self._joules, self._power_w, self._power_at = 0.0, NAN, 0.0
        self._counter_mj: int | None = None
        self.status = ""

    def open(self) -> DeviceMeter:
        if self._nvml is None:
            import pynvml

            self._nvml = pynvml
        try:
            self._nvml.nvmlInit()
            self._handle = gpu_handle(self._nvml, self._gpu)
            self._base = self._peak = self._used()
        except self._nvml.NVMLError as error:
            self.status = f"no NVML ({error}): device memory and energy are not measured"
            return self
        self._counter_mj = self._counter()
        self._thread = threading.Thread(target=self._run, name="device-meter", daemon=True)
        self._thread.start()
        return self

    def lap(self) -> Lap:
        """What happened since the last lap, or since `open`; the next one begins now."""
        if self._thread is None:
            return Lap(None, NAN, 0, self.status)
        with self._lock:
            self._sample()
            counter = self._counter()
            if counter is not None and self._counter_mj is not None:
                joules, status = (counter - self._counter_mj) / 1e3, ""
            else:
                joules, status = self._joules, "energy from sampled power"
            if self._power_w != self._power_w and counter is None:
                joules, status = NAN, "the card tells neither energy nor power"
            found = Lap(max(0, self._peak - self._base), joules, self._samples, status)
            self._counter_mj, self._joules, self._samples = counter, 0.0, 0
            self._peak = self._used()
        return found

    def close(self) -> None:
        """Idempotent."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None
            self._nvml.nvmlShutdown()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            with self._lock:
                self._sample()

    def _sample(self) -> None:
        """Memory always; power only where the card has no energy counter."""
        self._peak = max(self._peak, self._used())
        self._samples += 1
        if self._counter_mj is None:
            now = time.monotonic()
            try:
                watts = self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3
            except self._nvml.NVMLError:
                return
            if self._power_w == self._power_w:
                self._joules += (watts + self._power_w) / 2 * (now - self._power_at)
            self._power_w, self._power_at = watts, now

    def _used(self) -> int:
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def _counter(self) -> int | None:
        try:
            return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        except self._nvml.NVMLError:
            return None
