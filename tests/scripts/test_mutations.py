"""The script that counts which random mistakes the tests find.
The JSON schemas of docs/schemas. results/benchmarks/performance.md holds what was measured. The errors of
interpolation: by hand on a small table, and the committed ones of a small file. A hook's tests."""

import ast
import copy
import csv
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coverage import CoverageData
from jsonschema import Draft202012Validator

from scripts.covering_tests import covering_tests
from scripts.schemas import FOLDER, SCHEMAS, scenario, text_of
from spbench.bench.measure.clusters.rate_tables import RateTable
from spbench.bench.measure.scenarios.scenario import PACKAGE
from spbench.bench.yaml_files import packaged, read_yaml
from tests.grid import data, tabled

SCRIPTS = Path(__file__).parents[2] / "scripts"

CODE = data(__file__)["CODE"]
TESTS = data(__file__)["TESTS"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    for name, text in {"toy/__init__.py": "", "toy/area.py": CODE, "tests/test_area.py": TESTS}.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    data = CoverageData(str(tmp_path / "coverage"))
    for test in ("small", "large", "gone"):
        data.set_context(f"tests/test_area.py::test_{test}|run")
        data.add_lines({f"/elsewhere/{'toy/area.py'}": [5]})
    data.write()
    return tree


def run(tree: Path, *options: str, code: int = 0) -> str:
    command = [sys.executable, str(SCRIPTS / "mutations.py"), "--tree", str(tree), "--paths", "toy"]
    command += ["--coverage", str(tree.parent / "coverage"), "--output", str(tree.parent / "verdicts")]
    # without this project's plug-ins pytest starts in a third of the time
    quick = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p xdist.plugin"}
    done = subprocess.run([*command, *options], env={**os.environ, **quick}, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stdout


def test_what_is_killed_and_what_survives(tree: Path) -> None:
    first = run(tree, "--sample", "2", "--portion", "1")
    kept = (tree.parent / "verdicts").read_text()
    assert "of    1 killed" in first
    whole = run(tree, "--sample", "2")
    verdicts = [json.loads(line) for line in (tree.parent / "verdicts").read_text().splitlines()]
    assert (tree.parent / "verdicts").read_text().startswith(kept)  # what was judged is not run again
    assert {row["text"]: row["verdict"] for row in verdicts} == {
        "(x <= 10)": "survived",
        "(not x < 10)": "killed",
    }
    assert "+    return x if (x <= 10) else 10" in whole
    assert (tree / "toy" / "area.py").read_text() == CODE


@pytest.mark.slow
def test_frozen_mistakes_are_found_where_they_stand_now(tree: Path) -> None:
    run(tree, "--sample", "9")
    moved, verdicts = tree / "toy" / "moved.py", tree.parent / "verdicts"
    (tree / "toy" / "area.py").rename(moved)
    moved.write_text("LINES = 3\n\n\n" + CODE.replace('"""A string, which is left alone."""\n', ""))
    tests = tree / "tests" / "test_area.py"
    tests.write_text(TESTS.replace("toy.area", "toy.moved"))
    again = run(tree, "--frozen", str(verdicts))
    killed = sum(json.loads(line)["verdict"] == "killed" for line in verdicts.read_text().splitlines())
    assert killed
    rows = len(verdicts.read_text().splitlines())
    assert f"{killed} of {rows:4} killed" in again
    assert f"0 of {rows} gone" in again
    tests.write_text(tests.read_text().replace("clipped(12) == 10", "clipped(12)"))  # a test that asks less
    assert "survived" in run(tree, "--frozen", str(verdicts), code=1)


def test_a_hang_is_ended_and_told(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from mutations import run_tests

    (tree / "tests" / "test_area.py").write_text("import time\n\ndef test_hangs():\n    time.sleep(60)\n")
    assert run_tests(tree, ["tests/test_area.py"], limit_s=1.0) == ("hang", "")


def test_each_kind_of_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from mistakes import mutations

    source = "\n".join(data(__file__)["SOURCE"])
    made = [*mutations("f.py", source)]
    assert [(each.kind, each.applied(source).splitlines()[each.line - 1]) for each in made] == [
        (*pair,) for pair in data(__file__)["MISTAKES"]
    ]
    for each in made:
        ast.parse(each.applied(source))


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
    page = (ROOT / "results" / "benchmarks" / "performance.md").read_text()
    shown = page.partition(f"<!-- {marker} -->\n")[2].partition("<!-- end -->")[0]
    lines = script["TABLES"][marker](script["benchmarks"]())
    assert lines
    assert shown == script["markdown"](lines)


def test_all_tables_are_in_the_page(script: dict[str, Any]) -> None:
    page = (ROOT / "results" / "benchmarks" / "performance.md").read_text()
    assert page.count("<!-- end -->") == len(script["TABLES"])
    largest = [
        float(line["1,024 ranks"].split()[0]) for line in script["TABLES"]["scale"](script["benchmarks"]())
    ]
    assert f"{min(largest):.1f} to {max(largest):.1f} CPU seconds to trace" in page


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


@tabled(__file__, "test_the_tests_of_changed_files")
def test_the_tests_of_changed_files(files: list[str], tests: list[str]) -> None:
    assert covering_tests(files) == tests
    assert all((SCRIPTS.parent / each).exists() for each in tests)
