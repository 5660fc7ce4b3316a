"""Tasks of workers: their outcomes are kept on disk by cell, function and arguments. Stages of pipelines
that are traced beside each other: the answer is that of one worker, and no stage is traced twice. What
`spbench fit` takes for granted of a model.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.cell import Cell, Sizes
from spbench.bench.files import CACHE_FOLDER
from spbench.bench.measure.engines import traces, tracing
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measurement import Measurement, Outcome
from spbench.bench.tools.choose import asking, fitting
from spbench.bench.tools.choose.anatomy import Part
from spbench.bench.tools.choose.asked import Asked
from spbench.bench.tools.choose.asking import COST, Asking, Task
from spbench.bench.tools.choose.fit_verdict import TABLES, in_program_words
from spbench.bench.tools.choose.fitting import stages_beside
from spbench.bench.tools.choose.look import examine, trace_stage
from spbench.bench.tools.choose.subject import (
    subject,
    text_on,
    tokens_of_rank,
)
from tests.bench.hosts import CrewHere
from tests.grid import data, tabled
from tests.measure.engines.cells import write_cluster
from tests.tools.jobs.job_inputs import INPUTS

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
STAGED = Cell.model_validate(data(__file__)["STAGED"])


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


@pytest.mark.slow
def test_a_stage_that_another_worker_has_traced_is_not_traced_again(
    tmp_path: Path, traced: list[int]
) -> None:
    cell = STAGED.model_copy(update={"cluster": write_cluster(tmp_path, 20)})
    beside = stages_beside([cell], 2)
    assert stages(beside) == [1, 3, 2]
    for one, run in beside:
        assert run(one).status == "ok"
    assert len(traced) == 3
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
    assert stages(stages_beside([deep], 2)) == [1, 7, 6]
    monkeypatch.setattr(fitting, "cache_folder", lambda: None)
    assert stages_beside([STAGED], 2) == []


OPTION = "strategy_options.placement"


def asked(strategy: str, axis: str, **settings: object) -> Asked:
    of_model = {f"sizes.{axis}": 2, "seq_len": 1024, **settings}
    return Asked(cluster="dgx-a100", gpus=2, strategy=strategy, settings=of_model)


@pytest.mark.parametrize(
    ("model", "strategy", "settings", "placement"),
    [
        ("causal-transformer-tiny", "ring_attention", {}, "zigzag"),
        ("causal-transformer-tiny", "all_gather_kv", {}, "zigzag"),
        ("causal-transformer-tiny", "ring_attention", {OPTION: "contiguous"}, "contiguous"),
        ("causal-transformer-tiny", "ring_attention", {"seq_len": 1026}, None),  # not divisible by 2 x 2
        ("causal-transformer-tiny", "ring_attention", {"model_options.window": 64}, "zigzag"),
        ("causal-transformer-tiny", "ulysses", {}, None),
        ("mistral-7b-v0.1", "ring_attention", {"seq_len": 8192}, None),  # a halo, of contiguous chunks
        ("tnl-tiny", "ring_attention", {}, None),  # linear attention has contiguous chunks alone
        ("st-dit-tiny", "ring_attention", {"seq_len": 72}, None),  # no causal mask
    ],
)  # fmt: skip
def test_text_is_placed_as_programs_do(
    model: str, strategy: str, settings: dict[str, object], placement: str | None
) -> None:
    found = subject([model], asked(strategy, "sp", **settings))
    (cell,) = found.cells
    assert cell.strategy_options.get("placement") == placement
    if placement == "zigzag" and OPTION not in settings:
        assert f"placement zigzag (--set {OPTION})" in text_on("taken", cell, said=found.said)


@tabled(__file__, "tokens_of_a_rank_show_what_an_axis_divides")
def test_tokens_of_a_rank_show_what_an_axis_divides(
    strategy: str, axis: str, batch: int, tokens: int
) -> None:
    (cell,) = subject(["causal-transformer-tiny"], asked(strategy, axis, batch=batch)).cells
    assert tokens_of_rank(cell) == tokens


@pytest.mark.parametrize(("name", "said"), [("llama_factory_v1.yaml", True), ("verl.sh", False)])
def test_a_micro_batch_that_the_job_has_is_not_taken(name: str, said: bool) -> None:
    """verl fills rows up to a number of tokens, so that its micro-batch is unknown."""
    found = subject([str(INPUTS / name)], Asked(cluster="dgx-h100", gpus=8))
    assert ("training.micro_batches" in found.said) is said
    assert (
        "taken where nothing was said: micro-batch 1" in text_on("taken", found.cells[0], said=found.said)
    ) is not said


def test_experts_have_a_line() -> None:
    settings = {"seq_len": 1024, "sizes.ep": 8}
    (cell,) = subject(["Qwen/Qwen3-30B-A3B"], Asked("dgx-h100", 16, None, settings)).cells
    said = "routed experts: 95% of parameters; 16 of 128 in each layer are on a rank"
    assert text_on("experts", cell) == said
    assert (
        text_on("model", cell, "run.sh")
        == "the model run.sh: 30.5 billion parameters, 3.35 billion of them active, 48 layers"
    )
    assert text_on("slow", cell) == ""
    assert "; 6,144 experts of their own" in text_on("slow", cell.model_copy(update={"sizes": Sizes(dp=16)}))
    (dense,) = subject(["llama3-8b"], Asked("dgx-h100", 16, None, {"seq_len": 1024})).cells
    assert text_on("experts", dense) == ""


@pytest.mark.parametrize("program", ["", "megatron", "torchtitan", "deepspeed"])
def test_modules_have_the_words_of_the_program(program: str) -> None:
    root, mlp = (in_program_words(each, program) for each in ("FSDPDecoder", "blocks.*.mlp"))
    assert (root, mlp) == {
        "": ("the head and the loss", "blocks.*.mlp"),
        "megatron": ("output_layer and the loss", "decoder.layers.*.mlp"),
        "torchtitan": ("output and the loss", "layers.*.feed_forward"),
        "deepspeed": ("lm_head and the loss", "model.layers.*.mlp"),
    }[program]


@tabled(__file__, "parts_of_experts_are_named")
def test_parts_of_experts_are_named(kind: str, module: str, part: str) -> None:
    about = {"peak": 1, "words": str}
    of_peak = Part(kind, module, 1, 1)
    assert TABLES.record("part", of_peak, experts=True, **about)["of"] == part
    assert TABLES.record("part", of_peak, experts=False, **about)["of"] is None
