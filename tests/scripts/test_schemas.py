"""The JSON schemas of docs/schemas. docs/internals/performance.md holds what was measured. The errors of
interpolation: by hand on a small table, and the committed ones of a small file."""

import copy
import csv
import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from scripts.schemas import FOLDER, SCHEMAS, scenario, text_of
from spbench.bench.measure.clusters.rate_tables import RateTable
from spbench.bench.measure.scenarios.scenario import PACKAGE
from spbench.bench.yaml_files import packaged, read_yaml

GROUP = {"model": "bert-tiny", "strategy": ["ulysses", "lasp"], "batch": 1, "seq_len": ["4K", 8192]}


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_committed_schema_is_that_of_the_code(name: str) -> None:
    assert (FOLDER / name).read_text() == text_of(name), "python scripts/schemas.py writes it"
    Draft202012Validator.check_schema(json.loads(text_of(name)))


def test_every_packaged_scenario_is_one() -> None:
    validator = Draft202012Validator(scenario())
    wrong = {
        name: [error.message for error in errors]
        for name, path in packaged(PACKAGE).items()
        if (errors := list(validator.iter_errors(read_yaml(Path(path)))))
    }
    assert wrong == {}


def test_what_a_scenario_cannot_have_is_refused() -> None:
    validator = Draft202012Validator(scenario())
    right = {"title": "t", "groups": [{**GROUP, "sizes": {"sp": [2, 4]}, "mesh": ["dp", "sp"]}]}
    assert validator.is_valid(right)
    for path, value in (("batch", True), ("seqlen", 1), ("sizes", {"sp": "two"}), ("precision", "fp8")):
        wrong = copy.deepcopy(right)
        wrong["groups"][0][path] = value  # type: ignore[index]
        assert not validator.is_valid(wrong), path
    assert not validator.is_valid({**right, "group": {}})
    assert not validator.is_valid({"groups": right["groups"]})


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "performance_tables.py"), run_name="tables")


@pytest.mark.parametrize("marker", ["scale", "trackers", "others"])
def test_the_page_has_what_was_measured(script: dict[str, Any], marker: str) -> None:
    page = (ROOT / "docs" / "internals" / "performance.md").read_text()
    shown = page.partition(f"<!-- {marker} -->\n")[2].partition("<!-- end -->")[0]
    lines = script["TABLES"][marker](script["benchmarks"]())
    assert lines
    assert shown == script["markdown"](lines)


def test_all_tables_are_in_the_page(script: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "internals" / "performance.md").read_text()
    assert page.count("<!-- end -->") == len(script["TABLES"])


SCRIPT = runpy.run_path(
    str(Path(__file__).parents[2] / "scripts" / "interpolation_errors.py"), run_name="errors"
)


def test_a_call_off_the_line_of_its_neighbours_is_off_by_so_much() -> None:
    sizes, rates = np.array([[1.0], [2.0], [4.0]]), np.array([1.0, 3.0, 4.0])
    (error,) = SCRIPT["errors_between"](RateTable(sizes, 1 / rates, np.ones(3)), [0])
    # computed at the geometric mean of 1 and 4 a second, it takes 1/2 s for 1/3
    assert error == pytest.approx(0.5)


def test_a_call_twice_as_large_as_the_table_has_is_off_by_its_own_rate() -> None:
    sizes, seconds = np.array([[1.0, 1.0, 1.0], [2.0, 1.0, 1.0]]), np.array([1.0, 1.6])
    (error,) = SCRIPT["errors_beyond"](RateTable(sizes, seconds, np.array([2.0, 4.0])), 0)
    assert error == pytest.approx(0.25)


def test_the_committed_line_of_a_table_is_what_the_script_computes() -> None:
    with SCRIPT["FILE"].open(encoding="utf-8") as lines:
        committed = {row["table"]: row for row in csv.DictReader(lines)}
    computed = SCRIPT["row"]("l40s-collectives")
    assert {name: str(value) for name, value in computed.items()} == committed["l40s-collectives"]
