"""`spbench fit` in this process: its workers run here, one cell at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from spbench.bench.cell import Cell
from spbench.bench.tools.fit import asking, proofs
from spbench.bench.tools.fit.suggestions import Change, single_changes
from tests.bench.hosts import CrewHere
from tests.measure.engines.cells import write_cluster
from tests.tools.commands.conftest import Run as CommandLine
from tests.tools.commands.conftest import command_line

__all__ = ["command_line"]


@pytest.fixture
def fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: CommandLine, kept_traces: None
) -> CommandLine:
    """Run `spbench fit` in an empty folder; gives exit code, output and messages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(asking, "Crew", CrewHere)
    monkeypatch.delenv("SPBENCH_DEBUG", raising=False)
    return partial(command_line, "fit")


@pytest.fixture
def card(tmp_path: Path) -> Callable[[int], str]:
    """A function that writes a cluster of cards with so many usable MiB, and returns its path."""
    return partial(write_cluster, tmp_path)


@pytest.fixture
def few_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two changes that help much and one that does not."""
    kept = {"model_options.recompute", "training.micro_batches", "model_options.cross_entropy"}

    def some(cell: Cell) -> list[Change]:
        return [each for each in single_changes(cell) if {*each.settings} <= kept]

    monkeypatch.setattr(proofs, "single_changes", some)
