"""The machine that this process runs on: what a reader of a timing needs to know of it."""

from __future__ import annotations

import os
import platform
from functools import cache
from typing import Any

from spbench.bench.meters.nvml import NoPermission, NvmlProblem, nvml, reading
from spbench.bench.ranks.processes import usable_cores


@cache
def machine_facts() -> dict[str, Any]:
    """The facts of this machine, in JSON's types, without importing torch.

    Returns:
        ``os`` (name and release), ``cpu`` (model), ``cores`` (that this process may use), ``memory_bytes``
        (None where the system does not say), ``gpus`` (the names of NVIDIA's, in the driver's order) and
        ``gpu_driver`` (its version; None without one).
    """
    gpus, driver = _gpus()
    return {
        "os": f"{platform.system()} {platform.release()}",
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "memory_bytes": memory_bytes(),
        "gpus": gpus,
        "gpu_driver": driver,
    }


def cpu_model() -> str:
    """The processor as the system calls it, such as "AMD EPYC"; its architecture where it has no name."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def memory_bytes() -> int | None:
    """The bytes of main memory; None where the system does not say."""
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _gpus() -> tuple[list[str], str | None]:
    """The names of NVIDIA's GPUs and the version of their driver; none where that cannot be used."""
    try:
        with nvml() as library:
            driver = reading(library, library.nvmlSystemGetDriverVersion)
            count = reading(library, library.nvmlDeviceGetCount) or 0
            return [_name(library, index) for index in range(count)], driver
    except (NvmlProblem, NoPermission):
        return [], None


def _name(library: Any, index: int) -> str:
    gpu = reading(library, library.nvmlDeviceGetHandleByIndex, index)
    return (gpu is not None and reading(library, library.nvmlDeviceGetName, gpu)) or "unknown"
