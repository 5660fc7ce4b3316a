"""Running a command line in this process, on made-up answers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.command_line.cli import exit_code
from spbench.bench.measure.engines.run_cell import measure
from spbench.bench.measure.sweep.results import ResultsFile
from spbench.bench.measure.sweep.sweep import as_row, unfinished
from spbench.bench.row import Row
from tests.bench import fakes
from tests.terminal import outputs_checked

Run = Callable[..., tuple[int, str, str]]


def sweep_here(cells: list[Cell], results: ResultsFile, **hooks: Any) -> list[Row]:
    """A sweep in this process, whose cells ``fakes.answer`` measures."""
    for cell in unfinished(cells, results):
        hooks["on_start"](cell)
        row = as_row(cell, measure(fakes.answer, cell))
        results.append(row)
        hooks["on_end"](row)
    return [results.rows[cell.key] for cell in cells]


@pytest.fixture
def command_line(capsys: pytest.CaptureFixture[str]) -> Run:
    """A function of a command line's words; it returns exit code, output and messages. What it prints is
    checked as terminals show it, too."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with outputs_checked():
            code = exit_code(arguments)
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


@pytest.fixture
def spbench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: Run) -> Run:
    """As :func:`command_line`, in an empty folder with small.yaml, whose cells are made up."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("spbench.bench.measure.sweep.sweep.sweep_cells", sweep_here)
    monkeypatch.delenv("SPBENCH_DEBUG", raising=False)
    Path("small.yaml").write_text(fakes.SCENARIO)
    return command_line
