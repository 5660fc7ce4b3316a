"""`spbench advise` in this process: its workers run here, one cell at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.tools.advise import layout_search as search
from spbench.bench.tools.advise.question import Question
from spbench.bench.tools.advise.references import savings_of
from spbench.bench.tools.fit import asking
from tests.bench.hosts import CrewHere
from tests.tools.commands.conftest import Run, command_line

__all__ = ["command_line"]


@pytest.fixture
def advise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: Run, kept_traces: None
) -> Callable[..., tuple[int, str, str]]:
    """Run `spbench advise` in an empty folder; gives exit code, output and messages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(asking, "Crew", CrewHere)
    monkeypatch.delenv("SPBENCH_DEBUG", raising=False)
    return partial(command_line, "advise", "--model")


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
