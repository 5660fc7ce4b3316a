"""NVIDIA's management library, through nvidia-ml-py: opening it, finding a GPU, readings that may be missing,
and what its clocks say.

It comes with the driver and needs no CUDA build of torch. What it cannot give is None where only one reading
is concerned, and an :class:`NvmlProblem`, one line, where nothing can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

#: errors that end everything, by the names of nvidia-ml-py: what they mean, and what to do
_MEANINGS = {
    "NVML_ERROR_LIBRARY_NOT_FOUND": ("no libnvidia-ml.so.1 can be loaded", "install the NVIDIA driver"),
    "NVML_ERROR_DRIVER_NOT_LOADED": (
        "the NVIDIA driver is not loaded",
        "see nvidia-smi and dmesg, or reboot",
    ),
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": ("driver and libnvidia-ml.so.1 differ in version", "reboot"),
    "NVML_ERROR_NO_PERMISSION": ("no permission to talk to the driver", "check the rights of /dev/nvidia*"),
    "NVML_ERROR_GPU_IS_LOST": ("the GPU fell off the bus", "see dmesg for Xid errors, and reboot"),
    "NVML_ERROR_RESET_REQUIRED": ("the GPU has to be reset", "nvidia-smi --gpu-reset, or reboot"),
    "NVML_ERROR_GPU_NOT_FOUND": ("the driver finds no GPU", "see nvidia-smi and dmesg"),
    "NVML_ERROR_NOT_FOUND": ("there is no such GPU", "nvidia-smi -L lists them"),
}
#: errors after which every reading of the GPU would fail too
_FATAL = (
    "NVML_ERROR_GPU_IS_LOST",
    "NVML_ERROR_RESET_REQUIRED",
    "NVML_ERROR_DRIVER_NOT_LOADED",
)


class NvmlProblem(Exception):
    """Nothing can be read; the text is one line: ``what``, and what to do about it, the ``remedy``."""

    def __init__(self, what: str, remedy: str):
        super().__init__(f"{what}: {remedy}")
        self.what, self.remedy = what, remedy


@contextmanager
def nvml() -> Iterator[Any]:
    """The module ``pynvml``, initialized; inside, and only there, its functions can be called.

    Raises:
        NvmlProblem: it or the driver's library cannot be used.
    """
    try:
        import pynvml
    except ImportError as error:
        raise NvmlProblem("nvidia-ml-py is not installed", "pip install nvidia-ml-py") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise _problem(pynvml, error) from error
    try:
        yield pynvml
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def gpu_handle(pynvml: Any, uuid: str) -> Any:
    """The handle of the GPU, or of the MIG instance of one, with that UUID.

    Args:
        uuid: with the prefix "GPU-" or "MIG-", as nvidia-smi -L prints it, or without, as CUDA gives it.

    Raises:
        NvmlProblem: there is none, or it cannot be used.
    """
    prefixes = ("",) if uuid.startswith(("GPU-", "MIG-")) else ("GPU-", "MIG-")
    for prefix in prefixes:
        try:
            return pynvml.nvmlDeviceGetHandleByUUID(prefix + uuid)
        except pynvml.NVMLError as error:
            problem = _problem(pynvml, error)
            if error.value not in (pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_INVALID_ARGUMENT):
                break
    raise problem


def reading(
    pynvml: Any, function: Callable[..., Any], *arguments: Any, on_refusal: Callable[[], object] | None = None
) -> Any:
    """What a function that calls ``pynvml`` returns; None where this GPU, driver or nvidia-ml-py lacks it, or
    the user may not read it; in the latter case ``on_refusal`` is called.

    Raises:
        NvmlProblem: the GPU cannot be read any more.
    """
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        if error.value in {getattr(pynvml, name, None) for name in _FATAL}:
            raise _problem(pynvml, error) from error
        if on_refusal is not None and error.value == pynvml.NVML_ERROR_NO_PERMISSION:
            on_refusal()
        return None
    except AttributeError:  # of an older nvidia-ml-py
        return None


def newer_or_older(pynvml: Any, newer: str, older: str, *arguments: Any) -> Any:
    """What the function ``newer`` of ``pynvml`` returns, or ``older`` where the driver or nvidia-ml-py has
    only that."""
    if hasattr(pynvml, newer):
        with suppress(pynvml.NVMLError_FunctionNotFound):
            return getattr(pynvml, newer)(*arguments)
    return getattr(pynvml, older)(*arguments)


def _problem(pynvml: Any, error: Any) -> NvmlProblem:
    for name, (what, remedy) in _MEANINGS.items():
        if getattr(pynvml, name, None) == error.value:
            return NvmlProblem(what, remedy)
    return NvmlProblem(f"NVML says {error}", "see nvidia-smi")


#: below this share of the clock that it could have, a clock has fallen; less are steps of the governor
FALLEN = 0.95

_IDLE = 0x001
#: why a clock is below its highest, as NVML's clocks event reasons: bit -> words
_REASONS = {
    _IDLE: "idle",
    0x002: "clocks set by the user",
    0x004: "software power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "hardware power brake",
    0x100: "display clock setting",
}
#: reasons that slow a GPU which has work and which nobody has asked to be slower
_SLOWING = {0x004, 0x008, 0x010, 0x020, 0x040, 0x080}


@dataclass(frozen=True)
class ClockSample:
    """The clock of the streaming multiprocessors at a moment.

    Attributes:
        at_s: since the beginning of the stretch.
        reasons: NVML's bits.
    """

    at_s: float
    mhz: float
    reasons: int

    @property
    def bits(self) -> set[int]:
        """Each reason that holds."""
        return {1 << place for place in range(self.reasons.bit_length()) if self.reasons >> place & 1}


@dataclass(frozen=True)
class Fall:
    """The lowest of the samples that are below what the clock could be, ``reference_mhz``."""

    sample: ClockSample
    reference_mhz: float

    def note(self, stretch_s: float) -> str:
        """One line: clock, reference, when and why."""
        sample = self.sample
        why = ", ".join(reason_names([sample])) or "no reason given"
        return (
            f"SM clock at {sample.mhz:.0f} of {self.reference_mhz:.0f} MHz "
            f"after {sample.at_s:.2f} of {stretch_s:.2f} s: {why}"
        )


def reason_names(samples: Iterable[ClockSample]) -> list[str]:
    """All that held clocks down in any of the samples, in words."""
    bits = sorted({bit for sample in samples for bit in sample.bits})
    return [_REASONS.get(bit, f"reason {bit:#x}") for bit in bits]


def fall(samples: Sequence[ClockSample], highest_mhz: float | None) -> tuple[bool | None, Fall | None]:
    """Whether the clock fell, and where it was lowest if so; (None, None) if no sample is of a busy GPU.

    A clock has fallen that is below 95% of the highest of the stretch; while something slows the GPU, below
    95% of the highest that it has, so that one that is slow from the beginning counts as well.

    Args:
        highest_mhz: that the GPU has; None if it does not say.
    """
    busy = [sample for sample in samples if _IDLE not in sample.bits]
    if not busy:
        return None, None
    seen = max(sample.mhz for sample in busy)
    falls = []
    for sample in busy:
        reference = max(seen, highest_mhz or 0) if sample.bits & _SLOWING else seen
        if sample.mhz < FALLEN * reference:
            falls.append(Fall(sample, reference))
    lowest = min(falls, key=lambda each: each.sample.mhz, default=None)
    return lowest is not None, lowest
