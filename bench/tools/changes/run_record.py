"""A record: what one run of a suite measured, at a commit, on a machine; one immutable file each.

The file has JSON lines: the head (format, suite, date, commit, machine, versions, metrics, number of cells),
then a line for each cell. Nothing is ever appended to it, and its name is made of suite, date, commit and
machine, so that jobs and branches that write into one history never touch the same file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from spbench.bench.errors import UserError
from spbench.bench.files import read_file
from spbench.bench.git import SHORT_HASH
from spbench.bench.measurement import Status
from spbench.bench.row import problem
from spbench.bench.tools.changes.metrics import METRICS, Metric, Reading

FORMAT = 1
SUFFIX = ".jsonl"

#: far larger numbers are damage, and overflow where they are added
_LARGEST = 1e24

_KNOWN = {metric.name: metric for metric in METRICS}


@dataclass(frozen=True)
class Commit:
    """The state of the code.

    Attributes:
        hash: in full.
        date: of the committer, ISO 8601 in UTC, to the second: texts sort as dates.
        branch: on which it was measured.
    """

    hash: Annotated[str, Field(pattern="^[0-9a-f]{7,64}$")]
    date: str
    branch: str

    @property
    def short(self) -> str:
        """The first digits of the hash."""
        return self.hash[:SHORT_HASH]


@dataclass(frozen=True)
class CellRecord:
    """What was found of one cell.

    Attributes:
        exact: whether any machine would find the same (:func:`has_exact_engine`).
        values: by the names of metrics; a record that was read has all samples of a value in one round.
    """

    key: str
    status: Status
    exact: bool
    values: Mapping[str, Reading]


@dataclass(frozen=True)
class RunRecord:
    """One run of one suite.

    Attributes:
        date: of the end of the run, as :attr:`Commit.date`.
        machine: ``host`` (or the name given in its place), and :func:`machine_facts` where known.
        versions: of libraries, by name; None: not installed.
        cells: by key.
    """

    suite: str
    date: str
    commit: Commit
    machine: Mapping[str, Any]
    versions: Mapping[str, str | None]
    cells: Mapping[str, CellRecord]

    @property
    def machine_name(self) -> str:
        """The host and a digest of its hardware (processor, cores, GiB of memory, GPUs): timings of two runs
        are comparable only if it is the same."""
        facts = self.machine
        hardware = [facts.get(name) for name in ("cpu", "cores", "gpus")]
        if hardware == [None, None, None]:
            return str(facts.get("host") or "unknown")
        gib = round((facts.get("memory_bytes") or 0) / 2**30)  # kernels keep a few MiB more or less
        digest = hashlib.sha256(json.dumps([*hardware, gib]).encode()).hexdigest()[:6]
        return f"{facts.get('host') or 'unknown'}-{digest}"

    @property
    def software(self) -> dict[str, str]:
        """Versions of libraries, of the system and of the GPU's driver: what may change a number beside the
        commit."""
        found = {**self.versions, **{name: self.machine.get(name) for name in ("os", "gpu_driver")}}
        return {name: str(version) for name, version in found.items() if version is not None}

    @property
    def file_name(self) -> str:
        """The name of its file: suite, date of the run, commit and machine."""
        date = re.sub(r"[-:]|\+00:00", "", self.date)
        words = (self.suite, f"{date}Z", self.commit.short, self.machine_name)
        return "_".join(re.sub(r"[^A-Za-z0-9.-]+", "-", word) for word in words) + SUFFIX


def utc(date: str) -> str:
    """A date in ISO 8601 as :attr:`Commit.date` has it; one without a zone is in UTC.

    Raises:
        ValueError: it is no such date.
    """
    parsed = datetime.fromisoformat(date)
    zoned = parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)
    return zoned.astimezone(UTC).isoformat(timespec="seconds")


# -- the file --------------------------------------------------------------------------------------------


def _number(value: object) -> object:
    """The value, with all digits of an int.

    Raises:
        ValueError: it is not a number, or not one that a metric can have.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _LARGEST:
        raise ValueError(f"{value!r:.40} is not a finite number of at least 0")
    return value


_Value = Annotated[float, PlainValidator(_number)]


def _facts(machine: dict[str, Any]) -> dict[str, Any]:
    """What a record says of a machine; ValueError: its memory is no number of bytes."""
    if machine.get("memory_bytes") is not None:
        _number(machine["memory_bytes"])
    return machine


class _Stored(BaseModel):
    """Keys that it does not know, of later versions, are left out."""

    model_config = ConfigDict(strict=True)


class _StoredMetric(_Stored):
    better: Literal["smaller", "bigger"]
    tolerance: _Value
    judged: bool


class _Head(_Stored):
    spbench_record: int
    suite: str
    date: str
    commit: Commit
    machine: Annotated[dict[str, Any], AfterValidator(_facts)]
    versions: dict[str, str | None]
    metrics: dict[str, _StoredMetric]
    cells: int


class _StoredValue(_Stored):
    value: _Value
    unit: str
    exact: bool
    samples: list[_Value] = []


class _Line(_Stored):
    cell: str
    status: Status
    exact: bool
    values: dict[str, _StoredValue]


def as_lines(record: RunRecord) -> Iterator[str]:
    """The lines of a record's file, without line ends."""
    metrics = {name: value.metric for cell in record.cells.values() for name, value in cell.values.items()}
    head = {
        "spbench_record": FORMAT,
        "suite": record.suite,
        "date": record.date,
        "commit": asdict(record.commit),
        "machine": record.machine,
        "versions": record.versions,
        "metrics": {
            name: {"better": metric.better, "tolerance": metric.tolerance, "judged": metric.judged}
            for name, metric in metrics.items()
        },
        "cells": len(record.cells),
    }
    yield _json(head)
    for key in sorted(record.cells):
        cell = record.cells[key]
        values = {name: _stored(value) for name, value in cell.values.items()}
        yield _json({"cell": key, "status": cell.status, "exact": cell.exact, "values": values})


def _stored(reading: Reading) -> dict[str, Any]:
    stored = {"value": reading.value, "unit": reading.unit, "exact": reading.exact}
    return {**stored, "samples": list(reading.samples)} if reading.samples else stored


def _json(content: Any) -> str:
    return json.dumps(content, allow_nan=False, separators=(",", ":"))


def read_record(path: Path) -> RunRecord:
    """Read a record.

    Raises:
        UserError: the file cannot be read, or is not a whole record of this format; with the line and field.
    """
    first, *others = read_file(path).splitlines(keepends=True) or [b""]
    number = 1
    try:
        head = _Head.model_validate_json(first)
        if head.spbench_record != FORMAT:
            raise ValueError(f"spbench_record: a record of format {head.spbench_record}; this reads {FORMAT}")
        commit, date = replace(head.commit, date=utc(head.commit.date)), utc(head.date)
        cells = {}
        for line in others:
            number += 1
            stored = _Line.model_validate_json(line)
            if unknown := next((name for name in stored.values if name not in head.metrics), None):
                raise ValueError(f"values.{unknown}: no such metric in line 1")
            values = {name: _reading(name, of, head.metrics[name]) for name, of in stored.values.items()}
            cells[stored.cell] = CellRecord(stored.cell, stored.status, stored.exact, values)
        if len(cells) != head.cells or not (others or [first])[-1].endswith(b"\n"):
            raise ValueError(f"cut short: {len(cells)} of {head.cells} cells")
    except ValidationError as error:
        raise _unreadable(path, number, problem(error)) from error
    except (ValueError, OverflowError) as error:
        raise _unreadable(path, number, str(error)) from error
    return RunRecord(head.suite, date, commit, head.machine, head.versions, cells)


def _unreadable(path: Path, number: int, what: str) -> UserError:
    return UserError(f"{path}:{number}: not a record of a run ({what}); restore the file or remove it")


def _reading(name: str, stored: _StoredValue, about: _StoredMetric) -> Reading:
    # of a metric that another version has, what its record says
    metric = _KNOWN.get(name) or Metric(name, stored.unit, about.better, about.tolerance, about.judged)
    rounds = (tuple(stored.samples),) if stored.samples else ()
    return Reading(metric, stored.value, stored.unit, stored.exact, rounds)
