"""A change of a cell in words: its settings, the job's own arguments, and its step."""

from __future__ import annotations

from spbench.bench.measure.scenarios.scenario import written
from spbench.bench.measure.trust.bands import shown_band, with_band
from spbench.bench.tools.fit.fit_verdict import Verdict
from spbench.bench.tools.fit.fitting import Fitting
from spbench.bench.tools.jobs.flags import FlagChanges, flag_changes


def settings_of(verdict: Verdict) -> str:
    return written(verdict.change.settings) if verdict.change else ""


def _changed_flags(answer: Fitting, verdict: Verdict) -> FlagChanges | None:
    """The change in the job's own arguments; None: it is of no job, or one that is not written."""
    job = answer.subject.job
    return flag_changes(answer.fullest.cell, verdict.cell, job) if job else None


def flags_of(answer: Fitting, verdict: Verdict, lack: bool = False) -> str:
    """The change in the job's own arguments; "" where there are none, or with ``lack`` what the program has
    not."""
    flags = _changed_flags(answer, verdict)
    if flags is not None and flags.missing and lack:
        return f"{flags.program.split()[0]} has no {'; no '.join(flags.missing)}"
    return str(flags or "")


def step_of(verdict: Verdict) -> str:
    row = {"cell": verdict.cell.model_dump(), "measurement": verdict.measurement}
    return shown_band(with_band(row)["measurement"]) or "not timed"
