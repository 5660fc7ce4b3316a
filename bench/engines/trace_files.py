"""A trace as bytes: a digest, then a NumPy archive of its arrays, with one entry of JSON for the rest.

The digest tells damage that would still read as a trace. No pickle is read.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from spbench.bench.cell import Cell
from spbench.bench.engines.traces import Trace
from spbench.bench.meters.communication import CommunicationMeter, Operation
from spbench.bench.meters.memory import MemoryLog
from spbench.bench.simulator.program import Group, Program

#: entry of the archive that is no array of numbers
_REST = "rest"
_PROGRAM = "program."
#: of SHA-256
_DIGEST_BYTES = 32


class DamagedTrace(ValueError):
    """The content of a file is not a trace."""


def to_bytes(trace: Trace) -> bytes:
    """All of a trace but its cell; see :func:`from_bytes`. It has nothing of further meters."""
    assert not trace.found, "what further meters found is not kept"
    log, meter, program = trace.memory, trace.communication, trace.program
    arrays = {
        "sizes": np.asarray(log.sizes, dtype=np.int64),
        "events": np.asarray(log.events, dtype=np.int64),
    }
    rest: dict[str, Any] = {
        "rank": trace.rank,
        "marks": log.marks,
        "tags": list(log.tags.items()),
        "ends": log.ends,
        "workspaces": list(log.workspaces.items()),
        "axes": meter.axes,
        "operations": [[asdict(operation), count] for operation, count in meter.counts.items()],
        "program": None,
    }
    if program is not None:
        named = {field.name: getattr(program, field.name) for field in fields(program)}
        arrays |= {f"{_PROGRAM}{name}": x for name, x in named.items() if isinstance(x, np.ndarray)}
        rest["program"] = {
            **{name: x for name, x in named.items() if not isinstance(x, np.ndarray)},
            "groups": [asdict(group) for group in program.groups],
        }
    stream = io.BytesIO()
    text = np.frombuffer(json.dumps(rest).encode(), dtype=np.uint8)
    # Any: the stub has a keyword of its own among the names of arrays
    entries: dict[str, Any] = {**arrays, _REST: text}
    np.savez_compressed(stream, **entries)
    archive = stream.getvalue()
    return hashlib.sha256(archive).digest() + archive


def from_bytes(content: bytes, cell: Cell) -> Trace:
    """The trace of :func:`to_bytes`, as one of ``cell``.

    Raises:
        DamagedTrace: the content is not what was written.
    """
    digest, archive = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(archive).digest() != digest:
        raise DamagedTrace("its digest is not that of its content")
    try:
        with np.load(io.BytesIO(archive), allow_pickle=False) as arrays:
            return _trace(dict(arrays), cell)
    except Exception as error:  # a file that was never a trace: NumPy and zipfile raise what they will
        raise DamagedTrace(f"{type(error).__name__}: {error}") from error


def _trace(arrays: dict[str, np.ndarray], cell: Cell) -> Trace:
    rest = json.loads(arrays.pop(_REST).tobytes())
    log = MemoryLog(
        arrays["sizes"].tolist(),
        arrays["events"].tolist(),
        [(name, first) for name, first in rest["marks"]],
        dict(rest["tags"]),
        rest["ends"],
        dict(rest["workspaces"]),
    )
    meter = CommunicationMeter(rest["axes"])
    meter.counts.update({Operation(**operation): count for operation, count in rest["operations"]})
    program = None if rest["program"] is None else _program(rest["program"], arrays)
    return Trace(cell, rest["rank"], log, meter, program, {})


def _program(rest: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Program:
    groups = [Group(tuple(g["axes"]), _tuples(g["places"]), tuple(g["runs"])) for g in rest["groups"]]
    return Program(
        **{name.removeprefix(_PROGRAM): x for name, x in arrays.items() if name.startswith(_PROGRAM)},
        mesh=tuple(rest["mesh"]),
        names=tuple(rest["names"]),
        groups=tuple(groups),
        peers=_tuples(rest["peers"]),
        marks=tuple((name, first) for name, first in rest["marks"]),
        unpriced=tuple(rest["unpriced"]),
    )


def _tuples(lists: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(each) for each in lists)
