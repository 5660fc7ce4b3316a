"""The page of changes: each run compared with its committed baseline, as `spbench compare` judges it, and
metrics over the commits of the history, drawn with their steps and targets.

Series with a step or a target are drawn in panels, by suite and metric, and so are measured series without
either. An exact series without a step or a target is nearly constant, so that it has only a table line.
"""

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
from spbench.bench.tools.changes.record_command import Commit
from spbench.bench.tools.changes.result_files import Results, read_results
from spbench.bench.tools.changes.series import Step
from spbench.bench.tools.report.drawings import history_figure, label_of, svg
from spbench.bench.tools.report.gathered import Gathered
from spbench.bench.tools.report.page import TABLES, DataTable, Figure, Page
from spbench.plots.series import grouped

_LISTED = 3
PAGE = "regressions.html"
GATES, HISTORY = f"{PAGE}#gates", f"{PAGE}#history"


@dataclass(frozen=True)
class Gate:
    """A baseline, and the results that are compared with it.

    Attributes:
        scenario: the name of the scenario.
        before: the baseline's rows; None: they cannot be read.
        suite: the new results; None: the scenario was not run here, or its results cannot be compared.
        problem: why there is no judgement.
        was_run: whether the scenario was run here.
    """

    scenario: str
    before: Results | None = None
    suite: Suite | None = None
    problem: str = ""
    was_run: bool = False

    @property
    def judgement(self) -> Judgement | None:
        """The judgement of the new results against the baseline; None without new results."""
        return self.suite.judgement if self.suite else None

    @property
    def commits(self) -> list[list[str]]:
        """Two lists: the commits of the baseline, and of the new results."""
        return [side.commits if side else [] for side in (self.before, self.suite)]

    @property
    def machines(self) -> list[list[str]]:
        """Two lists of the machines that rows name: of the baseline, and of the new results."""
        return [[*filter(None, side.machines)] if side else [] for side in (self.before, self.suite)]

    @property
    def table_name(self) -> str:
        """The name of the table of differences, unique on the page."""
        return f"gate-{self.scenario.replace('_', '-')}"

    @property
    def counts(self) -> Counter[str]:
        """The numbers of differences by verdict, and of cells and claims that are ``equal``."""
        assert self.judgement is not None
        counts = Counter[str](difference.verdict for difference in self.judgement.differences)
        return counts + Counter({"equal": self.judgement.equal.total()})

    @property
    def table(self) -> DataTable | None:
        """The table of differences, ``worse by (%)`` in percent of the base; None if nothing differs."""
        differences = self.judgement.differences if self.judgement else ()
        lines = TABLES.records("difference", differences, is_finite=math.isfinite)
        caption = f"{self.scenario}: what differs from the baseline, the worst first"
        return DataTable(self.table_name, caption, lines, sortable=len(lines) > 1) if lines else None


def gates(baseline: Path, runs: Path) -> Iterator[Gate]:
    """The baselines in a folder, each compared with the run of the same name in ``runs``."""
    for path in sorted(baseline.glob(f"*/{RESULTS_FILE}")):
        yield _gate(path.parent, runs / path.parent.name)


def _gate(base: Path, new: Path) -> Gate:
    was_run = (new / RESULTS_FILE).is_file()
    try:
        if was_run:
            suite = read_suite(new, base)
            return Gate(base.name, suite.base, suite, was_run=True)
        how = f"no results here; make them by spbench run --scenario {base.name} --output {new}"
        return Gate(base.name, read_results(base), problem=how)
    except UserError as error:
        return Gate(base.name, problem=str(error), was_run=was_run)


# -- in a line of the first page -------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """The numbers of results that are worse, better and new since an earlier state, or why there are none.

    Attributes:
        place: the address of the details on the page of regressions.
        since: the earlier state, in words.
        against: the results that were judged, in words.
        counts: the numbers of results: ``worse``, ``better``, ``new`` and ``judged``.
        worst: the text and address of a link to the details of each of the first results that are worse.
        problem: why nothing was judged; empty if results were judged.
        word: the problem in a word, "Not run" or "Not judged".
    """

    place: str
    since: str = ""
    against: str = ""
    counts: Mapping[str, int] = field(default_factory=Counter)
    worst: Sequence[tuple[str, str]] = ()
    problem: str = ""
    word: str = "Not run"


def changes(gathered: Gathered) -> Iterator[Change]:
    """The change since the baselines; then, if there is a history, the change at its newest commit."""
    yield _since_baselines(list(gates(gathered.baseline, gathered.results / "runs")))
    if gathered.history is not None:
        history, problem, assessments = assessed(gathered.history)
        yield _in_history(assessments) if history else Change(HISTORY, problem=f"{problem} (history)")


def assessed(folder: Path | None) -> tuple[History | None, str, list[Assessment]]:
    """The history in a folder, "" and its assessed series; or None, the reason, and no series if the history
    cannot be read."""
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
        nothing = "no run to compare with the baselines" if baselines else "there is no baseline"
        word = "Not judged" if refused else "Not run"
        return Change(GATES, problem=f"{refused or nothing} ({against})", word=word)
    sums = sum((gate.counts for gate in judged), Counter[str]())
    days = sorted({day for gate in judged for commit in gate.commits[0] if (day := day_of(commit))})
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
    """The first three parts of a cell's key: model, strategy and sizes."""
    return "/".join(key.split("/")[:3])


def _commits_of(assessments: Iterable[Assessment]) -> list[Commit]:
    """The commits of all series, sorted by date."""
    commits = {point.commit.hash: point.commit for one in assessments for point in one.series.points}
    return sorted(commits.values(), key=lambda commit: (commit.date, commit.hash))


def _in_history(assessments: Sequence[Assessment]) -> Change:
    """The change from the last commit but one of all series to the newest commit."""
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
    against = f"commit {newest.short[:7]}{f' compared with {before.short[:7]}' if before else ', the first'}"
    since = f"commit {before.short[:7]} of {before.date[:10]}" if before else "an unknown day"
    counts = {"judged": len(now), "worse": len(worse), "better": len(steps) - len(worse), "new": new}
    counts["standing"] = sum(len(one.regressions) for one in assessments)
    worst = [(f"{_short(of.cell)}: {of.metric.name}", HISTORY) for of in worse[:_LISTED]]
    return Change(HISTORY, since, against, counts, worst)


# -- the page --------------------------------------------------------------------------------------------

#: the most panels of a drawing; further series are only in the table
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
        summary="What is worse than before: results against committed baselines, and metrics over commits.",
    )


def history_drawings(assessments: Sequence[Assessment], *, quiet: bool = False) -> Iterator[DataTable]:
    """A table for each suite and metric with a drawing, which has a panel for each series with a step or a
    target. Series with a regression that stands or a missed target come first.

    Args:
        quiet: draw the measured series without a step or a target instead.
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
        texts = (
            f"{label_of(a.series)}: {'; '.join(step_words(a, each) for each in a.steps) or 'no step'}"
            for a in panels
        )
        alt = f"A line for each of {len(panels)} series; {'; '.join(texts)}"
        drawn = Figure(f"figures/history-{name}.svg", svg(history_figure(panels, places)), caption, alt)
        yield series_table(name, caption, group, drawn=drawn)


def is_notable(assessment: Assessment) -> bool:
    """Whether a series has a step or a target."""
    return bool(assessment.steps or assessment.targets)


def step_words(of: Assessment, step: Step) -> str:
    """A step in words: verdict, size, levels before and after, commits, and versions that changed with it."""
    series, kind = of.series, f"meant: {step.meant}" if step.meant else step.verdict
    kind += ", stands" * any(step is each for each in of.regressions) + " (drift)" * step.drift
    size = series.difference(step.before, step.after)
    levels = f"{series.spelled(step.before)} to {series.spelled(step.after)}"
    also = "".join(f", {name} {a} to {b}" for name, (a, b) in step.also_changed.items())
    return f"{kind}: {size} ({levels}) in {step.commit_range}{also and ', also changed' + also[1:]}"


def series_table(name: str, caption: str, assessments: Sequence[Assessment], **further: Any) -> DataTable:
    """A table with a line for each series: its ends, its lowest and highest value, and its steps in words."""
    lines = []
    for of in assessments:
        values = [point.value for point in of.series.points]
        levels = {"lowest": of.series.spelled(min(values)), "highest": of.series.spelled(max(values))}
        steps = {"what changed": "; ".join(step_words(of, step) for step in of.steps)}
        lines.append(series_ends(of) | levels | steps)
    return DataTable(name, caption, lines, **further)


def quiet_table(assessments: Sequence[Assessment]) -> DataTable | None:
    """The table of series without a step or a target; None if there are no such series."""
    quiet = [each for each in assessments if not is_notable(each)]
    caption = "Series without a step or a target: the last value, and the range over all commits"
    return series_table("others", caption, quiet, sortable=True) if quiet else None
