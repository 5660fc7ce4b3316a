"""Stages of pipelines that are traced beside each other: the answer is that of one worker, and no stage is
traced twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.files import CACHE_FOLDER
from spbench.bench.measure.engines import traces, tracing
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.tools.fit import fitting
from spbench.bench.tools.fit.anatomy import examine, trace_stage
from spbench.bench.tools.fit.asking import Task
from spbench.bench.tools.fit.fitting import stages_beside
from tests.measure.engines.cells import write_cluster

#: of four layers, a stage each
CELL = Cell(
    model="causal-transformer-tiny",
    model_options={"layers": 4},
    strategy="single",
    sizes={"pp": 4},
    batch=8,
    seq_len=64,
    precision="bf16",
    training={"backend": "ddp", "micro_batches": 8, "steps": 2, "moments": "later"},
)


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Ranks in the order in which they are traced; traces are kept in a folder of the test's own."""
    ranks: list[int] = []
    made: Callable[..., Trace] = tracing._traced

    def noted(cell: Cell, rank: int, *others: Any) -> Trace:
        ranks.append(rank)
        return made(cell, rank, *others)

    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path / "cache"))
    monkeypatch.setattr(tracing, "_traced", noted)
    with traces.used():
        yield ranks


def stages(tasks: Sequence[Task]) -> list[int]:
    """The stages that tasks trace, each of a cell that is an object of its own."""
    assert len({id(task.cell) for task in tasks}) == len(tasks)
    partials: list[Any] = [task.run for task in tasks]
    assert {each.func for each in partials} == {trace_stage}
    return [each.keywords["stage"] for each in partials]


def test_a_stage_that_another_worker_has_traced_is_not_traced_again(
    tmp_path: Path, traced: list[int]
) -> None:
    cell = CELL.model_copy(update={"cluster": write_cluster(tmp_path, 20)})
    beside = stages_beside([cell], 2)
    assert stages(beside) == [3, 1]
    for one, run in beside:
        assert run(one).status == "ok"
    assert len(traced) == 2
    found = examine(cell)
    assert max(Counter(traced).values()) == 1
    assert len(traced) == 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traces, "_cache", None)
        assert examine(cell) == found


def test_where_there_is_nothing_to_gain_none_is_traced_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = CELL.model_copy(update={"sizes": CELL.sizes.model_copy(update={"pp": 1})})
    assert stages_beside([alone], 2) == []
    assert stages_beside([CELL], 1) == stages_beside([CELL, alone], 2) == []
    deep = CELL.model_copy(update={"sizes": CELL.sizes.model_copy(update={"pp": 8})})
    assert stages(stages_beside([deep], 2)) == [7, 1]
    monkeypatch.setattr(fitting, "cache_folder", lambda: None)
    assert stages_beside([CELL], 2) == []
