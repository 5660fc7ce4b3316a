"""A history: the records of runs in a folder, the series of their metrics over commits, and which series have
regressed or miss a target. People write two YAML files into the folder: ``targets.yaml`` has values that
metrics must meet, ``meant.yaml`` the steps (changes of a series' level) that were intended::

    targets:
      - {suite: gate, cell: tnl-1b/lasp/sp64, metric: peak_memory_bytes, value: 12e9}

    meant:
      - {commit: '1a2b3c4d5e6f', metric: peak_memory_bytes, reason: moments are kept in float32}
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, create_model, field_validator

from spbench.bench.errors import UserError, refuse_unknown
from spbench.bench.measurement import Number
from spbench.bench.tools.changes.change_points import MINIMUM_EFFECT
from spbench.bench.tools.changes.record_command import SUFFIX, RunRecord, read_record
from spbench.bench.tools.changes.series import Series, Step, series_of, steps
from spbench.bench.yaml_files import StrictModel, read_yaml, validate

TARGETS_FILE, MEANT_FILE = "targets.yaml", "meant.yaml"

Entry = TypeVar("Entry", "Target", "Acceptance")


class _SeriesSelector(StrictModel):
    """A selector of series; a field that is left out allows any value, and ``cell`` is a part of the key."""

    suite: str | None = None
    cell: str = ""
    metric: str | None = None
    machine: str | None = None

    def selects(self, series: Series) -> bool:
        """Whether this selects the series; with a ``machine``, it selects no series of exact metrics."""
        return self.names(series.suite, series.cell, series.metric.name, series.machine)

    def names(self, suite: str, cell: str, metric: str, machine: str) -> bool:
        """Whether this selects a metric of a cell in a suite; ``cell`` is the cell's key, and ``machine`` is
        empty for an exact metric."""
        wanted, has = (self.suite, self.metric, self.machine), (suite, metric, machine)
        return self.cell in cell and all(w in (None, h) for w, h in zip(wanted, has, strict=True))


class Target(_SeriesSelector):
    """A ``value`` that a metric must not exceed where smaller is better, and must reach where bigger is."""

    metric: str
    value: Number

    def is_missed(self, series: Series) -> bool:
        """Whether the present value of a series is worse than this target."""
        return series.metric.excess(self.value, series.current) > series.metric.tolerance


class Acceptance(_SeriesSelector):
    """Steps that were meant: the steps of the selected series whose range of commits includes ``commit``.

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
        """Whether this selects the series and names a commit in the range of its step."""
        if not self.selects(series):
            return False
        hashes = [point.commit.hash for point in series.points]
        first, last = (hashes.index(p.commit.hash) for p in (step.last_before, step.first_after))
        return any(name.startswith(self.commit) for name in hashes[first + 1 : last + 1])


def read_entries(path: Path, kind: type[Entry]) -> tuple[Entry, ...]:
    """The targets or acceptances in a file, whose one key is the file's name; empty if there is no file.

    Raises:
        UserError: the file cannot be read or is wrong.
    """
    if not path.exists() and not path.is_symlink():  # a link to nothing was meant to be a file
        return ()
    section: Any = {path.stem: (list[kind], ...)}  # type: ignore[valid-type]
    file = validate(create_model("File", __base__=StrictModel, **section), read_yaml(path), str(path))
    return tuple(getattr(file, path.stem))


@dataclass(frozen=True)
class Assessment:
    """A series, with its steps and targets.

    Attributes:
        steps: the earliest first; a step that was meant has the reason.
        targets: the targets that the series should meet.
    """

    series: Series
    steps: tuple[Step, ...]
    targets: tuple[Target, ...]

    @property
    def regressions(self) -> list[Step]:
        """The regressions that nobody has accepted and that were not undone: the last level is still worse
        than the level before the regression, by more than the tolerance of an exact metric, or by more than
        :data:`MINIMUM_EFFECT` of a measured one."""
        metric = self.series.metric
        least = metric.tolerance if self.series.exact else MINIMUM_EFFECT
        worse = [step for step in self.steps if step.verdict == "regression" and not step.meant]
        return [step for step in worse if metric.excess(step.before, self.steps[-1].after) > least]

    @property
    def missed(self) -> list[Target]:
        """The targets that the series' present value misses."""
        return [target for target in self.targets if target.is_missed(self.series)]

    @property
    def fails(self) -> bool:
        """Whether a nightly job should fail because of this series."""
        return bool(self.regressions or self.missed)


def counts(assessments: Sequence[Assessment]) -> dict[str, int]:
    """The numbers of regressions that stand, of missed targets, of steps, and of steps that were meant."""
    steps = [step for each in assessments for step in each.steps]
    return {
        "standing": sum(len(each.regressions) for each in assessments),
        "missed": sum(len(each.missed) for each in assessments),
        "steps": len(steps),
        "meant": sum(bool(step.meant) for step in steps),
    }


@dataclass(frozen=True)
class History:
    """The records in a folder, its targets and its accepted steps.

    Attributes:
        records: sorted by the dates of their commits, then of their runs. Dates replace the order of commits
            in git, because records are read without git and made in shallow clones.
    """

    folder: Path
    records: tuple[RunRecord, ...]
    targets: tuple[Target, ...]
    meant: tuple[Acceptance, ...]

    @property
    def branches(self) -> list[str]:
        """The names of the branches, the branch with the most records first."""
        counts = Counter(record.commit.branch for record in self.records)
        return sorted(counts, key=lambda branch: (-counts[branch], branch))

    def series(
        self,
        *,
        suite: str | None = None,
        metric: str | None = None,
        cell: str = "",
        machine: str | None = None,
        branch: str | None = None,
    ) -> list[Series]:
        """The series, sorted by suite and cell; the first series of each cell is the cell's status.

        Args:
            suite, metric, machine: only series of this name; exact metrics belong to every machine. A metric
                that repeats another (not :attr:`Metric.judged`) is included only if ``metric`` names it.
            cell: only cells whose key contains this text.
            branch: only records of this branch; None: of the branch with the most records.

        Raises:
            UserError: there is no such suite, metric, machine or branch, or no such cell.
        """
        branch = self.branches[0] if branch is None else branch
        _check("branch", branch, self.branches)
        _check("suite", suite, {record.suite for record in self.records})
        records = [r for r in self.records if r.commit.branch == branch and suite in (None, r.suite)]
        _check("machine", machine, {record.machine_name for record in records})
        series = series_of(records)
        _check("metric", metric, (each.metric.name for each in series))
        chosen = [
            each
            for each in series
            if (each.metric.judged if metric is None else metric == each.metric.name)
            and cell in each.cell
            and (machine is None or each.machine in ("", machine))
        ]
        if not chosen:
            what = f"{cell!r} in its key" + (f" and metric {metric}" if metric else "")
            raise UserError(f"{self.folder}: no cell with {what} was recorded on branch {branch}")
        return chosen

    def assess(self, series: Series) -> Assessment:
        """The steps of a series, and the targets that it should meet."""
        judged = [replace(step, meant=self._reason(step, series)) for step in steps(series)]
        targets = tuple(target for target in self.targets if target.selects(series))
        return Assessment(series, tuple(judged), targets)

    def _reason(self, step: Step, series: Series) -> str:
        return next((entry.reason for entry in self.meant if entry.accepts(step, series)), "")


def _check(kind: str, name: str | None, names: Iterable[str]) -> None:
    if name is not None:
        refuse_unknown(f"no records of {kind}", name, sorted(set(names)))


def read_history(folder: Path) -> History:
    """Read all records below a folder, its targets and its accepted steps.

    Raises:
        UserError: the folder is missing or has no record, a file in it is not a whole record, or the file of
            targets or of accepted steps is wrong.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; spbench record RESULTS --history {folder} makes it")
    records = [read_record(path) for path in sorted(folder.rglob(f"*{SUFFIX}"))]
    if not records:
        raise UserError(
            f"{folder} has no records of runs: spbench record RESULTS --history {folder} adds the first"
        )
    records.sort(key=lambda record: (record.commit.date, record.commit.hash, record.date))
    targets = read_entries(folder / TARGETS_FILE, Target)
    return History(folder, tuple(records), targets, read_entries(folder / MEANT_FILE, Acceptance))
