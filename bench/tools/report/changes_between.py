"""What changed: results beside baselines, and the newest commit of the history beside the one before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spbench.bench.errors import UserError
from spbench.bench.tools.changes.history import Assessment, read_history
from spbench.bench.tools.changes.metrics import VERDICTS
from spbench.bench.tools.report.gates import Gate, gates
from spbench.bench.tools.report.gathered import Gathered

_LISTED = 3


@dataclass(frozen=True)
class Changes:
    """What is worse, better and new since a day.

    Attributes:
        against: what is compared with what.
        since: the commits that are compared with, by their days; empty where these are not known.
        judged: how many numbers and cells were looked at; 0: nothing was.
        link: of the part of the page of regressions that lists them.
        worst: the first of what is worse, a text and a link each.
        standing: regressions of the history that stand; None of a baseline.
        problem: why nothing was judged.
    """

    against: str
    since: str
    judged: int
    worse: int
    better: int
    new: int
    link: str
    worst: Sequence[tuple[str, str]] = ()
    standing: int | None = None
    problem: str = ""


def changes(gathered: Gathered) -> Iterator[Changes]:
    """The baselines together, then the history if there is one."""
    yield _since_baselines(list(gates(gathered.baseline, gathered.results / "runs")))
    if gathered.history is not None:
        try:
            history = read_history(gathered.history)
            yield _in_history([history.assess(series) for series in history.series()])
        except UserError as error:
            yield Changes("history", "", 0, 0, 0, 0, "regressions.html#history", problem=str(error))


def _since_baselines(baselines: Sequence[Gate]) -> Changes:
    judged = [gate for gate in baselines if gate.judgement is not None]
    totals = [gate.counts for gate in judged]
    sums = {name: sum(of[name] for of in totals) for name in (*VERDICTS, "equal")}
    days = sorted({day for gate in judged for day in gate.days})
    worst = [
        (f"{_short(line['where'])}: {line['quantity']}", f"regressions.html#{gate.table_name}")
        for gate in judged
        for line in gate.lines
        if line["verdict"] in ("worse", "missing")
    ]
    problem = (
        "" if judged else "nothing was run beside the baselines" if baselines else "there is no baseline"
    )
    return Changes(
        f"{len(judged)} of {len(baselines)} baselines",
        f"the baselines committed on {' and '.join(dict.fromkeys([*days[:1], *days[-1:]]))}" if days else "",
        sum(sums.values()),
        sums["worse"] + sums["missing"],
        sums["better"],
        sums["new"],
        "regressions.html#gates",
        worst[:_LISTED],
        problem=problem,
    )


def _short(key: str) -> str:
    """Model, strategy and sizes of a cell's key."""
    return "/".join(key.split("/")[:3])


def _in_history(assessments: Sequence[Assessment]) -> Changes:
    """What came with the newest commit that any series has, beside the one before it."""
    commits = {point.commit.hash: point.commit for one in assessments for point in one.series.points}
    *_, before, newest = [None, None, *sorted(commits.values(), key=lambda c: (c.date, c.hash))]
    assert newest is not None
    now = [one for one in assessments if one.series.points[-1].commit.hash == newest.hash]
    steps = [
        (one, step)
        for one in now
        for step in one.steps
        if step.first_after.commit.hash == newest.hash and not step.meant
    ]
    worse = [one for one, step in steps if step.verdict == "regression"]
    new: list[Assessment] = [one for one in now if len(one.series.points) == 1] if before else []
    beside = f" beside {before.short[:7]}" if before else ", the first"
    link = "regressions.html#history"
    return Changes(
        f"commit {newest.short[:7]}{beside}",
        f"commit {before.short[:7]} of {before.date[:10]}" if before else "",
        len(now),
        len(worse),
        len(steps) - len(worse),
        len(new),
        link,
        [(f"{_short(one.series.cell)}: {one.series.metric.name}", link) for one in worse[:_LISTED]],
        sum(len(one.regressions) for one in assessments),
    )
