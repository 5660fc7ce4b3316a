"""Comparison with published numbers: ratios, values, and claims that have no answer yet."""

import csv
from pathlib import Path

import pytest

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.measure.engines.run_cell import measure
from spbench.bench.measure.scenarios.scenario import Scenario
from spbench.bench.measure.scenarios.select import Narrowing, declared_cells
from spbench.bench.measure.sweep.results import Row
from spbench.bench.measure.sweep.sweep import as_row
from spbench.bench.tools.papers.answer import compare, load_scenario
from spbench.bench.tools.papers.comparison import as_frame, write
from tests.bench.fakes import SCENARIO, answer


@pytest.fixture
def scenario(tmp_path: Path) -> Scenario:
    (tmp_path / "small.yaml").write_text(SCENARIO)
    return load_scenario(str(tmp_path / "small.yaml"))


def results(cells: list[Cell]) -> dict[str, Row]:
    return {cell.key: as_row(cell, measure(answer, cell)) for cell in cells}


def test_ratio_and_value(scenario: Scenario) -> None:
    cells = declared_cells(scenario, Narrowing())
    ratio, value = compare(scenario, cells, results(cells))
    assert (ratio.published, ratio.reproduced) == (3.0, 4.0)
    assert ratio.relative_error == pytest.approx(1 / 3)
    assert (ratio.role, ratio.note, ratio.variant) == ("predicted", "a ratio", "first")
    assert ratio.numerator.startswith("bert-tiny/ring_self_attention/sp8/")
    assert ratio.denominator.startswith("bert-tiny/tensor_parallel/tp2/")
    assert (value.published, value.reproduced, value.role) == (114000.0, 4000.0, "inferred")
    assert value.denominator == ""


def test_each_variant_and_cluster_has_its_own(scenario: Scenario) -> None:
    cells = declared_cells(scenario, Narrowing(variant="all", clusters=["local", "piz-daint-p100"]))
    found = compare(scenario, cells, results(cells))
    assert len(found) == 2 * 2 * 2
    assert all(entry.reproduced is not None for entry in found)
    assert [entry.variant for entry in found] == ["first"] * 4 + ["steady"] * 4


def test_claims_without_an_answer_stay(scenario: Scenario) -> None:
    cells = declared_cells(scenario, Narrowing())
    rows = results(cells)
    ring, tensor = cells[-1], cells[1]
    rows[tensor.key] |= {"status": "failed", "reason": "ValueError: broken", "measurement": {}}
    del rows[ring.key]
    ratio, value = compare(scenario, cells, rows)
    assert ratio.reproduced is None
    assert ratio.relative_error is None
    assert ratio.note == (
        "a ratio; numerator was not run; denominator has no answer, failed: ValueError: broken"
    )
    assert value.reproduced == 4000.0
    rows[tensor.key] |= {"status": "ok", "measurement": {"answer": 0}}
    rows[ring.key] = results([ring])[ring.key]
    assert compare(scenario, cells, rows)[0].note == "a ratio; denominator is zero"


def test_file(scenario: Scenario, tmp_path: Path) -> None:
    cells = declared_cells(scenario, Narrowing())
    found = compare(scenario, cells, results(cells[:-1]))
    path = write(found, tmp_path)
    with path.open() as file:
        rows = list(csv.reader(file))
    assert rows[0] == [
        *("claim", "published", "reproduced", "relative_error", "role", "note"),
        *("variant", "numerator", "denominator"),
        *("table", "cell", "strategy", "quantity", "status_published", "status_reproduced", "source"),
    ]
    assert rows[1][1:6] == ["3.0", "", "", "predicted", "a ratio; numerator was not run"]
    assert rows[2][1:3] == ["114000.0", "4000.0"]
    assert as_frame([]).columns.tolist() == rows[0]
    with pytest.raises(UserError, match=r"^cannot write .*comparison.csv: Not a directory"):
        write(found, path)  # a file, not a folder
