"""Ratios to one cell, where nothing was published."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from spbench.bench.errors import UserError
from spbench.bench.measure.engines.run_cell import measure
from spbench.bench.measure.scenarios.scenario import Scenario
from spbench.bench.measure.scenarios.select import Narrowing, declared_cells
from spbench.bench.measure.sweep.results import Row
from spbench.bench.measure.sweep.sweep import as_row
from spbench.bench.tools.papers.answer import compare, load_scenario
from tests.bench.fakes import SCENARIO, answer

RATIO: dict[str, Any] = {
    "ratio": "over-four",
    "cells": {"strategy": "ring_self_attention"},
    "baseline": {"strategy": "ring_self_attention", "sizes": {"sp": 4}},
}


def scenario(folder: Path, **changes: Any) -> Scenario:
    content = yaml.safe_load(SCENARIO) | {"claims": [], "inferred_from": [], "ratios": [RATIO | changes]}
    (folder / "small.yaml").write_text(yaml.safe_dump(content))
    return load_scenario(str(folder / "small.yaml"))


def rows_of(loaded: Scenario) -> dict[str, Row]:
    cells = declared_cells(loaded, Narrowing())
    return {cell.key: as_row(cell, measure(answer, cell)) for cell in cells}


def test_the_largest_ratio_stands_first_and_nothing_is_published(tmp_path: Path) -> None:
    loaded = scenario(tmp_path)
    found = compare(loaded, declared_cells(loaded, Narrowing()), rows_of(loaded))
    assert [(entry.claim, entry.reproduced) for entry in found] == [
        ("over-four: ring_self_attention sp8", 2.0),
        ("over-four: ring_self_attention sp4", 1.0),
        ("over-four: ring_self_attention 1", 0.25),
    ]
    assert {(entry.published, entry.relative_error, entry.source) for entry in found} == {(None, None, "")}
    assert {entry.denominator for entry in found} == {found[1].numerator}


def test_micro_batches_tell_alike_splits_apart(tmp_path: Path) -> None:
    loaded = scenario(tmp_path)
    (cell,) = (each for each in declared_cells(loaded, Narrowing()) if each.sizes.sp == 4)
    parted = cell.model_copy(update={"training": cell.training.model_copy(update={"micro_batches": 4})})
    kept = {each.key: as_row(each, measure(answer, each)) for each in (cell, parted)}
    (entry,) = (each for each in compare(loaded, [parted], kept) if each.numerator == parted.key)
    assert entry.claim == "over-four: ring_self_attention sp4, 4 micro-batches"


def test_without_an_answer_there_is_a_reason(tmp_path: Path) -> None:
    loaded = scenario(tmp_path)
    cells, rows = declared_cells(loaded, Narrowing()), rows_of(loaded)
    (largest,) = (cell for cell in cells if cell.sizes.sp == 8)
    (baseline,) = (cell for cell in cells if cell.sizes.sp == 4)
    rows[largest.key] |= {"status": "oom", "reason": "no room", "measurement": {}}
    *_, last = compare(loaded, cells, rows)
    assert (last.numerator, last.reproduced) == (largest.key, None)
    assert last.note == "has no answer, oom: no room"
    del rows[baseline.key]
    found = compare(loaded, cells, rows)
    assert {(entry.reproduced, entry.note) for entry in found} == {(None, "baseline was not run")}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantity": "answr"}, "ratios[0].quantity: unknown quantity 'answr'; did you mean 'answer'?"),
        ({"cells": {"strategy": "lasp"}}, "ratios[0].cells: no group declares a cell with strategy lasp"),
        ({"baseline": {"strategy": "ring_self_attention"}}, "ratios[0].baseline: selects 3 cells"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        scenario(tmp_path, **changes)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
