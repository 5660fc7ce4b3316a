"""What changed: each run beside the committed baseline, as `spbench compare` judges it, and metrics over the
commits of the history, drawn with their steps and targets.

Series with a step or a target are drawn one beside the other, by suite and metric; an exact series without
either is as good as constant, so that a line of a table says all of it. Measured ones are drawn too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spbench.bench.errors import UserError
from spbench.bench.git import day_of
from spbench.bench.measure import RESULTS_FILE
from spbench.bench.tools.changes.history import Assessment, History, counts, read_history
from spbench.bench.tools.changes.history_command import series_ends
from spbench.bench.tools.changes.judgement import Judgement, Suite, read_suite
from spbench.bench.tools.changes.metrics import Difference
from spbench.bench.tools.changes.record_command import Commit
from spbench.bench.tools.changes.result_files import Results, read_results
from spbench.bench.tools.changes.series import Step
from spbench.bench.tools.report.drawings import history_figure, label_of, svg
from spbench.bench.tools.report.gathered import Gathered
from spbench.bench.tools.report.page import DataTable, Figure, Page
from spbench.plots.series import grouped

_LISTED = 3
PAGE = "regressions.html"
GATES, HISTORY = f"{PAGE}#gates", f"{PAGE}#history"


@dataclass(frozen=True)
class Gate:
    """A baseline, and the results that were run to compare with it.

    Attributes:
        scenario: whose cells they are.
        base: the folder of the baseline.
        before: its rows; None: they cannot be read.
        suite: the results beside it; None: nothing was run here, or it cannot be compared.
        problem: why there is no judgement.
        was_run: whether something was run here.
    """

    scenario: str
    base: Path
    before: Results | None = None
    suite: Suite | None = None
    problem: str = ""
    was_run: bool = False

    @property
    def judgement(self) -> Judgement | None:
        """What the gate says; None where there are no results beside the baseline."""
        return self.suite.judgement if self.suite else None

    @property
    def commits(self) -> list[list[str]]:
        """The commits of the baseline and of the results."""
        return [side.commits if side else [] for side in (self.before, self.suite)]

    @property
    def machines(self) -> list[list[str]]:
        """The machines of the baseline and of the results, as far as rows name them."""
        return [[*filter(None, side.machines)] if side else [] for side in (self.before, self.suite)]

    @property
    def days(self) -> list[str]:
        """The days of the baseline's commits, as far as git knows them."""
        return [day for day in map(day_of, self.commits[0]) if day]

    @property
    def table_name(self) -> str:
        """The name of the table of differences on its page."""
        return f"gate-{self.scenario.replace('_', '-')}"

    @property
    def counts(self) -> Counter[str]:
        """Differences by what they are: worse, missing, better, new; and what is ``equal``."""
        assert self.judgement is not None
        counts = Counter[str](difference.verdict for difference in self.judgement.differences)
        return counts + Counter({"equal": self.judgement.equal.total()})

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The differences as lines of a table, the worst first; ``worse by (%)`` is of the base."""
        return [] if self.judgement is None else [_line(each) for each in self.judgement.differences]

    @property
    def table(self) -> DataTable | None:
        """The table of differences; None where there are none."""
        caption = f"{self.scenario}: what differs from the baseline, the worst first"
        lines = self.lines
        return DataTable(self.table_name, caption, lines, sortable=len(lines) > 1) if lines else None


def gates(baseline: Path, runs: Path) -> Iterator[Gate]:
    """The baselines in a folder, each beside the run of its name."""
    for path in sorted(baseline.glob(f"*/{RESULTS_FILE}")):
        yield _gate(path.parent, runs / path.parent.name)


def _gate(base: Path, new: Path) -> Gate:
    was_run = (new / RESULTS_FILE).is_file()
    try:
        if was_run:
            suite = read_suite(new, base)
            return Gate(base.name, base, suite.base, suite, was_run=True)
        how = f"no results here; make them by spbench run --scenario {base.name} --output {new}"
        return Gate(base.name, base, read_results(base), problem=how)
    except UserError as error:
        return Gate(base.name, base, problem=str(error), was_run=was_run)


def _line(difference: Difference) -> dict[str, Any]:
    return {
        "verdict": difference.verdict + (" (allowed)" if difference.allowed else ""),
        "where": difference.where,
        "quantity": difference.quantity,
        "before": difference.base,
        "now": difference.new,
        "worse by (%)": difference.change * 100 if math.isfinite(difference.change) else None,
        "what moved": difference.why,
    }


# -- in a line of the first page -------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """How many results are worse, better and new since an earlier state, or why nobody can tell.

    Attributes:
        place: the page's address of the details.
        since: the earlier state, in words.
        against: the results that were judged, in words.
        counts: ``worse``, ``better``, ``new`` and ``judged``.
        worst: for each of the first that are worse, a link's text and address, to its details.
        problem: why nothing was judged; empty: something was.
        word: for the problem, "Not run" or "Not judged".
    """

    place: str
    since: str = ""
    against: str = ""
    counts: Mapping[str, int] = field(default_factory=Counter)
    worst: Sequence[tuple[str, str]] = ()
    problem: str = ""
    word: str = "Not run"


def changes(gathered: Gathered) -> Iterator[Change]:
    """The changes since the baselines, then those that the newest commit of the history brought, if there is
    a history."""
    yield _since_baselines(list(gates(gathered.baseline, gathered.results / "runs")))
    if gathered.history is not None:
        history, problem, assessments = assessed(gathered.history)
        yield _in_history(assessments) if history else Change(HISTORY, problem=f"{problem} (history)")


def assessed(folder: Path | None) -> tuple[History | None, str, list[Assessment]]:
    """The history in a folder, "", and its assessed series; or None, why there is none, and no series."""
    if folder is None:
        return None, "There is no history here.", []
    try:
        history = read_history(folder)
        return history, "", [history.assess(series) for series in history.series()]
    except UserError as error:
        return None, str(error), []


def _since_baselines(baselines: Sequence[Gate]) -> Change:
    judged = [gate for gate in baselines if gate.judgement is not None]
    against = f"{len(judged)} of {len(baselines)} baselines"
    if not judged:
        refused = "; ".join(gate.problem for gate in baselines if gate.was_run)
        nothing = "nothing was run beside the baselines" if baselines else "there is no baseline"
        word = "Not judged" if refused else "Not run"
        return Change(GATES, problem=f"{refused or nothing} ({against})", word=word)
    sums = sum((gate.counts for gate in judged), Counter[str]())
    days = sorted({day for gate in judged for day in gate.days})
    since = " and ".join(dict.fromkeys([*days[:1], *days[-1:]]))
    worst = [
        (f"{_short(each.where)}: {each.quantity}", f"{PAGE}#{gate.table_name}")
        for gate in judged
        for each in (gate.judgement.differences if gate.judgement else ())
        if each.fails
    ]
    counts = {**sums, "judged": sums.total(), "worse": sums["worse"] + sums["missing"]}
    since = f"the baselines committed on {since}" if days else "an unknown day"
    return Change(GATES, since, against, Counter(counts), worst[:_LISTED])


def _short(key: str) -> str:
    """Model, strategy and sizes of a cell's key."""
    return "/".join(key.split("/")[:3])


def _commits_of(assessments: Iterable[Assessment]) -> list[Commit]:
    """The commits that any series has, by date."""
    commits = {point.commit.hash: point.commit for one in assessments for point in one.series.points}
    return sorted(commits.values(), key=lambda commit: (commit.date, commit.hash))


def _in_history(assessments: Sequence[Assessment]) -> Change:
    """What came with the newest commit that any series has, beside the one before it."""
    *_, before, newest = [None, None, *_commits_of(assessments)]
    assert newest is not None
    now = [one for one in assessments if one.series.points[-1].commit.hash == newest.hash]
    steps = [
        (one.series, step)
        for one in now
        for step in one.steps
        if step.first_after.commit.hash == newest.hash and not step.meant
    ]
    worse = [series for series, step in steps if step.verdict == "regression"]
    new = sum(len(one.series.points) == 1 for one in now) if before else 0
    against = f"commit {newest.short[:7]}{f' beside {before.short[:7]}' if before else ', the first'}"
    since = f"commit {before.short[:7]} of {before.date[:10]}" if before else "an unknown day"
    counts = {"judged": len(now), "worse": len(worse), "better": len(steps) - len(worse), "new": new}
    counts["standing"] = sum(len(one.regressions) for one in assessments)
    worst = [(f"{_short(of.cell)}: {of.metric.name}", HISTORY) for of in worse[:_LISTED]]
    return Change(HISTORY, since, against, counts, worst)


# -- the page --------------------------------------------------------------------------------------------

#: panels in the drawings of one group; further series are only in the table
MOST_PANELS = 12


def pages(gathered: Gathered) -> Iterator[Page]:
    """The page regressions.html."""
    history, problem, assessments = assessed(gathered.history)
    yield Page(
        PAGE,
        "Regressions",
        "regressions.md",
        {
            "gates": list(gates(gathered.baseline, gathered.results / "runs")),
            "folder": gathered.baseline,
            "history": history,
            "problem": problem,
            "records": f"{gathered.results}/history",
            "counts": counts(assessments),
            "series": len(assessments),
            "drawings": [*history_drawings(assessments)],
            "others": quiet_table(assessments),
            "quiet": [*history_drawings(assessments, quiet=True)],
        },
        order=80,
        summary="What is worse than it was: results beside committed baselines, and metrics over commits.",
    )


def history_drawings(assessments: Sequence[Assessment], *, quiet: bool = False) -> Iterator[DataTable]:
    """A drawing for each suite and metric, with a panel for each series that has a step or a target; those
    with a regression that stands or a target that is missed come first.

    Args:
        quiet: the measured series that have neither, in place of these.
    """
    chosen = [
        a for a in assessments if (not a.series.exact and not is_notable(a) if quiet else is_notable(a))
    ]
    groups = grouped(chosen, lambda a: (a.series.suite, a.series.metric.name))
    ordered = sorted(groups.items(), key=lambda entry: (not any(a.fails for a in entry[1]), entry[0]))
    for number, ((suite, metric), group) in enumerate(ordered, start=1):
        group.sort(key=lambda assessment: not assessment.fails)
        panels, unit = group[:MOST_PANELS], group[0].series.unit
        more = f"; {len(group) - len(panels)} more in the table" if len(group) > len(panels) else ""
        of_suite = _commits_of(a for a in assessments if a.series.suite == suite)
        places = {commit.hash: at for at, commit in enumerate(of_suite)}
        caption = f"{metric} of {suite} over commits{f', in {unit}' if unit else ''}{more}"
        name = f"{'quiet' if quiet else 'steps'}-{number}"
        said = (
            f"{label_of(a.series)}: {'; '.join(step_words(a, each) for each in a.steps) or 'no step'}"
            for a in panels
        )
        alt = f"A line for each of {len(panels)} series; {'; '.join(said)}"
        drawn = Figure(f"figures/history-{name}.svg", svg(history_figure(panels, places)), caption, alt)
        yield series_table(name, caption, group, drawn=drawn)


def is_notable(assessment: Assessment) -> bool:
    """Whether a series has a step or a target."""
    return bool(assessment.steps or assessment.targets)


def step_words(of: Assessment, step: Step) -> str:
    """A step in words: its verdict, its size, the levels before and after, and what else changed with it."""
    series, kind = of.series, f"meant: {step.meant}" if step.meant else step.verdict
    kind += ", stands" * any(step is each for each in of.regressions) + " (drift)" * step.drift
    size = series.difference(step.before, step.after)
    levels = f"{series.spelled(step.before)} to {series.spelled(step.after)}"
    also = "".join(f", {name} {a} to {b}" for name, (a, b) in step.also_changed.items())
    return f"{kind}: {size} ({levels}) in {step.commit_range}{also and ', also changed' + also[1:]}"


def series_table(name: str, caption: str, assessments: Sequence[Assessment], **further: Any) -> DataTable:
    """A line for each series: what `spbench history` says of it, its range over commits, and its steps."""
    lines = []
    for of in assessments:
        values = [point.value for point in of.series.points]
        levels = {"lowest": of.series.spelled(min(values)), "highest": of.series.spelled(max(values))}
        steps = {"what changed": "; ".join(step_words(of, step) for step in of.steps)}
        lines.append(series_ends(of) | levels | steps)
    return DataTable(name, caption, lines, **further)


def quiet_table(assessments: Sequence[Assessment]) -> DataTable | None:
    """The series without a step or a target; None: there is none."""
    quiet = [each for each in assessments if not is_notable(each)]
    caption = "Series without a step or a target: the last value, and the range over all commits"
    return series_table("others", caption, quiet, sortable=True) if quiet else None
