"""Telemetry of a GPU while steps run on it: power, energy, clocks and reasons for low ones, links, errors.

A :class:`Telemetry` is a context around timed steps. It reads NVIDIA's management library in a thread of its
own, so that a driver that hangs, or a GPU that falls off the bus, adds a line to the row but does not fail
the cell. Each rank reads the GPU that it runs on.

The library, which nvidia-ml-py opens, comes with the driver and needs no CUDA build of torch. A single
missing reading is None; where nothing can be read, an :class:`NvmlProblem` of one line is raised.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Self

from spbench.bench.yaml_files import read_yaml

#: what is read of a GPU, and the errors of NVIDIA's library; the file explains its parts
_TABLE = read_yaml(Path(__file__).with_suffix(".yaml"))


class NvmlProblem(Exception):
    """Nothing can be read; the text is one line: the problem (``what``) and the ``remedy``."""

    def __init__(self, what: str, remedy: str):
        super().__init__(f"{what}: {remedy}")
        self.what, self.remedy = what, remedy


class Nvml:
    """The library, open inside ``with``; its functions and constants are called by their names.

    Raises:
        NvmlProblem: on entry, if the library cannot be used; on a reading, if none is possible any more.
    """

    def __enter__(self) -> Self:
        try:
            import pynvml
        except ImportError as error:
            raise NvmlProblem("nvidia-ml-py is not installed", "pip install nvidia-ml-py") from error
        self._library = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise self._problem(error) from error
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(self._library.NVMLError):
            self._library.nvmlShutdown()

    def constant(self, name: str) -> Any:
        """A constant of the library; None if this version of nvidia-ml-py lacks it."""
        return getattr(self._library, name, None)

    def read(self, functions: str, *arguments: Any, on_refusal: Callable[[], object] | None = None) -> Any:
        """The result of a function; None if this GPU, driver or nvidia-ml-py lacks the function, or the user
        may not call it; in the last case ``on_refusal`` is called.

        Args:
            functions: names as "newer|older": the first function that driver and nvidia-ml-py have is called.
            arguments: the function's arguments; a text is the name of a constant.
        """
        library = self._library
        *newer, oldest = functions.split("|")
        try:
            values = [getattr(library, each) if isinstance(each, str) else each for each in arguments]
            for name in filter(lambda name: hasattr(library, name), newer):
                with suppress(library.NVMLError_FunctionNotFound):
                    return getattr(library, name)(*values)
            return getattr(library, oldest)(*values)
        except library.NVMLError as error:
            if error.value in {self.constant(name) for name in _TABLE["fatal"]}:
                raise self._problem(error) from error
            if on_refusal is not None and error.value == library.NVML_ERROR_NO_PERMISSION:
                on_refusal()
        except AttributeError:  # of an older nvidia-ml-py
            pass
        return None

    def gpus(self) -> list[Any]:
        """The handles of all GPUs, in the library's order; None for a GPU without a handle."""
        count = self.read("nvmlDeviceGetCount") or 0
        return [self.read("nvmlDeviceGetHandleByIndex", index) for index in range(count)]

    def gpu(self, uuid: str) -> Any:
        """The handle of the GPU, or of the MIG instance of one, with that UUID.

        Args:
            uuid: with the prefix "GPU-" or "MIG-", as nvidia-smi -L prints it, or without, as CUDA gives it.

        Raises:
            NvmlProblem: there is no such GPU, or it cannot be used.
        """
        library = self._library
        prefixes = ("",) if uuid.startswith(("GPU-", "MIG-")) else ("GPU-", "MIG-")
        for prefix in prefixes:
            try:
                return library.nvmlDeviceGetHandleByUUID(prefix + uuid)
            except library.NVMLError as error:
                problem = self._problem(error)
                if error.value not in (library.NVML_ERROR_NOT_FOUND, library.NVML_ERROR_INVALID_ARGUMENT):
                    break
        raise problem

    def _problem(self, error: Any) -> NvmlProblem:
        for name, (what, remedy) in _TABLE["meanings"].items():
            if self.constant(name) == error.value:
                return NvmlProblem(what, remedy)
        return NvmlProblem(f"NVML says {error}", "see nvidia-smi")


#: seconds between two samples; a sample takes 40 ms, of which reading PCIe's throughput is 20 ms each way
INTERVAL_S = 0.1
#: seconds to wait until the library is open, and until the thread ends after the steps
_OPENING_S, _CLOSING_S = 30.0, 2.0
_ALL_LINKS = 2**32 - 1

#: a clock below this share of the possible clock has fallen; smaller changes are steps of the governor
FALLEN = 0.95
_STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {"min": min, "mean": mean, "max": max}


@dataclass(frozen=True)
class _Quantity:
    """A quantity that is read from the GPU.

    Attributes:
        name: the name in rows, without the statistic and the unit; for a counter the whole name.
        function: the library's function, see :meth:`Nvml.read`; ``arguments`` follow the GPU.
        statistics: statistics of the samples in ``unit``; empty for a counter, of which a row has the growth.
        times, over: the factor and the divisor from the library's unit to that of rows.
        attribute: the attribute of the function's result that is the value; "": the result itself.
    """

    name: str
    function: str
    arguments: Sequence[str] = ()
    unit: str = ""
    statistics: Sequence[str] = ()
    times: int = 1
    over: int = 1
    attribute: str = ""

    def read(self, library: Nvml, gpu: Any, on_refusal: Callable[[], object]) -> Any:
        """The quantity's value in the unit of rows; None where the value cannot be read."""
        if self.function == "nvmlDeviceGetFieldValues":
            return self._field(library, gpu, on_refusal)
        value = library.read(self.function, gpu, *self.arguments, on_refusal=on_refusal)
        value = getattr(value, self.attribute, None) if self.attribute else value
        return self._in_unit(value)

    def _field(self, library: Nvml, gpu: Any, on_refusal: Callable[[], object]) -> Any:
        """The sum over all links of a counter that each link has; None where it cannot be read."""
        if (number := library.constant(self.arguments[0])) is None:
            return None
        fields = library.read(self.function, gpu, [(number, _ALL_LINKS)], on_refusal=on_refusal)
        is_there = bool(fields) and fields[0].nvmlReturn == library.constant("NVML_SUCCESS")
        return self._in_unit(fields[0].value.ullVal) if is_there else None

    def _in_unit(self, value: Any) -> Any:
        if value is None:
            return None
        return value * self.times / self.over if self.over > 1 else value * self.times


#: the words for the bits of NVML's clocks event reasons; the bit of an idle GPU; and the bits of reasons that
#: slow a busy GPU without a user's request
_REASONS: dict[int, str] = _TABLE["reasons"]
_IDLE, _SLOWING = _TABLE["idle"], {*_TABLE["slowing"]}
#: the quantities that are sampled; the counters, which only grow; and the quantities that are read once
_QUANTITIES, _COUNTERS, _ONCE = (
    [_Quantity(**each) for each in _TABLE[kind]] for kind in ("sampled", "counters", "once")
)


class Telemetry:
    """Watches one GPU inside ``with``; afterwards :meth:`summary` returns the fields of a row.

    Args:
        uuid: the GPU's UUID, as nvidia-smi -L prints it or without the prefix; None watches nothing.
        interval_s: seconds between two samples.
    """

    def __init__(self, uuid: str | None, interval_s: float = INTERVAL_S):
        self._uuid, self._interval_s = uuid, interval_s
        self._ready, self._stop = threading.Event(), threading.Event()
        # a daemon, because the library may never answer
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._begin_s = self._seconds = 0.0
        self._gpu_name: str | None = None
        self._highest_mhz: float | None = None
        #: the value of each quantity by name, the ``clock_reasons``, and ``at_s``, seconds since the first
        self._samples: list[dict[str, Any]] = []
        self._counted: list[dict[str, Any]] = []
        self._refused: dict[str, None] = {}
        self._problem: str | None = None

    def __enter__(self) -> Self:
        if self._uuid is not None:
            self._thread.start()
            if not self._ready.wait(_OPENING_S):
                self._problem = f"NVML did not answer for {_OPENING_S:g} s"
        self._begin_s = time.perf_counter()
        return self

    def __exit__(self, *exception: object) -> None:
        self._seconds = time.perf_counter() - self._begin_s
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSING_S)
        if self._thread.is_alive():
            self._problem = self._problem or f"NVML did not answer for {_CLOSING_S:g} s"

    @property
    def samples(self) -> int:
        """How many samples have been taken so far."""
        return len(self._samples)

    # -- the thread: all calls of the library ------------------------------------------------------------

    def _watch(self) -> None:
        try:
            assert self._uuid is not None
            with Nvml() as library:
                self._sample_until_stopped(library, library.gpu(self._uuid))
        except NvmlProblem as problem:
            self._problem = str(problem)
        except Exception as error:  # a measured step is worth more than its telemetry
            self._problem = f"telemetry failed: {type(error).__name__}: {error}"
        finally:
            self._ready.set()

    def _sample_until_stopped(self, library: Nvml, gpu: Any) -> None:
        def read(quantities: Sequence[_Quantity]) -> dict[str, Any]:
            return {
                of.name: of.read(library, gpu, lambda name=of.name: self._refused.setdefault(name))  # type: ignore[misc]
                for of in quantities
            }

        began = time.perf_counter()

        def sample() -> dict[str, Any]:
            at_s = time.perf_counter() - began
            return {"at_s": at_s, **read(_QUANTITIES)}

        self._gpu_name, self._highest_mhz = read(_ONCE).values()
        self._counted.append(read(_COUNTERS))
        self._ready.set()
        while not self._stop.wait(self._interval_s):
            self._samples.append(sample())
        self._counted.append(read(_COUNTERS))
        if not self._samples:  # the steps ended before the first sample
            self._samples.append(sample())

    # -- what was seen -----------------------------------------------------------------------------------

    def summary(self, steps: int) -> dict[str, Any]:
        """The telemetry as fields of a row; a field is None where the GPU, the driver or the user's rights do
        not give its value. {} if no GPU was watched.

        ``energy_source``: "counter", the GPU's own, or "power", the mean power times the seconds. The counter
        advances many times a second, not continuously, so steps of less than a second in all are inexact.
        ``clocks_fell``, ``clocks_note``: see :meth:`_fall`. ``clock_reasons``: all reasons for low clocks in
        any sample. ``problem``: a line on values that could not be read.

        Args:
            steps: the number of steps inside the context; each gets an equal part of the energy.
        """
        if self._uuid is None:
            return {}
        row: dict[str, Any] = {"gpu_uuid": self._uuid, "gpu_name": self._gpu_name}
        row |= {"watched_s": self._seconds, "samples": self.samples}
        for quantity in _QUANTITIES:
            values = [v for sample in self._samples if (v := sample[quantity.name]) is not None]
            for statistic in quantity.statistics:
                value = _STATISTICS[statistic](values) if values else None
                row[f"{quantity.name}_{statistic}_{quantity.unit}"] = value
        row |= {of.name: self._growth(of.name) for of in _COUNTERS} | {"energy_source": "counter"}
        if row["energy_j"] is None:
            is_whole = row["power_mean_w"] is not None and self._problem is None
            row["energy_j"] = row["power_mean_w"] * self._seconds if is_whole else None
            row["energy_source"] = "power" if is_whole else None
        row["energy_per_step_j"] = None if row["energy_j"] is None else row["energy_j"] / steps
        clocks = [sample for sample in self._samples if sample["sm_clock"] is not None]
        fell, note = self._fall(clocks)
        row |= {"clock_reasons": reasons(clocks), "clocks_fell": fell, "clocks_note": note}
        refusals = f"no permission to read: {', '.join(self._refused)}" if self._refused else None
        return row | {"problem": self._problem or refusals}

    def _growth(self, name: str) -> float | None:
        """How much a counter grew while steps ran; None where it could not be read twice."""
        values = [counted[name] for counted in self._counted]
        return values[1] - values[0] if len(values) == 2 and None not in values else None

    def _fall(self, clocks: Sequence[dict[str, Any]]) -> tuple[bool | None, str | None]:
        """Whether the clock fell, and if so a line on its lowest sample; (None, None) for an idle GPU.

        A clock has fallen if it is below 95% of the highest sample. While a reason slows the GPU, the GPU's
        highest clock is the reference, so that a clock that is low from the beginning counts as well.
        """
        busy = [sample for sample in clocks if _IDLE not in _bits(sample)]
        if not busy:
            return None, None
        seen = max(sample["sm_clock"] for sample in busy)
        falls = []
        for sample in busy:
            reference = max(seen, self._highest_mhz or 0) if _bits(sample) & _SLOWING else seen
            if sample["sm_clock"] < FALLEN * reference:
                falls.append((sample, reference))
        if not falls:
            return False, None
        lowest, reference = min(falls, key=lambda fall: fall[0]["sm_clock"])
        return True, (
            f"SM clock at {lowest['sm_clock']:.0f} of {reference:.0f} MHz after {lowest['at_s']:.2f} of "
            f"{self._seconds:.2f} s: {', '.join(reasons([lowest])) or 'no reason given'}"
        )


def _bits(sample: dict[str, Any]) -> set[int]:
    """The bits of the reasons for a low clock at a sample."""
    held = int(sample["clock_reasons"] or 0)
    return {1 << place for place in range(held.bit_length()) if held >> place & 1}


def reasons(samples: Sequence[dict[str, Any]]) -> list[str]:
    """The reasons for low clocks in any of the samples, in words."""
    bits = sorted({bit for sample in samples for bit in _bits(sample)})
    return [_REASONS.get(bit, f"reason {bit:#x}") for bit in bits]
