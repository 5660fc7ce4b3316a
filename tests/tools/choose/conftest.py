"""`spbench fit` and `spbench advise` in this process: their workers run here, one cell at a time."""

from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.tools.choose import asking, suggestions
from spbench.bench.tools.choose import layout_search as search
from spbench.bench.tools.choose.question import Question
from spbench.bench.tools.choose.references import savings_of
from spbench.bench.tools.choose.suggestions import Change, single_changes
from tests.bench.hosts import CrewHere
from tests.measure.engines.cells import write_cluster
from tests.tools.commands.conftest import Run as CommandLine
from tests.tools.commands.conftest import command_line

__all__ = ["command_line"]


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: CommandLine, kept_traces: None
) -> CommandLine:
    """Run a command in an empty folder; gives exit code, output and messages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(asking, "Crew", CrewHere)
    monkeypatch.delenv("SPBENCH_DEBUG", raising=False)
    return command_line


@pytest.fixture
def fit(here: CommandLine) -> CommandLine:
    """Run `spbench fit`; see :func:`here`."""
    return partial(here, "fit")


@pytest.fixture
def advise(here: CommandLine) -> CommandLine:
    """Run `spbench advise` of a model; see :func:`here`."""
    return partial(here, "advise", "--model")


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

    monkeypatch.setattr(suggestions, "single_changes", some)


def keep_savings(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """The search tries the first few alone of the settings of a model that take less memory."""

    def some(question: Question) -> dict[str, dict[str, Any]]:
        return dict(islice(savings_of(question).items(), 1 + n))

    monkeypatch.setattr(search, "savings_of", some)


@pytest.fixture
def no_savings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search tries none of the settings of a model that take less memory."""
    keep_savings(monkeypatch, 0)


@pytest.fixture
def one_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search tries one of the settings of a model that take less memory."""
    keep_savings(monkeypatch, 1)
