"""The card seen from outside: peaks less the level before, energy from counter or power, and who else is on it."""

from __future__ import annotations

import os
import time

import pytest

from harness.device_meter import DeviceMeter
from harness.gpu_guard import GpuProcess, check_free, gpu_handle, wait_for_rest
from harness.seat import Seat
from harness.system import RequestRecord
from specter_core.errors import UserError


class NVMLError(Exception):
    pass


class FakeNvml:
    """used: bytes by call; energy and power by call; None: not told by this card."""

    NVMLError = NVMLError

    def __init__(self, energy=True, power=True, works=True):
        self.used, self.joules, self.watts = 100, 5.0, 300.0
        self.energy, self.power, self.works = energy, power, works
        self.open = 0

    def nvmlInit(self):
        if not self.works:
            raise NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, index):
        return ("index", index)

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return ("uuid", uuid)

    def nvmlDeviceGetMemoryInfo(self, handle):
        return type("Memory", (), {"used": self.used})

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        if not self.energy:
            raise NVMLError("Not Supported")
        return self.joules * 1e3

    def nvmlDeviceGetPowerUsage(self, handle):
        if not self.power:
            raise NVMLError("Not Supported")
        return self.watts * 1e3


def opened(nvml, interval_s=0.001):
    return DeviceMeter(None, nvml=nvml, interval_s=interval_s).open()


def until(condition):
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    assert condition()


def test_a_peak_between_two_laps_is_seen_and_counts_from_the_level_before():
    nvml = FakeNvml()
    meter = opened(nvml)
    nvml.used = 900
    until(lambda: meter._peak == 900)
    nvml.used, nvml.joules = 400, 12.5
    first = meter.lap()
    second = meter.lap()
    meter.close()
    assert (first.peak_bytes, first.energy_j, first.status) == (800, 7.5, "") and first.samples > 0
    assert second.peak_bytes == 300 and second.energy_j == 0.0
    assert nvml.open == 0


def test_without_an_energy_counter_power_is_integrated_and_said():
    start = time.monotonic()  # the meter measures from its opening
    meter = opened(FakeNvml(energy=False))
    until(lambda: meter._samples > 20)
    lap = meter.lap()
    meter.close()
    assert 0 < lap.energy_j <= 300.0 * (time.monotonic() - start) + 1e-9 and "power" in lap.status


def test_a_card_that_tells_nothing_and_a_missing_driver_are_said():
    meter = opened(FakeNvml(energy=False, power=False))
    lap = meter.lap()
    meter.close()
    assert lap.energy_j != lap.energy_j and "neither" in lap.status and lap.peak_bytes == 0
    absent = opened(FakeNvml(works=False))
    assert "no NVML" in absent.status and absent.lap().peak_bytes is None and absent.lap().status == absent.status
    absent.close()


def test_a_seat_adds_the_cards_memory_and_shares_a_batchs_energy():
    class Worker:
        closed = False

        def close(self):
            self.closed = True

    nvml = FakeNvml()
    seat = Seat(Worker(), ("m", "s", None), opened(nvml))
    nvml.used = 2100
    assert seat.begin() == 2000
    nvml.used, nvml.joules = 1100, 25.0
    seat.begin()
    nvml.joules = 35.0
    records = [RequestRecord(str(i), (1,), 1.0, 1.0, 1.0, peak_device_bytes=7) for i in range(2)]
    metered = seat.metered(records)
    seat.close()
    assert [r.peak_device_bytes for r in metered] == [1000, 1000] and [r.energy_j for r in metered] == [5.0, 5.0]
    assert seat.worker.closed
    blind = Seat(Worker(), ("m", "s", None), None)
    assert blind.metered(records) == records


def test_a_process_that_is_not_ours_is_refused_with_its_pid_and_size():
    there = [GpuProcess(os.getpid(), 5), GpuProcess(4242, 300 * 2**20)]
    with pytest.raises(UserError, match=r"process 4242 \(300 MiB\)"):
        check_free("0", processes=lambda gpu: there, patience_s=0.0)
    check_free("0", processes=lambda gpu: there[:1], patience_s=0.0)


def test_a_process_that_is_just_ending_is_waited_for():
    seen = [[GpuProcess(4242, None)], []]
    check_free(None, processes=lambda gpu: seen.pop(0), patience_s=5.0)
    assert not seen


def test_a_card_is_named_as_cuda_names_it():
    assert gpu_handle(FakeNvml(), None) == ("index", 0) and gpu_handle(FakeNvml(), "3") == ("index", 3)
    assert gpu_handle(FakeNvml(), "GPU-abc") == ("uuid", "GPU-abc")


def test_a_level_counts_once_it_has_stopped_falling() -> None:
    """What an ended process still holds is not where the next one starts from."""
    levels = iter([30, 30, 22, 9, 5, *[5] * 1000])
    assert wait_for_rest(lambda: next(levels), still_s=0.02, pause_s=0.001) == 5
    falling = iter(range(10_000, 0, -1))
    assert wait_for_rest(lambda: next(falling), still_s=0.02, patience_s=0.05, pause_s=0.001) < 10_000
