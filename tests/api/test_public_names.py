"""`import spbench` imports nothing else, and has the same names at run time and for type checkers.
The fixture ``spbench`` in the tests of a project that uses spbench.
The functions of the public API, as a notebook or a script uses them. The names of our folders are free for
users: files of theirs with these names are not imported for ours."""

import ast
import doctest
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import spbench
import spbench.bench.measure.processes.preloaded
from scripts.public_names import FILE, public_names
from spbench.bench.measure.sweep.results import RESULTS_FILE
from tests.api.user_folder import NAMES, UserFolder
from tests.grid import data

HERE = Path(spbench.__file__).parent
ROOT = Path(__file__).parents[2]
#: what takes longer to import than everything else
HEAVY = ("torch", "numpy", "pandas", "pydantic", "yaml", "click", "rich", "matplotlib")


def imported_for_type_checkers() -> dict[str, str]:
    """The names of spbench under ``if TYPE_CHECKING``, each with its module."""
    tree = ast.parse((HERE / "__init__.py").read_text())
    (block,) = (n for n in tree.body if isinstance(n, ast.If))
    imports = [n for n in block.body if isinstance(n, ast.ImportFrom)]
    modules = {alias.name: node.module or "" for node in imports for alias in node.names}
    return {name: module for name, module in modules.items() if module != "typing"}


def test_importing_imports_nothing_else() -> None:
    code = f"import sys, spbench; print([m for m in {HEAVY} if m in sys.modules])"
    code += (
        "; print([m for m in sys.modules if m.startswith('spbench.')], {*spbench.__all__} <= {*dir(spbench)})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HERE.parent)
    assert done.stdout.splitlines() == ["[]", "[] True"], done.stderr


def test_a_name_imports_what_it_needs_and_no_more() -> None:
    code = (
        "import sys, spbench; spbench.UserError; print('torch' in sys.modules, 'UserError' in vars(spbench))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HERE.parent)
    assert done.stdout == "False True\n", done.stderr


def test_type_checkers_see_the_names_there_are() -> None:
    seen = imported_for_type_checkers()
    assert sorted(seen) == sorted(spbench.__all__)
    for name, module in seen.items():
        assert getattr(spbench, name) is getattr(sys.modules[module], name)


@pytest.mark.parametrize("name", spbench.__all__)
def test_a_public_name_is_documented(name: str) -> None:
    value = getattr(spbench, name)
    if name != "ONE_STAGE":
        assert inspect.getdoc(value), name


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'spbench' has no attribute 'Strategie'"):
        spbench.Strategie  # type: ignore[attr-defined]  # noqa: B018


def unannounced(names: Iterable[str], announced: str) -> list[str]:
    """The names whose last word no line on changes has."""
    return [name for name in names if f"`{name.split()[-1]}`" not in announced]


def test_no_public_name_goes_without_a_line_in_the_changelog() -> None:
    """After a change of names run scripts/public_names.py; a removed one needs a file in .changes too."""
    committed = FILE.read_text().splitlines()
    present = public_names()
    texts = [ROOT / "CHANGELOG.md", *(ROOT / ".changes").glob("*.md")]
    announced = "".join(path.read_text() for path in texts)
    assert unannounced({*committed} - {*present}, announced) == []
    assert present == committed, "run python scripts/public_names.py"


def test_a_removed_name_is_missed_until_it_is_announced() -> None:
    assert unannounced(["option fit --longest"], "`--long` went") == ["option fit --longest"]
    assert unannounced(["option fit --longest"], "The option `--longest` went.") == []


pytest_plugins = ["pytester"]

PLUGIN = ("-p", "spbench.pytest_plugin", "-p", "no:cacheprovider")
SCENARIO = data(__file__)["SCENARIO"]
TEST = """
def test_memory(spbench):
    spbench.assert_no_worse("my.yaml", baseline="baselines/my")
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder with a scenario; of installed plugins none is loaded but those that are named."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # of processes
    pytester.path.joinpath("my.yaml").write_text(SCENARIO)
    return pytester


def change(baseline: Path, **measured: int) -> None:
    """Change numbers of the first row of a baseline."""
    first, *rest = baseline.read_text().splitlines(keepends=True)
    row = json.loads(first)
    row["measurement"] |= measured
    baseline.write_text(json.dumps(row) + "\n" + "".join(rest))


def test_a_baseline_is_written_and_held(project: pytest.Pytester) -> None:
    project.makepyfile(TEST)
    missing = project.runpytest(*PLUGIN)
    missing.assert_outcomes(failed=1)
    missing.stdout.fnmatch_lines(["*there is no baseline *baselines/my; write it*", "*--spbench-write-*"])
    written = project.runpytest(*PLUGIN, "--spbench-write-baseline")
    written.assert_outcomes(passed=1)
    written.stdout.fnmatch_lines(["spbench: wrote the baseline *baselines/my"])
    cells = project.path / "baselines" / "my" / "cells.jsonl"
    assert len(cells.read_text().splitlines()) == 2
    project.runpytest(*PLUGIN).assert_outcomes(passed=1)

    change(cells, peak_memory_bytes=1)
    worse = project.runpytest(*PLUGIN)
    worse.assert_outcomes(failed=1)
    worse.stdout.fnmatch_lines(["*worse*peak memory*", "*WORSE: 1 worse, 1 cells equal*"])


def test_runs_selections_and_user_errors(project: pytest.Pytester) -> None:
    project.makepyfile(data(__file__)["RUNS"])
    rows = '{"key": "%s", "cell": {}, "status": "ok", "measurement": {"peak_memory_bytes": 1}}\n'
    folder = project.mkdir("whole")
    (folder / "cells.jsonl").write_text(rows % "gone")
    result = project.runpytest(*PLUGIN)
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(["*missing*gone*", "*WORSE: 1 missing, 1 new*"])
    result.stdout.fnmatch_lines(["*no scenario*other.yaml*"])
    assert "During handling" not in result.stdout.str()


def test_pytest_starts_without_torch(project: pytest.Pytester) -> None:
    """In a project that does not use the fixture, and with the workers of xdist."""
    project.makepyfile(data(__file__)["LIGHT"])
    result = project.runpytest_subprocess(*PLUGIN, "-p", "xdist", "-n", "1")
    result.assert_outcomes(passed=1)


SMALL_SCENARIO = data(__file__)["SMALL_SCENARIO"]
#: a script without a guard of its main module
SCRIPT = data(__file__)["SCRIPT"]


def cell(**changes: object) -> spbench.Cell:
    content = {"model": "bert-tiny", "strategy": "single", "batch": 2, "seq_len": 24}
    return spbench.Cell.model_validate(content | changes)


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "two.yaml"
    path.write_text(SMALL_SCENARIO)
    return path


def test_the_example_in_the_docstring() -> None:
    found = doctest.testmod(spbench)
    assert found.attempted >= 5
    assert found.failed == 0


def test_a_scenario_is_run_in_part(scenario: Path) -> None:
    table = spbench.run(scenario, strategies=["tensor_parallel"], world_sizes=[1, 2], jobs=0)
    assert table[["strategy", "world_size", "status"]].values.tolist() == [
        ["tensor_parallel", 1, "ok"],
        ["tensor_parallel", 2, "ok"],
    ]
    assert (table["peak_memory_bytes"] > 0).all()
    loaded = spbench.load_scenario(scenario)
    assert loaded.cells[""][0].key in set(table["key"])


def test_cells_are_rows_in_their_order() -> None:
    cells = [cell(batch=4), cell(batch=1), cell(batch=4)]
    assert spbench.run(cells, jobs=0)["batch"].tolist() == [4, 1]


def test_an_output_folder_keeps_rows(tmp_path: Path) -> None:
    first = spbench.run([cell()], output=tmp_path / "kept", jobs=0)
    both = spbench.run([cell(), cell(batch=1)], output=tmp_path / "kept", jobs=0)
    assert first["elapsed_s"][0] == both["elapsed_s"][0]  # not measured again
    assert spbench.read_results(tmp_path / "kept").equals(both)
    assert spbench.read_results(tmp_path / "kept" / RESULTS_FILE).equals(both)
    spbench.run([cell()], output=tmp_path / "kept", fresh=True, jobs=0)
    assert len(spbench.read_results(tmp_path / "kept")) == 1


def test_without_a_folder_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert spbench.run(cell(), jobs=0)["status"].tolist() == ["ok"]
    assert list(tmp_path.iterdir()) == []


def test_a_cell_that_cannot_run_is_a_row() -> None:
    (row,) = spbench.run(cell(strategy="ring_self_attention", sizes={"sp": 5}), jobs=0).to_dict("records")
    assert row["status"] == "unsupported"
    assert "not divisible by 5 ranks" in row["reason"]


def test_errors_are_the_users(tmp_path: Path, scenario: Path) -> None:
    for what, message in (
        (lambda: spbench.run("max_seqlem"), "unknown scenario 'max_seqlem'; did you mean 'max_seqlen'?"),
        (lambda: spbench.run(scenario, strategies=["lsp"]), "unknown strategy 'lsp'; did you mean 'lasp'?"),
        (lambda: spbench.run(cell(), models=["tnl-tiny"]), "cells are run as they are"),
        (lambda: spbench.run([]), "there is no cell to run"),
        (lambda: spbench.run(cell(model="bort")), "unknown model 'bort'"),
        (lambda: spbench.read_results(tmp_path), "no results file"),
        (lambda: spbench.verify(["lsp"]), "unknown strategy 'lsp'"),
    ):
        with pytest.raises(spbench.UserError) as caught:
            what()
        assert message in str(caught.value)


def test_lines_that_are_no_rows_are_warned_of(tmp_path: Path) -> None:
    spbench.run(cell(), output=tmp_path, jobs=0)
    with (tmp_path / RESULTS_FILE).open("a") as file:
        file.write("{}\n")
    with pytest.warns(UserWarning, match=r"cells.jsonl:2: not a result row, skipped"):
        assert len(spbench.read_results(tmp_path)) == 1


def test_verify_returns_a_row_a_case() -> None:
    table = spbench.verify(["lasp"], ["tnl-tiny"], world_sizes=[1], parts=["attention"])
    assert set(table["status"]) == {"green"}
    assert set(table["part"]) == {"attention"}
    assert (table["error"] <= table["limit"]).all()


@pytest.mark.slow
def test_a_script_needs_no_main_guard(tmp_path: Path) -> None:
    """Its workers and their ranks do not run it again."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == ["started", "ok", "ok", "1"], done.stderr


#: what stands on the path where spbench is installed: a folder with nothing else in it
SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture
def user(tmp_path: Path) -> UserFolder:
    return UserFolder(tmp_path, path=[SOURCE])


def test_only_spbench_is_offered() -> None:
    names = {path.name for path in SOURCE.iterdir() if path.suffix != ".egg-info"}
    assert names == {"spbench"}


@pytest.mark.parametrize("name", NAMES)
def test_the_users_file_is_the_one_imported(user: UserFolder, name: str) -> None:
    assert f"imported the {name}.py of the user" in user.run("-c", f"import spbench, {name}").stderr


@pytest.mark.slow
def test_the_command_runs_among_them(user: UserFolder) -> None:
    """Listings, workers in processes of their own, and two real ranks below one of them."""
    listed = user.run("-m", "spbench", "list", "--format", "json")
    assert "ring_self_attention" in json.loads(listed.stdout)["strategies"], listed.stderr
    arguments = ("--scenario", "mine.yaml", "--jobs", "2", "--output", "rows", "--format", "json")
    ran = user.run("-m", "spbench", "run", *arguments)
    statuses = [(row["cell"]["engine"], row["status"]) for row in json.loads(ran.stdout)["rows"]]
    assert statuses == [("virtual", "ok"), ("distributed", "ok"), ("virtual", "ok")], ran.stderr


@pytest.mark.slow
def test_a_suite_of_the_user_imports_spbench(user: UserFolder) -> None:
    done = user.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py")
    assert "1 passed" in done.stdout, done.stdout + done.stderr
