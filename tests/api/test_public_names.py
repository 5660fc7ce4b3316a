"""`import spbench` imports nothing else, and has the same names at run time and for type checkers.
The fixture ``spbench`` in the tests of a project that uses spbench."""

import ast
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import spbench
import spbench.bench.measure.processes.preloaded

HERE = Path(spbench.__file__).parent
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


pytest_plugins = ["pytester"]

PLUGIN = ("-p", "spbench.pytest_plugin", "-p", "no:cacheprovider")
SCENARIO = """
title: A small step
defaults: {cluster: dgx-a100}
groups:
  - {model: bert-tiny, strategy: ring_self_attention, sizes: {sp: [1, 2]}, batch: 2, seq_len: 32}
"""
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
    project.makepyfile("""
        def test_run(spbench):
            table = spbench.run("my.yaml", world_sizes=[2])
            assert list(table["status"]) == ["ok"]

        def test_subset(spbench):
            found = spbench.assert_no_worse("my.yaml", baseline="whole", subset=True, world_sizes=[1])
            assert [(d.verdict, d.allowed) for d in found.differences] == [("missing", True), ("new", False)]

        def test_lacking(spbench):
            spbench.assert_no_worse("my.yaml", baseline="whole", world_sizes=[1])

        def test_unknown(spbench):
            spbench.run("other.yaml")
    """)
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
    project.makepyfile("""
        import sys

        def test_light():
            heavy = {"torch", "pandas", "numpy", "pydantic", "spbench.bench"} & sys.modules.keys()
            assert not heavy, heavy
    """)
    result = project.runpytest_subprocess(*PLUGIN, "-p", "xdist", "-n", "1")
    result.assert_outcomes(passed=1)
