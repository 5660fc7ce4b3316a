"""A history: the records in a folder, the series of their metrics, and what is wrong with these now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from spbench.bench.errors import UserError, suggestion
from spbench.bench.tools.changes.expectations import Acceptance, Target, read_meant, read_targets
from spbench.bench.tools.changes.run_record import SUFFIX, RunRecord, read_record
from spbench.bench.tools.changes.series import Series, series_of
from spbench.bench.tools.changes.steps import Step, standing_regressions, steps


@dataclass(frozen=True)
class Assessment:
    """A series, and what there is to say of it.

    Attributes:
        steps: the earliest first; those that were meant say why.
        targets: that the series should meet.
    """

    series: Series
    steps: tuple[Step, ...]
    targets: tuple[Target, ...]

    @property
    def regressions(self) -> list[Step]:
        """The regressions that nobody has accepted and from which the metric has not recovered."""
        return [step for step in standing_regressions(self.steps, self.series) if not step.meant]

    @property
    def missed(self) -> list[Target]:
        """The targets that the present value does not meet."""
        return [target for target in self.targets if target.is_missed(self.series)]

    @property
    def fails(self) -> bool:
        """Whether a nightly job should fail of it."""
        return bool(self.regressions or self.missed)


@dataclass(frozen=True)
class History:
    """The records in a folder.

    Attributes:
        records: by the dates of their commits, then of their runs. Dates rather than the order of the
            commits in git, as records are read where no git is, and made in shallow clones.
    """

    folder: Path
    records: tuple[RunRecord, ...]
    targets: tuple[Target, ...]
    meant: tuple[Acceptance, ...]

    @property
    def suites(self) -> list[str]:
        """The names of the suites, in alphabetical order."""
        return sorted({record.suite for record in self.records})

    @property
    def branches(self) -> list[str]:
        """The names of the branches, that with the most records first."""
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
        """Series by suite and cell; a cell's first is its status.

        Args:
            suite, metric, machine: only those of this name; exact metrics are of every machine. Metrics that
                say the same as another (:attr:`Metric.judged`) are found by their names alone.
            cell: only cells whose key contains this text.
            branch: whose records count; None: that with the most records.

        Raises:
            UserError: there is no such suite, metric, machine or branch, or no such cell.
        """
        branch = branch if branch is not None else self.branches[0]
        _check(branch, self.branches, "branch")
        if suite is not None:
            _check(suite, self.suites, "suite")
        wanted = [
            record
            for record in self.records
            if record.commit.branch == branch and suite in (None, record.suite)
        ]
        if machine is not None:
            _check(machine, sorted({record.machine_name for record in wanted}), "machine")
        all_series = series_of(wanted)
        if metric is not None:
            _check(metric, dict.fromkeys(series.metric.name for series in all_series), "metric")
        chosen = [
            series
            for series in all_series
            if (series.metric.judged if metric is None else metric == series.metric.name)
            and cell in series.cell
            and (machine is None or series.machine in ("", machine))
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
        return next((a.reason for a in self.meant if a.accepts(step, series)), "")


def counts(assessments: Sequence[Assessment]) -> dict[str, int]:
    """How many regressions stand, targets are missed, steps there are, and how many of these were meant."""
    steps = [step for of in assessments for step in of.steps]
    return {
        "standing": sum(len(of.regressions) for of in assessments),
        "missed": sum(len(of.missed) for of in assessments),
        "steps": len(steps),
        "meant": sum(bool(step.meant) for step in steps),
    }


def _check(name: str, known: Sequence[str] | dict[str, None], kind: str) -> None:
    if name not in known:
        raise UserError(f"no records of {kind} {name!r}{suggestion(name, known)}")


def read_history(folder: Path) -> History:
    """Read all records below a folder, its targets and what was meant.

    Raises:
        UserError: the folder is missing or has no record, a file in it is not a whole record, or the file of
            targets or of what was meant is wrong.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; spbench record RESULTS --history {folder} makes it")
    records = [read_record(path) for path in sorted(folder.rglob(f"*{SUFFIX}"))]
    if not records:
        raise UserError(
            f"{folder} has no records of runs: spbench record RESULTS --history {folder} adds the first"
        )
    records.sort(key=lambda record: (record.commit.date, record.commit.hash, record.date))
    return History(folder, tuple(records), read_targets(folder), read_meant(folder))
