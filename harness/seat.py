"""A worker in its place on a card, with the meter that watches the card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.device_meter import DeviceMeter
from harness.system import RequestRecord
from harness.worker_process import WorkerProcess

Serves = tuple[str, str, str | None]
"""Model, system and interpreter of a worker."""


@dataclass(slots=True)
class Seat:
    """serves: what the worker may be given again. peak_bytes: most device memory since
    the setting was loaded, warm-up included; None without a meter."""

    worker: WorkerProcess
    serves: Serves
    meter: DeviceMeter | None = None
    peak_bytes: int | None = None

    def begin(self) -> int | None:
        """Peaks count from now on; returns the one until now."""
        self.note()
        found, self.peak_bytes = self.peak_bytes, None
        return found

    def note(self) -> float:
        """Takes what the meter saw into the peak; returns its energy, J."""
        if self.meter is None:
            return float("nan")
        lap = self.meter.lap()
        if lap.peak_bytes is not None:
            self.peak_bytes = max(self.peak_bytes or 0, lap.peak_bytes)
        return lap.energy_j

    def metered(self, records: Sequence[RequestRecord]) -> list[RequestRecord]:
        """The records of one batch that has just ended, with the card's memory and the batch's energy, divided evenly;
        as they are where there is no meter."""
        energy_j = self.note()
        if self.peak_bytes is None:
            return list(records)
        each = energy_j / len(records)
        return [replace(record, peak_device_bytes=self.peak_bytes, energy_j=each) for record in records]

    def close(self) -> None:
        self.worker.close()
        if self.meter is not None:
            self.meter.close()
