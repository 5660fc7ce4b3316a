"""Everything that a scenario answers to, beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spbench.bench.cell import Cell
from spbench.bench.config.scenario import Scenario
from spbench.bench.published.answer import answer_kinds
from spbench.bench.published.comparison import Comparison
from spbench.bench.published.results import ScenarioResults
from spbench.bench.sweep.results import Row


def compare(scenario: Scenario, cells: Sequence[Cell], rows: Mapping[str, Row]) -> list[Comparison]:
    """The published numbers of a scenario beside ours, in each variant, cluster and engine among ``cells``.
    UserError if a published file cannot be read.

    Args:
        cells: the declared cells (on other clusters and engines, if those were asked for).
        rows: the results by key; an answer whose cells are not there, or have no such number, stays.
    """
    results = ScenarioResults(cells, rows, scenario.path.parent, scenario.document.inferred_from)
    kinds = answer_kinds().values()
    return [entry for kind in kinds for entry in kind.compare_all(scenario.answers(kind), results)]
