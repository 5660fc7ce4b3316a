"""What people write into a history: targets that metrics have to meet, and steps that were meant.

Both are YAML files in the folder of the history, ``targets.yaml`` and ``meant.yaml``::

    targets:
      - {suite: gate, cell: tnl-1b/lasp/sp64, metric: peak_memory_bytes, value: 12e9}

    meant:
      - {commit: '1a2b3c4d5e6f', metric: peak_memory_bytes, reason: moments are kept in float32}
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, create_model, field_validator

from spbench.bench.measurement import Number
from spbench.bench.tools.changes.series import Series
from spbench.bench.tools.changes.steps import Step
from spbench.bench.yaml_files import StrictModel, read_yaml, validate

TARGETS_FILE, MEANT_FILE = "targets.yaml", "meant.yaml"

Entry = TypeVar("Entry", "Target", "Acceptance")


class _SeriesSelector(StrictModel):
    """Names series; what is left out may be anything.

    Attributes:
        cell: a part of the cell's key.
    """

    suite: str | None = None
    cell: str = ""
    metric: str | None = None
    machine: str | None = None

    def selects(self, series: Series) -> bool:
        """Whether the series is one of those named; ``machine`` names no series of exact metrics."""
        return self.names(series.suite, series.cell, series.metric.name, series.machine)

    def names(self, suite: str, cell: str, metric: str, machine: str) -> bool:
        """Whether a metric of a cell is one of those named.

        Args:
            cell: its key.
            machine: empty for an exact metric.
        """
        wanted, has = (self.suite, self.metric, self.machine), (suite, metric, machine)
        return self.cell in cell and all(w in (None, h) for w, h in zip(wanted, has, strict=True))


class Target(_SeriesSelector):
    """A value that a metric must reach: at most this where smaller is better, else at least."""

    metric: str
    value: Number

    def is_missed(self, series: Series) -> bool:
        """Whether the present value of a series is worse."""
        excess = series.metric.excess(self.value, series.current)
        return excess > series.metric.tolerance


class Acceptance(_SeriesSelector):
    """Steps that were meant: those of the named series whose commits include this one.

    Attributes:
        commit: at least 7 digits of the hash of a recorded commit, such as the end of the step's range.
    """

    commit: str = Field(pattern="^[0-9a-f]{7,64}$")
    reason: str

    @field_validator("reason")
    @classmethod
    def _check_reason(cls, reason: str) -> str:
        if not reason.strip():
            raise ValueError("is empty; say why the change was meant")
        return reason

    def accepts(self, step: Step, series: Series) -> bool:
        """Whether the step is one of those meant."""
        if not self.selects(series):
            return False
        hashes = [point.commit.hash for point in series.points]
        first, last = (hashes.index(p.commit.hash) for p in (step.last_before, step.first_after))
        return any(name.startswith(self.commit) for name in hashes[first + 1 : last + 1])


def read_targets(folder: Path) -> tuple[Target, ...]:
    """The targets of a history; none without a file. UserError if it cannot be read or is wrong."""
    return _entries(folder / TARGETS_FILE, Target)


def read_meant(folder: Path) -> tuple[Acceptance, ...]:
    """The accepted steps of a history; none without a file. UserError if it cannot be read or is wrong."""
    return _entries(folder / MEANT_FILE, Acceptance)


def _entries(path: Path, kind: type[Entry]) -> tuple[Entry, ...]:
    """The entries of a file, whose one key is the file's name."""
    if not path.exists() and not path.is_symlink():  # a link to nothing was meant to be a file
        return ()
    section: Any = {path.stem: (list[kind], ...)}  # type: ignore[valid-type]
    file = validate(create_model("File", __base__=StrictModel, **section), read_yaml(path), str(path))
    return tuple(getattr(file, path.stem))
