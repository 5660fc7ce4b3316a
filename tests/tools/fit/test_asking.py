"""Tasks of workers: their outcomes are kept on disk by cell, function and arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.files import CACHE_FOLDER
from spbench.bench.measurement import Measurement, Outcome
from spbench.bench.tools.fit import asking
from spbench.bench.tools.fit.asking import COST, Asking, Task
from tests.bench.hosts import CrewHere

CELL = Cell(model="causal-transformer-tiny", strategy="single", batch=2, seq_len=64)
ran: list[int] = []


def run(cell: Cell, depth: int = 0) -> Measurement:
    ran.append(depth)
    return Measurement(peak_memory_bytes=depth, meters={COST: {"cpu_s": 2.0}})


@pytest.mark.parametrize(("kept", "runs"), [(True, [0, 1]), (False, [0, 1, 0, 1])])
def test_outcomes_are_read_where_they_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool, runs: list[int]
) -> None:
    monkeypatch.setattr(asking, "Crew", CrewHere)
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path) if kept else "off")
    ran.clear()
    for _ in range(2):
        with Asking(jobs=1) as ask:
            tasks = [Task(CELL, run), Task(CELL.model_copy(), partial(run, depth=1))]
            peaks = {task.run: outcome.measurement["peak_memory_bytes"] for task, outcome in ask(tasks)}
            assert [peaks[task.run] for task in tasks] == [0, 1]
            assert ask.cpu_s == 4.0
    assert ran == runs


def test_outcomes_of_other_code_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where only what asks has changed, and nothing that measures."""
    monkeypatch.setattr(asking, "Crew", CrewHere)
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path))
    ran.clear()
    for code in ("before", "before", "after"):
        monkeypatch.setattr(asking, "_code", lambda code=code: code)
        with Asking(jobs=1) as ask:
            assert [outcome.status for _, outcome in ask([Task(CELL, run)])] == ["ok"]
    assert ran == [0, 0]


def test_the_code_that_asks_is_that_of_fit_and_advise(monkeypatch: pytest.MonkeyPatch) -> None:
    digested: list[str] = []
    monkeypatch.setattr(asking, "digest_of_files", lambda root, paths: digested.extend(p.name for p in paths))
    asking._code.__wrapped__()
    assert {"look.py", "anatomy.py", "asking.py"} <= {*digested}


def test_an_executor_takes_the_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many at once as it has room for, the cells of one function together; none runs here."""
    given: list[tuple[str, int]] = []

    class Elsewhere:
        at_once = 8

        def outcomes(
            self, cells: Sequence[Cell], run: Any, on_start: Callable[[Cell], None]
        ) -> Iterator[tuple[Cell, Outcome]]:
            given.append((asking._name(run), len(cells)))
            yield from ((cell, Outcome("ok")) for cell in reversed(cells))

    with Asking(executor=Elsewhere()) as ask:  # type: ignore[arg-type]
        monkeypatch.setattr(ask, "_cache", None)
        cells = [CELL, CELL.model_copy(update={"batch": 4})]
        tasks = [*(Task(cell, run) for cell in cells), Task(CELL.model_copy(), partial(run, depth=1))]
        assert [task for task, _ in ask(tasks)] == [tasks[1], tasks[0], tasks[2]]
        assert (ask.jobs, ask.crew.workers) == (8, [])
    assert given == [("run", 2), ("run () {'depth': 1}", 1)]
