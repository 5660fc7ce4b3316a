"""Results to export, and the command line."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest

from spbench.bench.tools.changes.judgement import judge
from spbench.bench.tools.changes.result_files import read_results
from tests.tools.changes.rows import CLAIM, EVERYTHING, ROWS, Change, Rows, folder, judged_folder
from tests.tools.commands.conftest import Run, command_line, spbench

__all__ = ["command_line", "spbench"]


Judge = Callable[[Rows, Rows], tuple[int, str, str]]


@pytest.fixture
def judged(tmp_path: Path, command_line: Run) -> Judge:
    """Exit code of compare, Markdown and JUnit of rows beside others."""

    def judge(rows: Rows, base: Rows) -> tuple[int, str, str]:
        made = {
            name: folder(tmp_path / name / "suite", found, CLAIM)
            for name, found in (("n", rows), ("b", base))
        }
        places = [str(path) for path in made.values()]
        code = command_line("compare", places[1], places[0])[0]
        shown = []
        for system in ("markdown", "junit"):
            done, out, err = command_line("export", "--to", system, places[0], "--base", places[1])
            assert done == 0, err
            shown.append(out)
        return code, shown[0], shown[1]

    return judge


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Results of every kind: exact, measured, out of memory with and without numbers, impossible, failed."""
    return folder(tmp_path / "everything", EVERYTHING)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return judged_folder(tmp_path / "base", ROWS)


@pytest.fixture
def changed(tmp_path: Path, base: Path) -> Callable[[Change], list[tuple[str, str, str]]]:
    """What the gate says, worst first, when a change is made to the rows."""

    def judged(change: Change) -> list[tuple[str, str, str]]:
        rows = copy.deepcopy(ROWS)
        change(rows)
        found = judge(read_results(base), read_results(judged_folder(tmp_path / "new", rows)))
        assert found.fails == any(d.verdict in ("worse", "missing") for d in found.differences)
        return [(d.verdict, d.where, d.quantity) for d in found.differences]

    return judged
