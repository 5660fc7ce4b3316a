"""The fixture ``spbench`` in the tests of a project that uses spbench."""

import json
from pathlib import Path

import pytest

# pytester forgets what a run has imported, but torch's operators can be defined once alone
import spbench.bench.measure.processes.preloaded  # noqa: F401

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
