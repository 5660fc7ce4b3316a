"""Telemetry of a GPU while steps run on it: power, energy, clocks and what slowed them, links, memory errors.

A :class:`Telemetry` is a context around timed steps. It reads NVIDIA's management library in a thread of its
own, so that a driver that hangs, or a GPU that falls off the bus, costs the row a line and not the cell. Each
rank reads the GPU that it runs on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any, Self

from spbench.bench.measure.devices.nvml import (
    ClockSample,
    NvmlProblem,
    fall,
    gpu_handle,
    newer_or_older,
    nvml,
    reading,
    reason_names,
)

#: seconds of rest between two samples; one takes 40 ms where PCIe's throughput is read, 20 ms each way
INTERVAL_S = 0.1
#: seconds to wait for the library: until it is open, and at the end of the steps
_OPENING_S, _CLOSING_S = 30.0, 2.0
#: bytes of the units in which PCIe's throughput and NVLink's are given; of the first the library's
#: documentation says KB, but not which
_KB, _KIB = 1000, 1024
_ALL_LINKS = 2**32 - 1

Read = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class _Quantity:
    """One thing that is sampled: which statistics of it a row has, in which unit."""

    name: str
    unit: str
    statistics: Sequence[str]
    read: Read


def _clock(kind: str, function: str = "nvmlDeviceGetClockInfo") -> Read:
    return lambda lib, gpu: getattr(lib, function)(gpu, getattr(lib, kind))


def _pcie(kind: str) -> Read:
    return lambda lib, gpu: lib.nvmlDeviceGetPcieThroughput(gpu, getattr(lib, kind)) * _KB


def _ecc(kind: str) -> Read:
    return lambda lib, gpu: lib.nvmlDeviceGetTotalEccErrors(gpu, getattr(lib, kind), lib.NVML_VOLATILE_ECC)


def _nvlink(kind: str) -> Read:
    def read(lib: Any, gpu: Any) -> int | None:
        (value,) = lib.nvmlDeviceGetFieldValues(gpu, [(getattr(lib, kind), _ALL_LINKS)])
        return value.value.ullVal * _KIB if value.nvmlReturn == lib.NVML_SUCCESS else None

    return read


def _temperature(lib: Any, gpu: Any) -> int:
    names = "nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature"
    return newer_or_older(lib, *names, gpu, lib.NVML_TEMPERATURE_GPU)


def _reasons(lib: Any, gpu: Any) -> int:
    names = "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"
    return newer_or_older(lib, *names, gpu)


def _utilization(of: str) -> Read:
    return lambda lib, gpu: getattr(lib.nvmlDeviceGetUtilizationRates(gpu), of)


_QUANTITIES = (
    _Quantity("power", "w", ("mean", "max"), lambda lib, gpu: lib.nvmlDeviceGetPowerUsage(gpu) / 1e3),
    _Quantity("sm_clock", "mhz", ("min", "mean", "max"), _clock("NVML_CLOCK_SM")),
    _Quantity("memory_clock", "mhz", ("min", "max"), _clock("NVML_CLOCK_MEM")),
    _Quantity("temperature", "celsius", ("max",), _temperature),
    _Quantity("gpu_utilization", "percent", ("mean",), _utilization("gpu")),
    _Quantity("memory_utilization", "percent", ("mean",), _utilization("memory")),
    _Quantity("pcie_sent", "bytes_per_s", ("mean",), _pcie("NVML_PCIE_UTIL_TX_BYTES")),
    _Quantity("pcie_received", "bytes_per_s", ("mean",), _pcie("NVML_PCIE_UTIL_RX_BYTES")),
)
#: what only grows: a row has how much it grew
_COUNTERS: dict[str, Read] = {
    "energy_j": lambda lib, gpu: lib.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3,
    "nvlink_sent_bytes": _nvlink("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX"),
    "nvlink_received_bytes": _nvlink("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX"),
    "ecc_corrected_errors": _ecc("NVML_MEMORY_ERROR_TYPE_CORRECTED"),
    "ecc_uncorrected_errors": _ecc("NVML_MEMORY_ERROR_TYPE_UNCORRECTED"),
}
_STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {"min": min, "mean": mean, "max": max}


@dataclass
class _Seen:
    """What the thread has read. A sample has the value of each quantity by name, the ``reasons`` of the
    clocks, and ``at_s``, seconds since the thread began."""

    gpu_name: str | None = None
    highest_sm_clock_mhz: int | None = None
    samples: list[dict[str, float | None]] = field(default_factory=list)
    begin: dict[str, float | None] = field(default_factory=dict)
    end: dict[str, float | None] = field(default_factory=dict)
    refused: dict[str, None] = field(default_factory=dict)
    problem: str | None = None


class Telemetry:
    """Watches one GPU from ``with`` to its end; after that, :meth:`found` has what a row says of it.

    Args:
        uuid: of the GPU, as nvidia-smi -L prints it or without the prefix; None watches nothing.
        interval_s: rest between two samples.
    """

    def __init__(self, uuid: str | None, interval_s: float = INTERVAL_S):
        self._uuid, self._interval_s = uuid, interval_s
        self._seen = _Seen()
        self._ready, self._stop = threading.Event(), threading.Event()
        # a daemon: the library may never answer
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._begin_s = self._seconds = 0.0

    def __enter__(self) -> Self:
        if self._uuid is not None:
            self._thread.start()
            if not self._ready.wait(_OPENING_S):
                self._seen.problem = f"NVML did not answer for {_OPENING_S:g} s"
        self._begin_s = time.perf_counter()
        return self

    def __exit__(self, *exception: object) -> None:
        self._seconds = time.perf_counter() - self._begin_s
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSING_S)
        if self._thread.is_alive():
            self._seen.problem = self._seen.problem or f"NVML did not answer for {_CLOSING_S:g} s"

    @property
    def samples(self) -> int:
        """How many samples have been taken so far."""
        return len(self._seen.samples)

    @property
    def is_watching(self) -> bool:
        """Whether more samples can come."""
        return self._thread.is_alive()

    def found(self, steps: int) -> dict[str, Any]:
        """What was seen, as plain data; None where the GPU, the driver or the user's rights do not give it.
        Empty where nothing was watched.

        ``energy_source``: "counter", the GPU's own, or "power", the mean power times the seconds. The counter
        advances many times a second, not continuously, so steps of less than a second in all are inexact.
        ``clocks_fell``: see :func:`fall`; ``clocks_note`` says so in a line. ``clock_reasons``: all that held
        clocks down in any sample. ``problem``: a line about what could not be read.

        Args:
            steps: that have run inside of the context; each has an equal part of the energy.
        """
        if self._uuid is None:
            return {}
        seen = self._seen
        row: dict[str, Any] = {"gpu_uuid": self._uuid, "gpu_name": seen.gpu_name}
        row |= {"watched_s": self._seconds, "samples": len(seen.samples)}
        for quantity in _QUANTITIES:
            values = [v for s in seen.samples if (v := s[quantity.name]) is not None]
            for statistic in quantity.statistics:
                value = _STATISTICS[statistic](values) if values else None
                row[f"{quantity.name}_{statistic}_{quantity.unit}"] = value
        row |= self._grown() | {"energy_source": "counter"}
        if row["energy_j"] is None:
            known = row["power_mean_w"] is not None and seen.problem is None
            row["energy_j"] = row["power_mean_w"] * self._seconds if known else None
            row["energy_source"] = "power" if known else None
        row["energy_per_step_j"] = None if row["energy_j"] is None else row["energy_j"] / steps
        clocks = self._clock_samples()
        fell, lowest = fall(clocks, seen.highest_sm_clock_mhz)
        row |= {"clock_reasons": reason_names(clocks), "clocks_fell": fell}
        row["clocks_note"] = lowest.note(self._seconds) if lowest else None
        row["problem"] = seen.problem or self._refusals()
        return row

    def _grown(self) -> dict[str, float | None]:
        grown: dict[str, float | None] = {}
        for name in _COUNTERS:
            begin, end = self._seen.begin.get(name), self._seen.end.get(name)
            grown[name] = None if begin is None or end is None else end - begin
        return grown

    def _refusals(self) -> str | None:
        return f"no permission to read: {', '.join(self._seen.refused)}" if self._seen.refused else None

    def _clock_samples(self) -> list[ClockSample]:
        return [
            ClockSample(s["at_s"] or 0.0, clock, int(s["reasons"] or 0))
            for s in self._seen.samples
            if (clock := s["sm_clock"]) is not None
        ]

    def _watch(self) -> None:
        """The thread: all calls of the library."""
        try:
            assert self._uuid is not None
            with nvml() as library:
                self._sample_until_stopped(library, gpu_handle(library, self._uuid))
        except NvmlProblem as problem:
            self._seen.problem = str(problem)
        except Exception as error:  # a measured step is worth more than its telemetry
            self._seen.problem = f"telemetry failed: {type(error).__name__}: {error}"
        finally:
            self._ready.set()

    def _sample_until_stopped(self, library: Any, gpu: Any) -> None:
        seen, began = self._seen, time.perf_counter()
        seen.gpu_name = self._read("name", lambda lib, gpu: lib.nvmlDeviceGetName(gpu), library, gpu)
        seen.highest_sm_clock_mhz = self._read(
            "sm_clock", _clock("NVML_CLOCK_SM", "nvmlDeviceGetMaxClockInfo"), library, gpu
        )
        seen.begin = {name: self._read(name, read, library, gpu) for name, read in _COUNTERS.items()}
        self._ready.set()
        while not self._stop.wait(self._interval_s):
            seen.samples.append(self._sample(library, gpu, began))
        seen.end = {name: self._read(name, read, library, gpu) for name, read in _COUNTERS.items()}
        if not seen.samples:  # of steps that are over before the first is due
            seen.samples.append(self._sample(library, gpu, began))

    def _sample(self, library: Any, gpu: Any, began: float) -> dict[str, float | None]:
        sample: dict[str, float | None] = {"at_s": time.perf_counter() - began}
        for quantity in _QUANTITIES:
            sample[quantity.name] = self._read(quantity.name, quantity.read, library, gpu)
        sample["reasons"] = self._read("clock_reasons", _reasons, library, gpu)
        return sample

    def _read(self, name: str, read: Read, library: Any, gpu: Any) -> Any:
        return reading(library, read, library, gpu, on_refusal=lambda: self._seen.refused.setdefault(name))


def telemetry_of(device_index: int | None) -> Telemetry:
    """Telemetry of a CUDA device of this process; of nothing for None, or where torch has no such device.

    The index is one among CUDA_VISIBLE_DEVICES, in CUDA's order; the management library knows the same GPU by
    its UUID.
    """
    import torch

    if device_index is None or device_index >= torch.cuda.device_count():
        return Telemetry(None)
    return Telemetry(str(torch.cuda.get_device_properties(device_index).uuid))
