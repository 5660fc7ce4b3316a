"""Tasks of workers: their outcomes are kept on disk by cell, function and arguments. Stages of pipelines that
are traced beside each other: the answer is that of one worker, and no stage is traced twice."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.files import CACHE_FOLDER
from spbench.bench.measure.engines import traces, tracing
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measurement import Measurement, Outcome
from spbench.bench.tools.choose import asking, fitting
from spbench.bench.tools.choose.asking import COST, Asking, Task
from spbench.bench.tools.choose.fitting import stages_beside
from spbench.bench.tools.choose.look import examine, trace_stage
from tests.bench.hosts import CrewHere
from tests.measure.engines.cells import write_cluster

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


#: of four layers, a stage each
STAGED = Cell(
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
    with traces.keeping_traces():
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
    cell = STAGED.model_copy(update={"cluster": write_cluster(tmp_path, 20)})
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
    alone = STAGED.model_copy(update={"sizes": STAGED.sizes.model_copy(update={"pp": 1})})
    assert stages_beside([alone], 2) == []
    assert stages_beside([STAGED], 1) == stages_beside([STAGED, alone], 2) == []
    deep = STAGED.model_copy(update={"sizes": STAGED.sizes.model_copy(update={"pp": 8})})
    assert stages(stages_beside([deep], 2)) == [7, 1]
    monkeypatch.setattr(fitting, "cache_folder", lambda: None)
    assert stages_beside([STAGED], 2) == []
