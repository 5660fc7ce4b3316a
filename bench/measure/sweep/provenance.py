"""Where a result comes from: the code, the libraries and the machine."""

import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

from spbench.bench.git import checkout_around, commit_of_files, own_checkout
from spbench.bench.measure.devices.telemetry import Nvml, NvmlProblem
from spbench.bench.measure.processes.starting import usable_cores
from spbench.bench.measured_code import imported_tree, unmeasured_checkout
from spbench.impls import installed_version


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
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def memory_bytes() -> int | None:
    """The bytes of main memory; None where the system does not say."""
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _gpus() -> tuple[list[str], str | None]:
    """The names of NVIDIA's GPUs and the version of their driver; [] and None where NVML cannot be used."""
    try:
        with Nvml() as library:
            driver = library.read("nvmlSystemGetDriverVersion")
            names = (gpu and library.read("nvmlDeviceGetName", gpu) for gpu in library.gpus())
            return [name or "unknown" for name in names], driver
    except NvmlProblem:
        return [], None


#: files that are written from rows or by verification, so that no row depends on them
MADE_FROM_ROWS = ("results/reproduction", "results/baseline", "results/verification", "*.md")


@cache
def provenance() -> dict[str, Any]:
    """The facts that are the same for all rows of a process, as they were at the first call: versions, host,
    the ``machine`` (:func:`machine_facts`), the ``tree`` (the folder of spbench's code) and its ``commit``
    (None where the tree is in no checkout)."""
    own = own_checkout()
    return {
        "spbench": installed_version("spbench"),
        "tree": str(imported_tree()),
        "commit": own and commit_of_files(own, MADE_FROM_ROWS),
        "torch": installed_version("torch"),
        "python": platform.python_version(),
        "host": platform.node(),
        "machine": machine_facts(),
    }


def project_commit(folder: Path) -> str | None:
    """The present commit of the repository around a folder; None where there is no repository, or it is that
    of spbench's own code, or the folder lies in a checkout of spbench that is not the measured one."""
    root = checkout_around(folder)
    if root is None or root == own_checkout() or unmeasured_checkout(folder):
        return None
    return commit_of_files(root, MADE_FROM_ROWS)
