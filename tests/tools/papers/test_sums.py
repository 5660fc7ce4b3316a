"""Weighted sums of several cells beside a published number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from spbench.bench.errors import UserError
from spbench.bench.measure.scenarios.scenario import Scenario
from spbench.bench.measure.scenarios.select import Narrowing, declared_cells
from spbench.bench.measure.sweep.results import Row
from spbench.bench.measure.sweep.sweep import as_row
from spbench.bench.measure.sweep.worker import measure
from spbench.bench.tools.papers.answer import compare, load_scenario
from tests.bench.fakes import SCENARIO, answer


def term(factor: float, ranks: int) -> dict[str, Any]:
    return {"factor": factor, "cell": {"strategy": "ring_self_attention", "sizes": {"sp": ranks}}}


SUM: dict[str, Any] = {
    "sum": "a further rank",
    "published": {"file": "layer.csv"},
    "terms": [term(0.25, 8), term(-0.25, 4)],
    "quantity": "answer",
    "unit": 10,
}


def scenario(folder: Path, **changes: Any) -> Scenario:
    (folder / "layer.csv").write_text("claim,published\na further rank,125\n")
    content = yaml.safe_load(SCENARIO) | {"claims": [], "inferred_from": [], "sums": [SUM | changes]}
    (folder / "small.yaml").write_text(yaml.safe_dump(content))
    return load_scenario(str(folder / "small.yaml"))


def rows_of(loaded: Scenario) -> dict[str, Row]:
    cells = declared_cells(loaded, Narrowing())
    return {cell.key: as_row(cell, measure(answer, cell)) for cell in cells}


def test_terms_are_weighted_and_told_in_the_published_unit(tmp_path: Path) -> None:
    """The fake engine answers 1000 a rank."""
    loaded = scenario(tmp_path)
    (entry,) = compare(loaded, declared_cells(loaded, Narrowing()), rows_of(loaded))
    assert (entry.claim, entry.published, entry.role) == ("a further rank", 125.0, "predicted")
    assert entry.reproduced == (0.25 * 8000 - 0.25 * 4000) / 10
    assert entry.relative_error == pytest.approx(100 / 125 - 1)
    assert entry.source == "layer.csv:a further rank:published"


def test_a_term_without_a_number_says_so(tmp_path: Path) -> None:
    loaded = scenario(tmp_path)
    rows = rows_of(loaded)
    (four,) = (key for key in rows if "/sp4/" in key)
    del rows[four]
    (entry,) = compare(loaded, declared_cells(loaded, Narrowing()), rows)
    assert (entry.reproduced, entry.note) == (None, "term 2 was not run")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantity": "answr"}, "sums[0].quantity: unknown quantity 'answr'; did you mean 'answer'?"),
        ({"terms": []}, "sums[0].terms: is empty; give at least one"),
        ({"terms": [term(1, 8), term(1, 5)]}, "sums[0].terms[1].cell: "),
        ({"published": {"file": "layer.csv", "column": "x"}}, "sums[0].published: "),
    ],
)
def test_mistakes(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        scenario(tmp_path, **changes)
    assert message in str(caught.value)
