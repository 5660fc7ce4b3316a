"""Checks of what the system gives: room on disks, shared memory, open files, cores and memory."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from spbench.bench.disk_cache import CACHE_FOLDER, cache_folder
from spbench.bench.measure.processes.starting import usable_cores
from spbench.bench.measure.sweep.provenance import memory_bytes
from spbench.bench.tools.doctor.check import Check, Observation

_GIB, _MIB = 2**30, 2**20
#: below these a disk is full, or soon will be: a sweep's rows take a few MiB, its traces up to 2 GiB
_FULL_BYTES, _LITTLE_BYTES = 50 * _MIB, 2 * _GIB
#: shared memory that NCCL and data loaders can do with
_SHARED_BYTES = _GIB
#: open files that some dozens of ranks need, with their sockets
_OPEN_FILES = 1024


def disks() -> Iterator[Observation]:
    """Where results and the cache go, and temporary files: can they be written, and how much is free?"""
    yield _disk("disk of results", Path("results"), "run spbench in a folder with room, or give --output")
    cache = cache_folder()
    if cache is None:
        remedy = f"set {CACHE_FOLDER} to a folder"
        yield Observation("disk of the cache", "warning", "traces are not kept", remedy)
    else:
        remedy = f"point {CACHE_FOLDER} to a folder with room; without it every cell is traced again"
        yield _disk("disk of the cache", cache, remedy, is_needed=False)
    yield _disk("temporary files", Path(tempfile.gettempdir()), "point TMPDIR to a folder with room")


def _disk(subject: str, folder: Path, remedy: str, is_needed: bool = True) -> Observation:
    """Of the folder, or where it is not there yet, of the one in which it would be made."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there) as probe:
            probe.write(b"spbench")
            probe.flush()
        free = shutil.disk_usage(there).free
    except OSError as error:
        return Observation(subject, "missing", f"{there}: {error.strerror}", remedy, is_needed)
    found = f"{free / _GIB:.1f} GiB free in {there}"
    if free < _FULL_BYTES:
        return Observation(subject, "missing", found, remedy, is_needed)
    return Observation.judged(subject, free >= _LITTLE_BYTES, found, remedy)


def shared_memory() -> Iterator[Observation]:
    """/dev/shm, through which the ranks of a node talk under NCCL."""
    what, folder = "shared memory", Path("/dev/shm")
    if not folder.is_dir():
        yield Observation(what, "warning", "there is no /dev/shm", "only Linux has one; NCCL needs it")
        return
    size = shutil.disk_usage(folder)
    found = f"{size.free / _GIB:.1f} of {size.total / _GIB:.1f} GiB free in {folder}"
    enough = size.free >= _SHARED_BYTES
    yield Observation.judged(what, enough, found, "in a container: docker run --shm-size=8g")


def open_files() -> Iterator[Observation]:
    """How many files, and so sockets, a process may have open."""
    try:
        import resource
    except ImportError:
        yield Observation("open files", "warning", "this system does not say how many may be open")
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit, most = ("unlimited" if n == resource.RLIM_INFINITY else n for n in (soft, hard))
    found = f"{limit} a process, of at most {most}"
    enough = soft == resource.RLIM_INFINITY or soft >= _OPEN_FILES
    yield Observation.judged("open files", enough, found, "ulimit -n 65536 before you start many ranks")


def machine() -> Iterator[Observation]:
    """Cores that this process may use, and memory."""
    found = f"{usable_cores()} of {os.cpu_count()} cores"
    if (memory := memory_bytes()) is not None:
        found += f", {memory / _GIB:.1f} GiB of memory"
    remedy = "two ranks share one core: their times mean little"
    yield Observation.judged("machine", usable_cores() > 1, found, remedy)


CHECKS = {
    "disk": Check(disks, is_needed=True),
    "shared-memory": Check(shared_memory),
    "open-files": Check(open_files),
    "machine": Check(machine),
}
