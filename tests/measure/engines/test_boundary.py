"""Searches: the answer is what trying every size finds, it is proved, and it does not cost many traces.

Predicted peaks are those of whole traces.
Scenarios of splits over several axes: their cells in small, and searches on strategies around others."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.cell import Cell, SearchRequest, Sizes, TrainingOptions
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.deepened_traces import Effort
from spbench.bench.measure.engines.engine import Candidates
from spbench.bench.measure.engines.run_cell import run_cell
from spbench.bench.measure.engines.search import Guesses, largest_that_fits
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.scenarios.scenario import load_scenario
from spbench.bench.measure.trace.memory_log import MemoryLog
from spbench.bench.measure.trace.meter import CommunicationMeter
from spbench.bench.measurement import Measurement
from spbench.impls.strategies.base import Unsupported
from tests.cells import make_cell
from tests.grid import data, tabled
from tests.measure.engines.cells import cell_of, traced_layers, write_cluster
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("kept_traces")

SINGLE, TP, RSA = "single", "tensor_parallel", "ring_self_attention"


def searching(folder: Path, mib: int, strategy: str, n: int, search: SearchRequest, **changes: Any) -> Cell:
    asked = {"batch": 4, "seq_len": 128, "precision": "fp16"} | changes | {search.quantity: None}
    return cell_of(strategy, n, cluster=write_cluster(folder, mib), search=search, **asked)


def fits(cell: Cell, value: int) -> bool:
    return VirtualEngine().measure(cell.at(value)).status == "ok"


def step_of(cell: Cell) -> int:
    ranks = cell.sizes.sp if cell.search.quantity == "seq_len" else 1
    return cell.search.step * ranks


def assert_proved(cell: Cell, found: Measurement) -> None:
    assert found.answer % step_of(cell) == 0
    assert found.status == "ok"
    tried = {probe["value"]: probe["status"] for probe in found.proof}
    assert tried[found.answer] == "ok"
    assert tried[found.answer + step_of(cell)] == "oom"
    assert all(status == "oom" for value, status in tried.items() if value > found.answer)
    (proof,) = (probe for probe in found.proof if probe["value"] == found.answer)
    assert found.peak_memory_bytes == proof["peak_memory_bytes"]
    assert found.reserved_memory_bytes == proof["reserved_memory_bytes"]


BATCH, LENGTH = SearchRequest(quantity="batch"), SearchRequest(quantity="seq_len", step=8)


MEGATRON = {"layers": 3, "hidden": 12, "heads": 3, "softmax": "megatron"}


@pytest.mark.parametrize(
    ("mib", "strategy", "n", "search", "changes"),
    [
        slow(64, SINGLE, 1, BATCH, {"precision": "fp32"}),
        slow(64, TP, 3, BATCH, {"seq_len": 256, "model_options": {"dropout": 0.1}}),
        slow(300, RSA, 3, BATCH, {"seq_len": 768}),
        slow(300, TP, 2, LENGTH, {"batch": 8, "training": {"gradients": "stale", "moments": "later"}}),
        slow(280, RSA, 4, LENGTH, {"batch": 12}),
        # less than one multiple of what fused kernels take fits
        (60, SINGLE, 1, BATCH, {"seq_len": 512, "model_options": {"layers": 3}}),
        # the kernel that Megatron-LM had takes batch x heads in fours only: here every fourth batch, with
        # half the memory of its neighbours; and queries in fours
        slow(200, RSA, 2, BATCH, {"seq_len": 512, "model_options": MEGATRON}),
        slow(
            256, RSA, 2, SearchRequest(quantity="seq_len", step=2), {"batch": 60, "model_options": MEGATRON}
        ),
    ],
)
def test_answer_is_what_trying_all_sizes_finds(
    tmp_path: Path, mib: int, strategy: str, n: int, search: SearchRequest, changes: dict[str, Any]
) -> None:
    """On these cards. On some, a size beyond fits by chance, where the allocator wastes less than at the
    answer's neighbours: a search finds a proven boundary, and does not try everything beyond."""
    cell = searching(tmp_path, mib, strategy, n, search, **changes)
    found = largest_that_fits(cell)
    assert_proved(cell, found)
    assert found.answer is not None
    answer, step = found.answer, step_of(cell)
    near = range(answer + step, answer + 5 * step, step)
    far = range(answer + 8 * step, 2 * answer, max(1, answer // step // 4) * step)
    assert [value for value in (*near, *far) if fits(cell, value)] == []
    assert len(found.proof) <= (3 if search.step % 4 == 0 else 6)


@pytest.mark.slow
def test_kernel_that_takes_2048_keys(tmp_path: Path) -> None:
    """Memory jumps there: the boundary is at the kernel's limit over a wide range of cards."""
    search = SearchRequest(quantity="seq_len", step=64)
    answers = {}
    for mib in (260, 400):
        options = {"layers": 4, "hidden": 8, "heads": 4, "softmax": "megatron"}
        cell = searching(tmp_path, mib, SINGLE, 1, search, batch=1, model_options=options)
        found = largest_that_fits(cell)
        assert_proved(cell, found)
        assert len(found.proof) <= 5
        answers[mib] = found.answer or 0
    assert answers[260] == answers[400] == 2048


def test_few_layers_predict_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every size but those that are proved is guessed from models of 3 and 5 layers."""
    traced = traced_layers(monkeypatch)
    cell = searching(tmp_path, 128, RSA, 2, LENGTH, batch=8, model_options={"layers": 9})
    found = largest_that_fits(cell)
    assert_proved(cell, found)
    assert traced.count(9) == len(found.proof) <= 3
    assert set(traced) == {3, 5, 9}
    assert len(traced) <= 14


@pytest.mark.slow  # half a minute: of few tiles little is lost
def test_what_an_allocator_may_not_give_back_costs_few_traces(tmp_path: Path) -> None:
    """Each length has a number of tiles of its own, so traces of few layers say what is allocated; what is
    reserved beside it is learned from whole traces."""
    changes = {
        "model": "causal-transformer-tiny",
        "model_options": {"layers": 5, "hidden": 768, "inner": 3072, "mlp_tile": 32, "recompute": "full"},
        "training": {"alloc_retries": False, "cuda_alloc_conf": "expandable_segments:True"},
    }
    search = SearchRequest(quantity="seq_len", step=4, limit=512)
    cell = searching(tmp_path, 4000, SINGLE, 1, search, batch=512, **changes)
    found = largest_that_fits(cell)
    assert_proved(cell, found)
    assert len(found.proof) <= 3  # 6 where each disappointment goes further below


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, slow(2)])
def test_timed_search_times_its_answer(stages: int) -> None:
    search = SearchRequest(quantity="batch", step=4, timed=True)
    sizes = Sizes(pp=stages, sp=2)
    cell = Cell(
        model="bert-tiny",
        strategy=RSA,
        sizes=sizes,
        seq_len=128,
        cluster="piz-daint-p100",
        precision="fp16",
        model_options={"layers": 4},
        training=TrainingOptions(micro_batches=stages),
        search=search,
    )
    found = largest_that_fits(cell)
    assert [probe["status"] for probe in found.proof].count("oom") >= 1
    alone = VirtualEngine().measure(cell.at(found.answer))
    assert found.step_time_s == alone.step_time_s is not None
    assert found.tokens_per_s == found.answer * 128 / found.step_time_s
    assert (found.breakdown, found.calibration) == (alone.breakdown, alone.calibration)
    untimed = largest_that_fits(
        cell.model_copy(update={"search": search.model_copy(update={"timed": False})})
    )
    assert (untimed.answer, untimed.step_time_s, untimed.tokens_per_s) == (found.answer, None, None)


@pytest.mark.slow
def test_nothing_fits(tmp_path: Path) -> None:
    cell = searching(tmp_path, 20, SINGLE, 1, BATCH, seq_len=512)
    found = largest_that_fits(cell)
    assert (found.status, found.answer) == ("oom", None)
    assert "no room" in found.reason
    assert {probe["status"] for probe in found.proof} == {"oom"}
    assert min(probe["value"] for probe in found.proof) == 1


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("limit", "answer"), [(1, 1), (3, 3), (4, 4), (9, 9)])
def test_limit_is_respected(tmp_path: Path, limit: int, answer: int) -> None:
    cell = searching(tmp_path, 2000, SINGLE, 1, SearchRequest(quantity="batch", limit=limit))
    found = largest_that_fits(cell)
    assert (found.status, found.answer) == ("ok", answer)
    assert max(probe["value"] for probe in found.proof) == limit


@pytest.mark.slow
def test_limit_between_two_steps(tmp_path: Path) -> None:
    search = SearchRequest(quantity="seq_len", step=8, limit=200)
    found = largest_that_fits(searching(tmp_path, 2000, RSA, 3, search))
    assert found.answer == 192


def test_nothing_is_traced_for_a_limit_below_the_smallest_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "trace", lambda *args, **settings: pytest.fail("traced"))
    search = SearchRequest(quantity="seq_len", step=8, limit=20)
    with pytest.raises(Unsupported, match="steps of 24, above the limit 20"):
        largest_that_fits(searching(tmp_path, 2000, RSA, 3, search))


def test_what_cannot_be_searched(tmp_path: Path) -> None:
    cell = searching(tmp_path, 64, SINGLE, 1, BATCH)
    with pytest.raises(Unsupported, match="local has no memory limit"):
        largest_that_fits(cell.model_copy(update={"cluster": "local"}))
    with pytest.raises(Unsupported, match="do not run on the engine distributed"):
        run_cell(cell.model_copy(update={"engine": "distributed"}))
    with pytest.raises(Unsupported, match="12 attention heads"):
        largest_that_fits(searching(tmp_path, 64, TP, 5, BATCH))


class Tracer:
    """Traces a cell at any size."""

    def __init__(self, cell: Cell):
        self.cell = cell

    def __call__(self, size: int, effort: Effort = "guess") -> Trace:
        return tracing.trace(self.cell.at(size), effort=effort)

    def peak(self, size: int) -> int:
        """The peak of the trace with all layers."""
        return self(size, "whole").memory.peak().nbytes

    def guesses(self, *points: int) -> Guesses:
        """What is guessed from these sizes, of a card of 1 GiB."""
        return Guesses(self.cell, self, points, 2**30)


def peak(guesses: Guesses, size: int) -> int:
    card, _ = guesses.memories(size)
    return card.peak().nbytes


def tracer(quantity: str, strategy: str, n: int, layers: int, **changes: Any) -> Tracer:
    changes["model_options"] = {**changes.get("model_options", {}), "layers": layers}
    asked = {"batch": 8, "seq_len": 192, "precision": "fp16"} | changes | {quantity: None}
    return Tracer(cell_of(strategy, n, search=SearchRequest.model_validate({"quantity": quantity}), **asked))


CASES = data(__file__)["CASES"]


def cases(*always: int) -> pytest.MarkDecorator:
    """A parameter for each of the cases, of which only these are always run."""
    marked = [case if number in always else slow(*case) for number, case in enumerate(CASES)]
    return pytest.mark.parametrize(("strategy", "n", "changes"), marked)


@cases(1)
def test_length(strategy: str, n: int, changes: dict[str, Any]) -> None:
    trace = tracer("seq_len", strategy, n, 9, **changes)
    assert peak(trace.guesses(96, 192, 288), 1536) == trace.peak(1536)


@pytest.mark.slow
@cases(0)
def test_batch(strategy: str, n: int, changes: dict[str, Any]) -> None:
    trace = tracer("batch", strategy, n, 9, **changes)
    guesses = trace.guesses(2, 4)
    for batch in (3, 100):  # parameters, then activations hold the most
        assert peak(guesses, batch) == trace.peak(batch)


@pytest.mark.slow
def test_real_size() -> None:
    trace = tracer("seq_len", "ring_self_attention", 4, 12, model="bert-base", batch=16)
    assert peak(trace.guesses(128, 256, 384), 1024) == trace.peak(1024)


def test_sizes_of_two_programs_are_not_mixed() -> None:
    trace = tracer("seq_len", "single", 1, 2, batch=1, model_options={"softmax": "megatron"})
    guesses = trace.guesses(1984, 2048, 2112)  # the other kernel runs from 2112 keys on
    assert not guesses.extrapolates
    assert peak(guesses, 2240) == trace.peak(2240)


@pytest.mark.parametrize("size", [33, 50])
def test_a_size_of_another_program_is_traced(size: int) -> None:
    trace = tracer("seq_len", "single", 1, 3, batch=1, model_options={"softmax": "megatron"})
    guesses = Guesses(trace.cell, lambda units, effort: trace(64 * units, effort), [2, 3, 4], 2**30)
    assert guesses.confirm(32)  # 2048 keys
    assert guesses.extrapolates
    assert peak(guesses, size) != trace.peak(64 * size)
    assert not guesses.confirm(size)
    assert peak(guesses, size) == trace.peak(64 * size)
    assert guesses.confirm(size)


def test_a_program_below_the_samples_is_not_taken_for_theirs() -> None:
    guesses = tracer("batch", "single", 1, 4).guesses(2, 3)
    assert not guesses.confirm(1)  # a batch of one needs fewer copies


@pytest.mark.parametrize(("mib", "served"), [(76, False), (84, True)])
def test_what_the_allocator_loses_is_seen_in_a_guess(mib: int, served: bool) -> None:
    """On both cards 8 x 9 MiB fit; of a segment of 20 MiB, which holds two, 2 MiB are lost."""
    trace = Trace(
        *(cell_of("single", 1), 0, MemoryLog([9 * 2**20] * 8, [*range(1, 9)], [("forward", 0)])),
        *(CommunicationMeter({}), None, {}),
    )
    guesses = Guesses(trace.cell, lambda size, effort: trace, [1, 2], mib * 2**20)
    assert guesses.need(1) < 1
    assert guesses.served(1) is served


def guesses_of(need: Callable[[int], float], seen: list[int]) -> Guesses:
    def noted(size: int) -> float:
        seen.append(size)
        return need(size)

    cell = cell_of("single", 1)
    guesses = Guesses(cell, lambda size, effort: tracing.trace(cell), [1], 2**50)
    guesses.need = noted  # type: ignore[method-assign]
    return guesses


@pytest.mark.parametrize("low", [0, 300])
@pytest.mark.parametrize(
    ("need", "looks"),
    [
        (lambda n: 0.1 + n / 700, 8),  # a line: 630
        (lambda n: 0.1 + n / 700 + (n % 7) / 1000, 14),  # and a bit more with the last tile
        (lambda n: 0.4 + (n / 1000) ** 2, 10),  # scores of attention
        (lambda n: 0.5 if n <= 512 else 1.1, 16),  # powers of two on a host
    ],
)
def test_the_last_that_fits_is_seen_in_few_looks(need: Callable[[int], float], looks: int, low: int) -> None:
    seen: list[int] = []
    guesses = guesses_of(need, seen)
    last = guesses.last_that_fits(low, 2000)
    assert need(last) <= 1 < need(last + 1)
    assert len(seen) <= looks
    assert all(low < n < 2000 for n in seen)
    assert guesses.last_that_fits(low, 2000) == last
    assert len(seen) == len(set(seen))  # what was seen is remembered


@pytest.mark.parametrize(("need", "last"), [(2.0, 3), (0.1, 39)])
def test_none_and_all_fit(need: float, last: int) -> None:
    assert guesses_of(lambda n: need, []).last_that_fits(3, 40) == last


SCENARIOS = "four_d", "max_seqlen_4d"
TINY = {
    "bert-base": "bert-tiny",
    "bert-large": "bert-tiny",
    "causal-transformer-1b": "causal-transformer-tiny",
    "tnl-1b": "tnl-tiny",
}


def declared(scenario: str) -> list[Cell]:
    return [cell for cells in load_scenario(scenario).cells.values() for cell in cells]


def in_small(cell: Cell) -> Cell:
    """The cell with a tiny model, two ranks along each axis that has several, and a short sequence."""
    sizes = {axis: min(2, size) for axis, size in cell.sizes.by_axis.items()}
    micro_batches = min(2, cell.training.micro_batches)
    content = cell.model_dump() | {
        "model": TINY[cell.model],
        "sizes": sizes,
        "batch": 4,
        "seq_len": 64,
        "search": None,
        "training": {**cell.training.model_dump(), "micro_batches": micro_batches},
        "variant": "",
    }
    return Cell.model_validate(content)


def kinds() -> Iterator[Any]:
    """Every cell of the scenarios in small, once, without the order of its mesh."""
    found = {}
    for cell in (cell for name in SCENARIOS for cell in declared(name)):
        small = in_small(cell).model_copy(update={"mesh": None})
        found[small.key] = small
    for cell in found.values():
        name = f"{cell.model} {cell.strategy} {cell.mesh_text} {cell.training.backend} {cell.key[-4:]}"
        # one of each strategy and model in every run, pipelines and other settings in the slow one
        marks = (
            [pytest.mark.slow] if {"pp", "dp"} & {a for a, n in cell.sizes.by_axis.items() if n > 1} else []
        )
        yield pytest.param(cell, id=name, marks=marks)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("cell", list(kinds()))
def test_closed_forms_hold_for_every_kind_of_cell(cell: Cell) -> None:
    found = VirtualEngine().measure(cell)
    assert (found.status, found.reason) == ("ok", "")
    assert found.formula_difference == []
    sent = {axis for entry in found.communication for axis in entry["axis"].split("_") if entry["sent_bytes"]}
    assert sent == {axis for axis, size in cell.sizes.by_axis.items() if size > 1}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_all_cells_are_of_sixty_four_gpus(scenario: str) -> None:
    cells = declared(scenario)
    assert {cell.sizes.world for cell in cells} == {64}
    both = [cell for cell in cells if cell.sizes.tp > 1 and cell.sizes.sp > 1]
    assert len(both) > len(cells) / 3


def test_panels_of_four_d_have_the_same_work() -> None:
    by_model = {(cell.model, cell.cluster, cell.batch, cell.seq_len) for cell in declared("four_d")}
    assert by_model == {
        ("bert-large", "piz-daint-p100", 512, 512),
        ("bert-large", "piz-daint-p100", 64, 2048),
        ("causal-transformer-1b", "dgx-a100", 16, 131072),
        ("tnl-1b", "dgx-a100", 4, 1048576),
    }


def test_some_cells_of_four_d_differ_in_the_order_of_the_mesh_alone() -> None:
    cells = declared("four_d")
    by_content: dict[str, list[Cell]] = {}
    for cell in cells:
        by_content.setdefault(cell.model_copy(update={"mesh": None}).key, []).append(cell)
    pairs = [some for some in by_content.values() if len(some) > 1]
    assert len(pairs) >= 4
    assert all(len({cell.mesh_text for cell in some}) == len(some) for some in pairs)


def test_the_order_of_a_mesh_moves_time_and_no_byte() -> None:
    """Tensor parallelism within a node and across nodes, around a ring."""
    fields = {
        "cluster": "dgx-a100-datasheet",
        "model_options": {"hidden": 256, "heads": 8, "inner": 1024},
        "strategy_options": {"placement": "zigzag"},
    }
    asked = ("causal-transformer-tiny", "megatron_sp+ring_attention", {"tp": 4, "sp": 8}, 2, 8192)
    inside, across = (
        VirtualEngine().measure(make_cell(*asked, **fields, mesh=mesh))
        for mesh in (["sp", "tp"], ["tp", "sp"])
    )
    assert inside.communication == across.communication
    assert inside.peak_memory_bytes == across.peak_memory_bytes
    assert abs(inside.step_time_s / across.step_time_s - 1) > 0.05


# -- searches ------------------------------------------------------------------------------------------------


def composed(folder: Path, mib: int, strategy: str, sizes: dict[str, int], **changes: Any) -> Cell:
    fields = {"cluster": write_cluster(folder, mib), "search": {"quantity": "seq_len"}} | changes
    return make_cell("bert-tiny", strategy, sizes, 4, None, "fp16", **fields)


@pytest.mark.slow
@tabled(__file__, "the_longest_sequence_of_a_composed_strategy_is_proved")
def test_the_longest_sequence_of_a_composed_strategy_is_proved(
    tmp_path: Path, strategy: str, sizes: dict[str, int], changes: dict[str, Any], multiple: int
) -> None:
    cell = composed(tmp_path, 60, strategy, sizes, **changes)
    assert Candidates(cell).values.step == multiple
    found = largest_that_fits(cell)
    assert found.formula_difference == []
    tried = {probe["value"]: probe["status"] for probe in found.proof}
    assert tried[found.answer] == "ok"
    assert tried[found.answer + multiple] == "oom"


@pytest.mark.slow
def test_the_largest_batch_of_a_composed_strategy_is_proved(tmp_path: Path) -> None:
    cell = composed(
        tmp_path,
        60,
        "megatron_sp+ring_self_attention",
        {"dp": 2, "tp": 2, "sp": 2},
        batch=None,
        seq_len=128,
        search=SearchRequest(quantity="batch"),
    )
    found = largest_that_fits(cell)
    tried = {probe["value"]: probe["status"] for probe in found.proof}
    assert (tried[found.answer], tried[found.answer + 2]) == ("ok", "oom")
