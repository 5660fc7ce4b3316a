"""Traces on disk: what has been traced once by the same code is read instead.

A trace depends on the cell without its cluster, on the rank, the code, torch and the processor; so cells that
differ in the cluster alone are timed from one trace, as are probes of searches that are run again, and cells
that several scenarios have. Only workers of sweeps use the cache (:func:`use`): these have their code
from the files that the digest is made of, whereas an interactive session may have changed a class in memory.

The folder is ``traces`` in that of all that is kept (:func:`spbench.bench.disk_cache.cache_folder`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from collections.abc import Callable
from typing import Any

import torch

from spbench.bench.cell import Cell
from spbench.bench.disk_cache import DiskCache, cache_folder
from spbench.bench.engines.peer_packages import installed
from spbench.bench.engines.trace_files import DamagedTrace, from_bytes, to_bytes
from spbench.bench.engines.traces import Trace
from spbench.bench.measuring_code import code_digest

#: bytes of all traces; one of 64 ranks has some 50 kB, one of 1,024 some MB
LIMIT_BYTES = 2 * 2**30

#: fields of a cell that no trace depends on: what the trace is for, and on which cards it is timed
_NOT_TRACED = frozenset(
    {"cluster", "engine", "device", "rank", "timing", "search", "learning", "meters", "variant"}
)

_cache: DiskCache | None = None

_log = logging.getLogger(__name__)


def use() -> None:
    """From now on this process keeps traces on disk, unless nothing is to be kept."""
    global _cache
    folder = cache_folder()
    _cache = None if folder is None else DiskCache(folder / "traces", LIMIT_BYTES)


def kept(cell: Cell, rank: int, events: bool, trace: Callable[[], Trace]) -> Trace:
    """What ``trace`` returns, or has returned in an earlier run.

    Args:
        events: whether the trace has a program.
        trace: makes the trace of that rank of the cell.
    """
    if _cache is None:
        return trace()
    key = trace_key(cell, rank, events)
    with _cache.making(key):
        if (found := _read(_cache, key, cell)) is not None:
            return found
        made = trace()
        _cache.write(key, to_bytes(made))
        return made


def _read(cache: DiskCache, key: str, cell: Cell) -> Trace | None:
    content = cache.read(key)
    if content is None:
        return None
    try:
        return from_bytes(content, cell)
    except DamagedTrace as error:
        _log.warning("a kept trace is damaged and made again: %s (%s)", cache.path(key), error)
        return None


def _traced_settings(cell: Cell) -> dict[str, Any]:
    settings = cell.model_dump(mode="json", exclude=set(_NOT_TRACED))
    del settings["training"]["cublas_workspace"]  # as a cluster's figures, it is filled in afterwards
    return settings


def trace_key(cell: Cell, rank: int, events: bool) -> str:
    """A digest of all that a trace depends on."""
    content = {
        "cell": _traced_settings(cell),
        "rank": rank,
        "events": events,
        "code": code_digest(),
        "torch": torch.__version__,
        "peers": installed(cell.strategy),
        "processor": platform.machine(),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
