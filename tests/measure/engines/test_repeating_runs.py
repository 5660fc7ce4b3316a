"""The parts of short cuts: lists of deeper models by those of shallow ones, on lists that are written by
hand; steps of very many micro-batches, from three of a few; the turns of an interleaved pipeline."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, product
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import virtual
from spbench.bench.measure.engines.interleaved_turns import InterleavedTurns
from spbench.bench.measure.engines.listed import Listed, NotAlike
from spbench.bench.measure.engines.plan import plan
from spbench.bench.measure.engines.repeating_runs import DeepList, runs_of
from spbench.bench.measure.engines.step_line import StepNumbers, calls_on_line, counts_on_line, on_line
from spbench.bench.measure.engines.tracing import trace
from spbench.bench.measure.engines.turn_parts import put_together
from spbench.bench.measure.simulator.program import Flops
from spbench.bench.measure.trace.meter import CommunicationMeter, Operation
from spbench.impls.training.turns import Turns
from tests.measure.engines.cells import approximately, differences, staged


class Written:
    """A list of entries by name, each with the entry that it refers to."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.references: list[int] = []

    def add(self, name: str, refers: int = -1) -> int:
        self.names.append(name)
        self.references.append(refers)
        return len(self.names) - 1

    def listed(self) -> Listed:
        names = np.array([crc32(name.encode()) for name in self.names])
        return Listed.of([names], np.array(self.references), (), np.ones(len(names), dtype=bool))


def step(layers: int) -> Written:
    """A step that keeps what forward made until backward; its first and last layers are not as the others."""
    log = Written()
    weights = [log.add("weight") for _ in range(layers)]
    batch = log.add("batch")
    kept, hidden = [], batch
    for layer in range(layers):
        if layer == 0:
            log.add("lookup", batch)
        if layer:
            log.add("free hidden", hidden)
        hidden = log.add("hidden")
        kept.append(log.add("kept", weights[layer]))
        log.add("look ahead", weights[min(layer + 1, layers - 1)])
    gradient, gradients = log.add("loss", hidden), []
    for layer in reversed(range(layers)):
        log.add("free kept", kept[layer])
        gradients.append(log.add("gradient", gradient))
        gradient = gradients[-1]
        if layer == layers - 1:
            log.add("of the head", batch)
    for layer, weight in enumerate(weights):
        log.add("update", gradients[-1 - layer])
        log.add("updated", weight)
    log.add("end", kept[0])
    log.add("end", kept[-1])
    return log


def alike_but_for_kept(freed: Callable[[int, int], int]) -> Callable[[int], Written]:
    """Lists of which backward frees in layer i of n what forward made in ``freed(i, n)``."""

    def step(layers: int) -> Written:
        log = Written()
        log.add("start")
        kept = [log.add("kept") for _ in range(layers)]
        log.add("loss")
        for layer in range(layers):
            log.add("free", kept[freed(layer, layers)])
        return log

    return step


def check(step: Callable[[int], Written], fewest: int = 3) -> None:
    deep = DeepList(step(fewest).listed(), step(fewest + 2).listed())
    for more in (0, 1, 2, 3, 20):
        theirs, (like, references, _) = step(fewest + more), deep.by(more)
        names = step(fewest + 2).names
        assert [names[each] for each in like] == theirs.names, more
        assert references.tolist() == theirs.references, more


def test_a_step_of_any_depth() -> None:
    check(step)
    check(step, 4)


@pytest.mark.parametrize(
    "freed",
    [
        lambda i, n: i,
        lambda i, n: n - 1 - i,
        lambda i, n: 0,
        lambda i, n: max(i - 1, 0),
        lambda i, n: min(n - i, n - 1),
    ],
    ids=["in order", "in reverse", "always the first", "the one before", "in reverse, but for the first"],
)
def test_what_blocks_refer_to(freed: Callable[[int, int], int]) -> None:
    check(alike_but_for_kept(freed))


def by(step: Callable[[int], Written], layers: int) -> list[int]:
    """What the entries of a list of that many layers refer to, by those of 3 and 5."""
    deep = DeepList(step(3).listed(), step(5).listed())
    references: list[int] = deep.by(layers - 3).references.tolist()
    return references


@pytest.mark.parametrize(
    ("freed", "why"),
    [
        (lambda i, n: 2 * i % n, "refer to blocks further away"),
        (lambda i, n: i if n == 3 else (i + 1) % n, "refer to other entries|not there"),
        (lambda i, n: 4 if n == 5 and i == 1 else i, "refer to"),
    ],
    ids=["each second", "another one with more layers", "one layer alone"],
)
def test_what_cannot_be_told(freed: Callable[[int, int], int], why: str) -> None:
    with pytest.raises(NotAlike, match=why):
        by(alike_but_for_kept(freed), 7)


def test_what_a_list_between_the_two_shows() -> None:
    """As seen from two lists, the last one may be one at a fixed place."""
    step = alike_but_for_kept(lambda i, n: n - 1)
    assert by(step, 5) == step(5).references
    with pytest.raises(NotAlike, match="not there"):
        by(step, 4)


def tokens(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), dtype=np.uint8)


@pytest.mark.parametrize(
    ("shallow", "deeper", "lengths_and_blocks"),
    [
        ("abcabcX", "abcabcabcabcX", [(3, 2)]),
        ("XaYbbZ", "XaaaYbbbbZ", [(1, 1), (1, 2)]),
        ("abX", "ababX", None),  # one more, not two
        ("abX", "abcdX", None),
        ("abababX", "abX", None),
        ("aX", "aY", None),
    ],
)
def test_runs(shallow: str, deeper: str, lengths_and_blocks: list[tuple[int, int]] | None) -> None:
    if lengths_and_blocks is None:
        with pytest.raises(NotAlike, match="two like blocks"):
            runs_of(tokens(shallow), tokens(deeper))
    else:
        runs = runs_of(tokens(shallow), tokens(deeper))
        assert [(run.length, run.blocks) for run in runs] == lengths_and_blocks


_MEGATRON = {
    "backend": "megatron",
    "distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "steps": 2,
    "moments": "later",
}
#: the last stage keeps the loss of each micro-batch
SMALL = staged(84, batch=84, sizes={"pp": 2, "tp": 2}, model_options={"layers": 2})
#: experts' plain permutation calls operators without a price
UNPRICED = staged(
    84,
    model="moe-tiny",
    strategy="single",
    batch=168,
    sizes={"pp": 2, "dp": 2, "ep": 2},
    model_options={"layers": 2},
)
INTERLEAVED = staged(
    144,
    batch=144,
    sizes={"pp": 6, "tp": 2},
    model_options={"layers": 12},
    training={**_MEGATRON, "schedule": "interleaved", "virtual_stages": 2},
)
#: of which few are traced from a short step
AHEAD = staged(
    100, batch=200, sizes={"pp": 7, "tp": 2, "dp": 2}, model_options={"layers": 7}, training=_MEGATRON
)


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(SMALL, id="1f1b"),
        pytest.param(UNPRICED, id="1f1b with operators that have no price", marks=pytest.mark.slow),
        pytest.param(AHEAD, id="1f1b of 7 stages", marks=pytest.mark.slow),
        pytest.param(INTERLEAVED, id="interleaved", marks=pytest.mark.slow),
    ],
)
def test_a_step_is_that_of_all_micro_batches(cell: Cell) -> None:
    """Every field: bytes exactly, seconds up to rounding."""
    counts = counts_on_line(cell)
    assert counts is not None
    line = virtual.measured_on_line(cell, counts, {})[0].model_dump()
    whole = virtual.trace_classes(cell, events=True).measurement().model_dump()
    assert whole["step_time_s"] > 0
    assert line == approximately(whole)


def test_a_step_that_is_on_no_line_is_simulated_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = virtual.VirtualEngine()
    whole = virtual.trace_classes(SMALL, events=True).measurement()
    with monkeypatch.context() as only_few:
        only_few.setattr(virtual, "trace_classes", lambda *_, **__: pytest.fail("all micro-batches"))
        assert engine.measure(SMALL).peak_memory_bytes == whole.peak_memory_bytes
    simulate = StepNumbers.of
    slower = iter((1.0, 1.001, 1.0))  # the second of three

    def uneven(timeline: Any) -> StepNumbers:
        step = simulate(timeline)
        return replace(step, step_time_s=next(slower) * step.step_time_s)

    monkeypatch.setattr(StepNumbers, "of", uneven)
    assert engine.measure(SMALL) == whole
    assert next(slower, None) is None


def numbers(seconds: float, matmul_s: float = 1.0) -> StepNumbers:
    return StepNumbers(seconds, {"compute_s": seconds}, {"matmul_s": matmul_s}, {}, Flops(seconds, 0.0, 1.0))


def test_numbers_on_a_line() -> None:
    drawn = on_line((3, 4, 5), [numbers(3.0), numbers(4.0), numbers(5.0)], 11)
    assert drawn == numbers(11.0)
    for second in (numbers(4.1), numbers(4.0, 1.1)):
        with pytest.raises(NotAlike, match="micro-batches are"):
            on_line((3, 4, 5), [numbers(3.0), second, numbers(5.0)], 11)


def meter(*counts: int) -> CommunicationMeter:
    sent = CommunicationMeter({})
    for number, count in enumerate(counts):
        sent.counts[Operation("forward", "send", "pp", 2, 512 * (1 + number))] = count
    return sent


def test_calls_on_a_line() -> None:
    assert (
        calls_on_line((3, 4, 5), [meter(6, 1), meter(8, 1), meter(10, 1)], 11).counts == meter(22, 1).counts
    )
    with pytest.raises(NotAlike, match="calls of send"):
        calls_on_line((3, 4, 5), [meter(6), meter(8), meter(11)], 11)
    with pytest.raises(NotAlike, match="calls of send"):
        calls_on_line((3, 5, 7), [meter(6), meter(7), meter(8)], 10)


def test_a_line_is_drawn_where_it_is_quicker() -> None:
    few = SMALL.training.model_copy(update={"micro_batches": 83})
    assert counts_on_line(SMALL) == (13, 14, 15)
    assert counts_on_line(SMALL.model_copy(update={"training": few})) is None
    assert counts_on_line(INTERLEAVED) == (18, 24, 30)


CASES = [
    Turns(rank, ranks, chunks, micro_batches, group)
    for (ranks, group), chunks, micro_batches in product([(2, None), (4, None), (3, 5)], [2, 3, 4], [20, 30])
    for rank in range(ranks)
]


@pytest.mark.parametrize("turns", CASES, ids=repr)
def test_periods_repeat_but_for_the_micro_batches(turns: Turns) -> None:
    """Each does the same with the next group of micro-batches; what is left over is less than two more."""
    edges = [turns.ahead + i * turns.period for i in range(turns.periods + 1)]
    first = [*turns.alternating(range(turns.ahead, turns.ahead + turns.period))]
    for start in edges[:-1]:
        later = [*turns.alternating(range(start, start + turns.period))]
        by = start - turns.ahead
        assert later == [(name, number + by) for name, number in first]
        for action, number in later:
            order = turns.forwards if action in ("forward", "pass_on") else turns.backwards
            if number >= turns.period:
                before = order[number - turns.period]
                assert order[number] == before._replace(micro_batch=before.micro_batch + turns.group)
            assert action == "free" or (turns.received(action, number) is None) == (
                turns.received(action, number % turns.period + turns.period) is None
            )
    assert len(turns) - edges[-1] <= 2 * turns.period


@pytest.mark.parametrize("turns", CASES, ids=repr)
def test_every_turn_is_taken_once(turns: Turns) -> None:
    parts = turns.warm_up(), turns.alternating(range(turns.ahead, len(turns))), turns.cool_down()
    taken = Counter(chain(*parts))
    assert {*taken.values()} == {1}
    for action in ("forward", "backward"):
        assert sum(name == action for name, _ in taken) == len(turns)


@pytest.mark.parametrize("chunks", [2, 3, 5])
@pytest.mark.parametrize("rank", range(8))
def test_each_action_is_a_copy_of_one_of_a_short_step(chunks: int, rank: int) -> None:
    """One of the same name, through the same chunk, with as many phases; the first and the last micro-batch
    of a backward are copies of such ones."""
    whole = InterleavedTurns(Turns(rank, 8, chunks, 64))
    short = next(whole.shorter())
    assert 5 * len(short) < 2 * len(whole)
    for place, (name, number) in enumerate(whole.actions):
        like = whole.like(place, short)
        other = short.actions[like]
        assert other[0] == name
        assert whole.phases(place) == short.phases(like)
        if number >= 0:
            turns = "backwards" if "back" in name else "forwards"
            mine, theirs = (getattr(each.of, turns)[n] for each, n in ((whole, number), (short, other[1])))
            assert mine.chunk == theirs.chunk
            assert (mine.micro_batch == 0) == (theirs.micro_batch == 0)
            if name == "backward":
                last = [
                    each.micro_batch == n - 1 for each, n in ((mine, 64), (theirs, short.of.micro_batches))
                ]
                assert last[0] == last[1]


def test_a_step_that_is_short_is_run_whole() -> None:
    for turns in (Turns(1, 4, 2, 8), Turns(1, 4, 2, 64, 6), Turns(1, 4, 2, 64, overlapped=True)):
        assert not [*InterleavedTurns(turns).shorter()]


SHORTENED = [*((4, 2, rank, "legacy_ddp") for rank in (0, 2, 3)), (6, 4, 3, "megatron")]


@pytest.mark.parametrize(("ranks", "chunks", "rank", "backend"), SHORTENED)
def test_a_rank_is_put_together_from_a_short_step(ranks: int, chunks: int, rank: int, backend: str) -> None:
    """The first rank, one between, and the last, whose losses live to the end of the step; and one of which
    the shortest step has a forward next to the backward that it comes two after here."""
    training = {"schedule": "interleaved", "virtual_stages": chunks, "backend": backend}
    sizes, count = {"pp": ranks, "tp": 2}, 4 * ranks
    layers = {"layers": ranks * chunks}
    cell = staged(count, batch=count, model_options=layers, sizes=sizes, training=training)
    turns, first = (
        InterleavedTurns(Turns(rank, ranks, chunks, count), backend == "megatron"),
        plan(cell).classes[rank].first,
    )
    short = next(turns.shorter())
    together = put_together(trace(cell, first, events=True, turns=short.run), short, turns)
    assert differences(together, trace(cell, first, events=True)) == []
