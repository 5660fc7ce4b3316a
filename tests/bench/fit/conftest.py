"""`spbench fit` in this process: its workers run here, one cell at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.fit import answers, proofs
from spbench.bench.fit.suggestions import Change, single_changes
from spbench.bench.measurement import Outcome, Run, measure
from tests.bench.commands.conftest import Run as CommandLine
from tests.bench.commands.conftest import command_line
from tests.bench.engines.cells import write_cluster

__all__ = ["command_line"]


class CrewHere:
    """In place of :class:`Crew`: gives a cell its outcome when that is asked for."""

    def __init__(self, run: Run):
        self.run = run
        self.given: list[Cell] = []

    @property
    def busy(self) -> bool:
        return bool(self.given)

    def idle(self, at_most: int) -> Any:
        return None if self.given else self

    def give(self, cell: Cell) -> None:
        self.given.append(cell)

    def ended(self) -> list[tuple[Cell, Outcome]]:
        cell = self.given.pop()
        return [(cell, measure(self.run, cell))]

    def dismiss(self) -> None:
        self.given.clear()


@pytest.fixture
def fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: CommandLine, kept_traces: None
) -> CommandLine:
    """Run `spbench fit` in an empty folder; gives exit code, output and messages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(answers, "Crew", CrewHere)
    monkeypatch.delenv("SPBENCH_DEBUG", raising=False)
    return partial(command_line, "fit")


@pytest.fixture
def card(tmp_path: Path) -> Callable[[int], str]:
    """A function that writes a cluster of cards with so many usable MiB, and returns its path."""
    return partial(write_cluster, tmp_path)


@pytest.fixture
def few_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the changes, two that help much and one that does not."""
    kept = {"model_options.recompute", "training.micro_batches", "model_options.cross_entropy"}

    def some(cell: Cell) -> list[Change]:
        return [each for each in single_changes(cell) if {*each.settings} <= kept]

    monkeypatch.setattr(proofs, "single_changes", some)
