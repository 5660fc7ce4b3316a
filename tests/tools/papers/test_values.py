"""Values of an expression over cells: beside a published number, alone, and without an answer yet. A kind of
answer is one file: section, checks and comparisons are taken up by its being there."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import spbench.bench.tools.papers.answers
from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.measure.engines.run_cell import measure
from spbench.bench.measure.scenarios.scenario import Scenario
from spbench.bench.measure.scenarios.select import Narrowing
from spbench.bench.measure.sweep.sweep import as_row
from spbench.bench.row import Row
from spbench.bench.tools.papers.answer import (
    KINDS_PACKAGE,
    answer_kinds,
    compare,
    document_model,
    load_scenario,
)
from spbench.bench.tools.papers.comparison import Comparison, as_frame, read_csv, write
from spbench.impls.discovery import _named_classes
from tests.bench.fakes import SCENARIO, answer
from tests.grid import tabled


def ring(ranks: int) -> dict[str, Any]:
    return {"strategy": "ring_self_attention", "sizes": {"sp": ranks}}


#: what a further rank adds, of 1000 that the fake engine answers a rank
SUM: dict[str, Any] = {
    "claim": "a further rank",
    "published": {"file": "layer.csv"},
    "cells": {"eight": ring(8), "four": ring(4)},
    "ours": "0.25 * eight - 0.25 * four",
    "unit": 10,
}
RATIOS: dict[str, Any] = {
    "claim": "over-four",
    "each": {"strategy": "ring_self_attention"},
    "cells": {"baseline": ring(4)},
    "ours": "each / baseline",
}


def loaded(folder: Path, *values: dict[str, Any]) -> Scenario:
    """The small scenario, with these values in the place of its own."""
    (folder / "layer.csv").write_text("claim,published\na further rank,125\n")
    content = yaml.safe_load(SCENARIO)
    if values:
        content |= {"values": list(values), "inferred_from": []}
    (folder / "small.yaml").write_text(yaml.safe_dump(content))
    return load_scenario(str(folder / "small.yaml"))


def results(cells: list[Cell]) -> dict[str, Row]:
    return {cell.key: as_row(cell, measure(answer, cell)) for cell in cells}


def compared(scenario: Scenario, *without: int, **changed: Any) -> list[Comparison]:
    """The comparisons of all cells but those of ``without`` ranks; ``changed`` in the rows of 8 ranks."""
    cells = Narrowing().declared(scenario)
    rows = results([cell for cell in cells if cell.sizes.world not in without])
    for key in rows:
        rows[key] |= changed if "/sp8/" in key else {}
    return compare(scenario, cells, rows)


def test_ratio_and_value(tmp_path: Path) -> None:
    ratio, value = compared(loaded(tmp_path))
    assert (ratio.published, ratio.reproduced, ratio.quantity) == (3.0, 4.0, "ratio")
    assert ratio.relative_error == pytest.approx(1 / 3)
    assert (ratio.role, ratio.note, ratio.variant) == ("predicted", "a ratio", "first")
    assert ratio.numerator.startswith("bert-tiny/ring_self_attention/sp8/")
    assert ratio.denominator.startswith("bert-tiny/tensor_parallel/tp2/")
    assert (value.published, value.reproduced, value.role) == (114000.0, 4000.0, "inferred")
    assert (value.quantity, value.denominator) == ("max_seq_len", "")


def test_each_variant_and_cluster_has_its_own(tmp_path: Path) -> None:
    scenario = loaded(tmp_path)
    cells = Narrowing(variant="all", clusters=["local", "piz-daint-p100"]).declared(scenario)
    entries = compare(scenario, cells, results(cells))
    assert len(entries) == 2 * 2 * 2
    assert all(entry.reproduced is not None for entry in entries)
    assert [entry.variant for entry in entries] == ["first"] * 4 + ["steady"] * 4


def test_terms_are_weighted_and_told_in_the_published_unit(tmp_path: Path) -> None:
    scenario = loaded(tmp_path, SUM)
    (entry,) = compared(scenario)
    assert (entry.claim, entry.published, entry.role) == ("a further rank", 125.0, "predicted")
    assert entry.reproduced == (0.25 * 8000 - 0.25 * 4000) / 10
    assert entry.relative_error == pytest.approx(100 / 125 - 1)
    assert entry.source == "layer.csv:a further rank:published"
    (entry,) = compared(scenario, 4)
    assert (entry.reproduced, entry.note) == (None, "four was not run")


def test_of_several_cells_the_largest_stands_first_and_nothing_is_published(tmp_path: Path) -> None:
    entries = compared(loaded(tmp_path, RATIOS))
    assert [(entry.claim, entry.reproduced) for entry in entries] == [
        ("over-four: ring_self_attention sp8", 2.0),
        ("over-four: ring_self_attention sp4", 1.0),
        ("over-four: ring_self_attention 1", 0.25),
    ]
    assert {(entry.published, entry.relative_error, entry.source) for entry in entries} == {(None, None, "")}
    assert {entry.denominator for entry in entries} == {entries[1].numerator}


def test_micro_batches_tell_alike_splits_apart(tmp_path: Path) -> None:
    scenario = loaded(tmp_path, RATIOS)
    (cell,) = (each for each in Narrowing().declared(scenario) if each.sizes.sp == 4)
    parted = cell.model_copy(update={"training": cell.training.model_copy(update={"micro_batches": 4})})
    (entry,) = compare(scenario, [parted], results([cell, parted]))
    assert entry.claim == "over-four: ring_self_attention sp4, 4 micro-batches"


def test_values_without_an_answer_stay_and_say_why(tmp_path: Path) -> None:
    scenario = loaded(tmp_path)
    ratio, value = compared(scenario, 8, 2)
    assert (ratio.reproduced, ratio.relative_error, value.reproduced) == (None, None, 4000.0)
    assert ratio.note == "a ratio; numerator was not run; denominator was not run"
    assert compared(scenario, 4)[1].note == "cell was not run"
    failed = {"status": "failed", "reason": "ValueError: broken", "measurement": {}}
    assert compared(scenario, **failed)[0].note.endswith(
        "numerator has no answer, failed: ValueError: broken"
    )
    *_, last = compared(loaded(tmp_path, RATIOS), **failed | {"status": "oom", "reason": "no room"})
    assert (last.claim[-3:], last.reproduced, last.note) == ("sp8", None, "has no answer, oom: no room")
    none = compared(loaded(tmp_path, RATIOS), 4)
    assert {entry.reproduced for entry in none} == {None}
    assert none[0].note == "baseline was not run"
    nothing = {"status": "ok", "measurement": {"answer": 0}}
    over = loaded(tmp_path, {"claim": "z", "cells": SUM["cells"], "ours": "four / eight"})
    assert "division by zero" in compared(over, **nothing)[0].note


def test_file(tmp_path: Path) -> None:
    entries = compared(loaded(tmp_path), 8)
    columns, rows = read_csv(path := write(entries, tmp_path))
    assert columns == [
        *("claim", "published", "reproduced", "relative_error", "role", "note"),
        *("variant", "numerator", "denominator"),
        *("table", "cell", "strategy", "quantity", "status_published", "status_reproduced", "source"),
    ]
    first, second = ([*row.values()] for row in rows)
    assert first[1:6] == ["3.0", "", "", "predicted", "a ratio; numerator was not run"]
    assert second[1:3] == ["114000.0", "4000.0"]
    assert as_frame([]).columns.tolist() == columns
    with pytest.raises(UserError, match=r"^cannot write .*comparison.csv: Not a directory"):
        write(entries, path)  # a file, not a folder


@tabled(__file__, "mistakes_are_one_line")
def test_mistakes_are_one_line(tmp_path: Path, entry: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=r"^[^\n]*$") as error:
        loaded(tmp_path, {"sum": SUM, "ratios": RATIOS}[entry] | changes)
    assert message in str(error.value)


#: a plug-in's kind, which is as good a module of the package
KIND = Path(__file__).parents[2] / "plugins" / "examples" / "bounds.py"

#: what remembers the kinds that were found
CACHES = (_named_classes, document_model)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for a scenario with a section of a new kind, whose only trace is a file in the package."""
    package = tmp_path / "kinds"
    package.mkdir()
    (package / "bounds.py").write_text(KIND.read_text())
    path = [*spbench.bench.tools.papers.answers.__path__, str(package)]
    monkeypatch.setattr(spbench.bench.tools.papers.answers, "__path__", path)
    (tmp_path / "b.csv").write_text("claim,published\nlow,100\nhigh,3000\n")
    for cached in CACHES:
        cached.cache_clear()
    yield tmp_path
    sys.modules.pop(f"{KINDS_PACKAGE}.bounds", None)
    for cached in CACHES:
        cached.cache_clear()


def scenario(folder: Path) -> Scenario:
    low, high = ({"claim": c, "published": {"file": "b.csv"}, "cell": {"world": 2}} for c in ("low", "high"))
    content = {
        "title": "Bounds",
        "defaults": {"model": "bert-tiny", "batch": 4, "seq_len": 512, "strategy": "tensor_parallel"},
        "groups": [{"sizes": {"tp": [1, 2]}}],
        "bounds": [low, high],
        "inferred_from": [{"setting": "layers", "answers": ["high"], "reason": "a test"}],
    }
    (folder / "s.yaml").write_text(yaml.safe_dump(content))
    return load_scenario(str(folder / "s.yaml"))


def test_the_kinds_are_the_modules_of_the_package() -> None:
    assert list(answer_kinds()) == ["curves", "values", "formulas", "tables"]


def test_a_new_kind_is_one_file(folder: Path) -> None:
    loaded = scenario(folder)
    cells = loaded.cells[""]
    rows: dict[str, Row] = {cell.key: {"measurement": {"peak_memory_bytes": 2000}} for cell in cells}
    found = compare(loaded, cells, rows)
    assert [(c.claim, c.published, c.reproduced, c.role, c.note) for c in found] == [
        ("low", 100.0, 2000, "predicted", "exceeded"),
        ("high", 3000.0, 2000, "inferred", "within"),
    ]
