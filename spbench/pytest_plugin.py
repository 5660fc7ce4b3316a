"""The pytest plugin: the fixture ``spbench``, for tests of projects that use it.

    def test_memory(spbench):
        spbench.assert_no_worse("my.yaml", baseline="baselines/my")

Every pytest of an environment with spbench imports this module, so it imports nothing but pytest until a test
uses the fixture. See docs/ci.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pandas import DataFrame

    from spbench.bench.tools.changes.judgement import Judgement
    from spbench.bench.tools.papers.comparison import Comparison

WRITE_BASELINE = "--spbench-write-baseline"

#: of the properties of a test's report: the folder of a baseline that it has written
_WRITTEN = "spbench_baseline"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("spbench").addoption(
        WRITE_BASELINE,
        action="store_true",
        help="assert_no_worse writes its baselines anew instead of comparing with them.",
    )


@pytest.fixture
def spbench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ScenarioRuns:
    """Runs scenarios, and holds them against baselines; see :class:`ScenarioRuns`."""
    return ScenarioRuns(request, tmp_path_factory)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name the baselines that were written, by whichever worker of xdist."""
    for report in terminalreporter.getreports("passed"):
        for name, folder in report.user_properties:
            if name == _WRITTEN:
                terminalreporter.write_line(f"spbench: wrote the baseline {folder}")


class ScenarioRuns:
    """What the fixture ``spbench`` gives a test.

    Paths that are not absolute are looked for beside the test's file.
    """

    def __init__(self, request: pytest.FixtureRequest, folders: pytest.TempPathFactory):
        self._request, self._folders = request, folders

    def run(self, scenario: str | PathLike[str], *, jobs: int | None = 0, **narrowing: Any) -> DataFrame:
        """Measure the cells of a scenario, and return one row for each, as :func:`spbench.run` does.

        Args:
            scenario: its name, or the path of its YAML file; or a training step of yours, as "step.py:train".
            jobs: worker processes; 0: measure in this process; None: one a usable core.
            narrowing: which cells, as of :func:`spbench.run`: ``strategies``, ``world_sizes``, ...

        Fails the test where :func:`spbench.run` raises UserError.
        """
        with _user_errors_as_failures():
            return self._run(scenario, self._folders.mktemp("spbench"), jobs, narrowing)[0]

    def assert_no_worse(
        self,
        scenario: str | PathLike[str],
        *,
        baseline: str | PathLike[str],
        subset: bool = False,
        jobs: int | None = 0,
        **narrowing: Any,
    ) -> Judgement:
        """Measure the cells of a scenario, and fail the test if they are worse than a baseline, with the
        table of `spbench compare`; returns what the comparison found.

        With ``--spbench-write-baseline`` the results become the baseline first.

        Args:
            scenario, jobs, narrowing: as of :meth:`run`.
            baseline: a folder that ``--spbench-write-baseline``, `spbench baseline` or a run has written.
            subset: the cells that are measured may be fewer than those of the baseline.
        """
        from spbench.bench.row import FAULTS
        from spbench.bench.tools.changes.judgement import judge
        from spbench.bench.tools.changes.result_files import read_results

        target, folder = self._beside_the_test(baseline), self._folders.mktemp("spbench")
        writes = self._request.config.getoption(WRITE_BASELINE)
        if not writes and not target.exists():
            pytest.fail(
                f"there is no baseline {target}; write it, look at it and commit it:\n"
                f"    pytest {WRITE_BASELINE} {self._request.node.nodeid!r}",
                pytrace=False,
            )
        with _user_errors_as_failures():
            frame, comparisons = self._run(scenario, folder, jobs, narrowing)
            if writes:
                self._write_baseline(folder, comparisons, target)
            judgement = judge(read_results(target), read_results(folder, judged=True), subset=subset)
        if judgement.word != "not worse":
            faults = frame[frame["status"].isin(FAULTS)]
            reasons = [f"{row.key}: {row.reason}" for row in faults.itertuples()]
            text = _printed(judgement, f"{scenario} against {target}")
            pytest.fail("\n".join([text, *reasons]), pytrace=False)
        return judgement

    def _run(
        self, scenario: str | PathLike[str], folder: Path, jobs: int | None, narrowing: dict[str, Any]
    ) -> tuple[DataFrame, Sequence[Comparison]]:
        """Leaves cells.jsonl in the folder, and comparison.csv if the scenario has published numbers."""
        from spbench.api import run
        from spbench.bench.measure import Narrowing, read_rows
        from spbench.bench.setting_values import names_a_step
        from spbench.bench.tools.papers.answer import compare, load_scenario
        from spbench.bench.tools.papers.comparison import write

        beside = self._beside_the_test(scenario)
        loaded = load_scenario(beside if beside.is_file() or names_a_step(str(scenario)) else scenario)
        frame = run(loaded, output=folder, jobs=jobs, **narrowing)
        rows = {row.key: row for row in read_rows(folder)[0]}
        comparisons = compare(loaded, Narrowing(**narrowing).declared(loaded), rows)
        if comparisons:
            write(comparisons, folder)
        return frame, comparisons

    def _write_baseline(self, folder: Path, comparisons: Sequence[Comparison], target: Path) -> None:
        """Make a run's results a baseline; fails the test if a cell has none."""
        from spbench.bench.measure import read_rows
        from spbench.bench.row import FAULTS
        from spbench.bench.tools.changes.baseline_command import write_baseline

        rows = read_rows(folder)[0]
        if failed := [row for row in rows if row.status in FAULTS]:
            first = f"{failed[0].key}: {failed[0].status}, {failed[0].reason}"
            pytest.fail(f"{len(failed)} cells failed, so no baseline is written; {first}", pytrace=False)
        write_baseline(rows, comparisons, target)
        self._request.node.user_properties.append((_WRITTEN, str(target)))

    def _beside_the_test(self, path: str | PathLike[str]) -> Path:
        return self._request.path.parent / path


def _printed(judgement: Judgement, title: str) -> str:
    """What `spbench compare` prints."""
    from spbench.bench.command_line.forms.as_table import show
    from spbench.bench.tools.changes.judgement_report import judgement_report

    text = StringIO()
    show(judgement_report(judgement, title), text, text)
    return text.getvalue()


@contextmanager
def _user_errors_as_failures() -> Iterator[None]:
    """Inside, a UserError fails the test, with its one line."""
    from spbench.bench.errors import UserError

    try:
        yield
    except UserError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None
