"""Gates: what was run now beside the committed baselines, as `spbench compare` judges it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spbench.bench.errors import UserError
from spbench.bench.git import SHORT_HASH, day_of, last_change
from spbench.bench.measure.sweep.results import RESULTS_FILE
from spbench.bench.tools.changes.judgement import Judgement, check_gate, judge
from spbench.bench.tools.changes.metrics import VERDICTS, Difference
from spbench.bench.tools.changes.result_files import Results, read_results

Line = dict[str, Any]


@dataclass(frozen=True)
class Gate:
    """A baseline, and what was run beside it.

    Attributes:
        scenario: whose cells they are.
        base: the folder of the baseline.
        commits, machines: before and now; of rows that do not say, the commit that committed them.
        judgement: None: nothing was run here, or it cannot be compared.
        problem: why there is no judgement.
    """

    scenario: str
    base: Path
    commits: tuple[Sequence[str], Sequence[str]]
    machines: tuple[Sequence[str], Sequence[str]]
    judgement: Judgement | None
    problem: str = ""

    @property
    def days(self) -> list[str]:
        """The days of the baseline's commits, as far as git knows them."""
        return [day for day in map(day_of, self.commits[0]) if day]

    @property
    def table_name(self) -> str:
        """The name of the table of differences on its page."""
        return f"gate-{self.scenario.replace('_', '-')}"

    @property
    def counts(self) -> dict[str, int]:
        """Differences by what they are: worse, missing, better, new; and what is ``equal``."""
        assert self.judgement is not None
        verdicts = Counter[str](difference.verdict for difference in self.judgement.differences)
        return {**{name: verdicts[name] for name in VERDICTS}, "equal": self.judgement.equal.total()}

    @property
    def lines(self) -> list[Line]:
        """The differences as lines of a table, the worst first; ``change`` in percent of the base, where more
        is worse."""
        return [] if self.judgement is None else [_line(each) for each in self.judgement.differences]


def gates(baseline: Path, runs: Path) -> Iterator[Gate]:
    """The baselines in a folder, each beside the run of its name."""
    for path in sorted(baseline.glob(f"*/{RESULTS_FILE}")):
        yield _gate(path.parent, runs / path.parent.name)


def _gate(base: Path, new: Path) -> Gate:
    try:
        before = read_results(base)
        was_run = (new / RESULTS_FILE).is_file()
        now = read_results(new, judged=True) if was_run else None
        if now:
            check_gate(before, now)
    except UserError as error:
        return Gate(base.name, base, ([], []), ([], []), None, str(error))
    how = "" if was_run else f"nothing was run here: spbench run --scenario {base.name} --output {new}"
    return Gate(
        base.name,
        base,
        (_commits(before), _commits(now) if now else []),
        (list(filter(None, before.machines)), list(filter(None, now.machines)) if now else []),
        judge(before, now) if now else None,
        how,
    )


def _commits(results: Results) -> list[str]:
    named = list(filter(None, results.commits))
    return named or list(filter(None, [last_change(results.path)[:SHORT_HASH]]))


def _line(difference: Difference) -> Line:
    percent = difference.change * 100 if math.isfinite(difference.change) else None
    return {
        "verdict": difference.verdict + (" (allowed)" if difference.allowed else ""),
        "where": difference.where,
        "quantity": difference.quantity,
        "before": difference.base,
        "now": difference.new,
        "worse by (%)": percent,
        "what moved": difference.why,
    }
