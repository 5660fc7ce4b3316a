"""NVIDIA's management library, through nvidia-ml-py: opening it, finding a GPU, readings that may be missing.

It comes with the driver and needs no CUDA build of torch. What it cannot give is None where only one reading
is concerned, and an :class:`NvmlProblem`, one line, where nothing can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
    the user may not read it, of which ``on_refusal`` is told.

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
