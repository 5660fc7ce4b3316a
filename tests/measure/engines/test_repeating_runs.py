"""The parts of short cuts: lists of deeper models by those of shallow ones, on lists that are written by
hand; steps of very many micro-batches, from three of a few; the turns of an interleaved pipeline.
Traces that are read from disk are those that were made, field by field, and stand for no other cell."""

import hashlib
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from spbench.bench.cell import Cell
from spbench.bench.files import CACHE_FOLDER
from spbench.bench.measure.engines import traces, tracing, virtual
from spbench.bench.measure.engines.listed import Listed, NotAlike
from spbench.bench.measure.engines.plan import plan
from spbench.bench.measure.engines.rank_turns import RankTurns
from spbench.bench.measure.engines.repeating_runs import DeepList, runs_of
from spbench.bench.measure.engines.run_cell import run_cell
from spbench.bench.measure.engines.step_line import StepNumbers, calls_on_line, counts_on_line, on_line
from spbench.bench.measure.engines.traces import DamagedTrace, Trace, from_bytes, to_bytes, trace_key
from spbench.bench.measure.engines.tracing import trace
from spbench.bench.measure.engines.turn_parts import put_together
from spbench.bench.measure.simulator.program import Flops
from spbench.bench.measure.trace.meter import Operation
from spbench.impls.training.turns import Turns
from tests.grid import data, tabled
from tests.measure.engines.cells import SMALL, approximately, cell, differences, staged
from tests.slow import slow


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


@tabled(__file__, "runs")
def test_runs(shallow: str, deeper: str, lengths_and_blocks: list[list[int]] | None) -> None:
    if lengths_and_blocks is None:
        with pytest.raises(NotAlike, match="two like blocks"):
            runs_of(tokens(shallow), tokens(deeper))
    else:
        runs = runs_of(tokens(shallow), tokens(deeper))
        assert [[run.length, run.blocks] for run in runs] == lengths_and_blocks


_MEGATRON = data(__file__)["_MEGATRON"]
#: the last stage keeps the loss of each micro-batch
SHALLOW = staged(84, batch=84, sizes={"pp": 2, "tp": 2}, model_options={"layers": 2})
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
        pytest.param(SHALLOW, id="1f1b"),
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
    whole = virtual.trace_classes(SHALLOW, events=True).measurement()
    with monkeypatch.context() as only_few:
        only_few.setattr(virtual, "trace_classes", lambda *_, **__: pytest.fail("all micro-batches"))
        assert engine.measure(SHALLOW).peak_memory_bytes == whole.peak_memory_bytes
    simulate = StepNumbers.of
    slower = iter((1.0, 1.001, 1.0, 1.0))  # the second of three, then the whole step

    def uneven(timeline: Any) -> StepNumbers:
        step = simulate(timeline)
        return replace(step, step_time_s=next(slower) * step.step_time_s)

    monkeypatch.setattr(StepNumbers, "of", uneven)
    assert engine.measure(SHALLOW) == whole
    assert next(slower, None) is None


def numbers(seconds: float, matmul_s: float = 1.0) -> StepNumbers:
    return StepNumbers(seconds, {"compute_s": seconds}, {"matmul_s": matmul_s}, {}, Flops(seconds, 0.0, 1.0))


def test_numbers_on_a_line() -> None:
    drawn = on_line((3, 4, 5), [numbers(3.0), numbers(4.0), numbers(5.0)], 11)
    assert drawn == numbers(11.0)
    for second in (numbers(4.1), numbers(4.0, 1.1)):
        with pytest.raises(NotAlike, match="micro-batches are"):
            on_line((3, 4, 5), [numbers(3.0), second, numbers(5.0)], 11)


def sends(*counts: int) -> dict[Operation, int]:
    sizes = (512 * (1 + number) for number in range(len(counts)))
    return {Operation("forward", "send", "pp", 2, n): count for n, count in zip(sizes, counts, strict=True)}


def test_calls_on_a_line() -> None:
    assert calls_on_line((3, 4, 5), [sends(6, 1), sends(8, 1), sends(10, 1)], 11) == sends(22, 1)
    with pytest.raises(NotAlike, match="calls of send"):
        calls_on_line((3, 4, 5), [sends(6), sends(8), sends(11)], 11)
    with pytest.raises(NotAlike, match="calls of send"):
        calls_on_line((3, 5, 7), [sends(6), sends(7), sends(8)], 10)


def test_a_line_is_drawn_where_it_is_quicker() -> None:
    few = SHALLOW.training.model_copy(update={"micro_batches": 83})
    assert counts_on_line(SHALLOW) == range(13, 16)
    assert counts_on_line(SHALLOW.model_copy(update={"training": few})) is None
    assert counts_on_line(INTERLEAVED) == [18, 24, 30]


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
    whole = RankTurns(Turns(rank, 8, chunks, 64))
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
        assert not [*RankTurns(turns).shorter()]


#: stages of which the default run has the last, and one between them under overlaps
SHORTENED = [
    slow(4, 2, 0, "legacy_ddp"),
    slow(4, 2, 2, "legacy_ddp"),
    (4, 2, 3, "legacy_ddp"),
    (6, 4, 3, "megatron"),
]


@pytest.mark.parametrize(("ranks", "chunks", "rank", "backend"), SHORTENED)
def test_a_rank_is_put_together_from_a_short_step(ranks: int, chunks: int, rank: int, backend: str) -> None:
    """The first rank, one between, and the last, whose losses live to the end of the step; and one of which
    the shortest step has a forward next to the backward that it comes two after here."""
    training = {"schedule": "interleaved", "virtual_stages": chunks, "backend": backend}
    sizes, count = {"pp": ranks, "tp": 2}, 4 * ranks
    layers = {"layers": ranks * chunks}
    cell = staged(count, batch=count, model_options=layers, sizes=sizes, training=training)
    turns, first = (
        RankTurns(Turns(rank, ranks, chunks, count), backend == "megatron"),
        plan(cell).classes[rank].first,
    )
    short = next(turns.shorter())
    together = put_together(trace(cell, first, events=True, turns=short.of), short, turns)
    assert differences(together, trace(cell, first, events=True)) == []


RSA = cell("ring_self_attention")


#: what a warning says of a kept trace
DAMAGED = "a kept trace is damaged, so the step is traced again"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a cache that this process uses."""
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path))
    with traces.keeping_traces():
        yield tmp_path / "traces"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Cell]:
    """The cells that are traced, a list that grows; without those of single devices, for FLOPs of models."""
    cells: list[Cell] = []
    traced = tracing._traced

    def counted(asked: Cell, *others: Any) -> Trace:
        if asked.strategy != "single":
            cells.append(asked)
        return traced(asked, *others)

    monkeypatch.setattr(tracing, "_traced", counted)
    return cells


@pytest.mark.one_in(2)
@tabled(__file__, "a_trace_comes_back_as_it_was")
def test_a_trace_comes_back_as_it_was(name: str) -> None:
    trace = tracing.trace(SMALL[name], 1, events=True)
    again = from_bytes(to_bytes(trace), SMALL[name])
    assert differences(again, trace) == []
    assert (again.cell, again.rank, again.found) == (trace.cell, trace.rank, trace.found)
    assert again.communication.axes == trace.communication.axes
    assert again.measurement(10**9) == trace.measurement(10**9)
    without = tracing.trace(SMALL[name], 1)
    assert from_bytes(to_bytes(without), SMALL[name]).program is None


def test_the_comparison_sees_a_fault_in_a_file() -> None:
    trace = tracing.trace(RSA, events=True)
    again = from_bytes(to_bytes(trace), RSA)
    again.program.nbytes[7] += 1
    assert differences(again, trace) == ["nbytes"]


def test_cells_that_differ_in_the_cluster_are_timed_from_one_trace(folder: Path, made: list[Cell]) -> None:
    asked = cell("ring_self_attention", precision="fp32")  # in which no card's attention has buffers
    on_a100, on_p100 = asked, asked.model_copy(update={"cluster": "piz-daint-p100", "variant": "other"})
    first, second = run_cell(on_a100), run_cell(on_p100)
    assert made == [on_a100]
    assert first.communication == second.communication
    assert None not in (first.step_time_s, second.step_time_s)
    assert first.step_time_s != second.step_time_s
    traces._cache = None
    assert run_cell(on_p100) == second
    assert run_cell(on_a100) == first
    assert made == [on_a100, on_p100, on_a100]


CHANGES: dict[str, Any] = data(__file__)["CHANGES"]


@pytest.mark.parametrize("field", CHANGES)
def test_another_cell_is_another_trace(field: str) -> None:
    changed = Cell.model_validate({**RSA.model_dump(), field: CHANGES[field]})
    assert trace_key(changed, 0, True) != trace_key(RSA, 0, True)


def test_every_field_of_a_cell_is_part_of_a_trace_or_is_known_not_to_be() -> None:
    """A field that is new changes traces until it is said not to."""
    assert {*CHANGES} | traces._NOT_TRACED | {"timeout_s"} == {*Cell.model_fields}


def test_what_else_makes_another_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    key = trace_key(RSA, 0, True)
    assert len({key, trace_key(RSA, 1, True), trace_key(RSA, 0, False)}) == 3
    for name, other in (("code_digest", lambda: "other"), ("torch.__version__", "99")):
        with monkeypatch.context() as patched:
            patched.setattr(f"spbench.bench.measure.engines.traces.{name}", other)
            assert trace_key(RSA, 0, True) != key


def test_a_damaged_file_is_made_again_and_said_once(
    folder: Path, made: list[Cell], caplog: pytest.LogCaptureFixture
) -> None:
    before = tracing.trace(RSA, events=True)
    (file,) = folder.glob("??/*")
    whole = file.read_bytes()
    for content in (b"", whole[: len(whole) // 2], b"x" * 100):
        file.write_bytes(content)
        caplog.clear()
        for _ in range(2):
            assert differences(tracing.trace(RSA, events=True), before) == []
        assert file.read_bytes() == whole
        assert [text.split(":")[0] for text in caplog.messages] == [DAMAGED]
    assert made == [RSA] * 4


def damaged(whole: bytes, draw: random.Random) -> bytes:
    """The bytes cut off, or with one to four of them changed."""
    if draw.random() < 0.2:
        return whole[: draw.randrange(len(whole))]
    content = bytearray(whole)
    for place in draw.sample(range(len(content)), draw.randint(1, 4)):
        content[place] ^= draw.randint(1, 255)
    return bytes(content)


def sealed(archive: bytes) -> bytes:
    """As if it had been written so, with the digest of the damaged content."""
    return hashlib.sha256(archive).digest() + archive


@pytest.mark.parametrize("seal", [bytes, sealed])
def test_no_damage_is_read_as_a_trace_or_ends_a_run(seal: Callable[[bytes], bytes]) -> None:
    """500 damaged files: refused; with a digest made anew refused or read, never another error."""
    whole = to_bytes(tracing.trace(RSA, events=True))[32 if seal is sealed else 0 :]
    draw = random.Random(20)
    read = 0
    for _ in range(int(os.environ.get("SPBENCH_FUZZ", "500"))):
        with suppress(DamagedTrace):
            from_bytes(seal(damaged(whole, draw)), RSA)
            read += 1
    assert not read or seal is sealed


def test_plain_traces_and_meters_of_others_read_nothing(
    folder: Path, made: list[Cell], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tracing.PLAIN_TRACE, "1")
    tracing.trace(RSA)
    tracing.trace(RSA)
    assert len(made) == 2
    assert not folder.exists()


def test_only_who_asks_keeps_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(CACHE_FOLDER, raising=False)
    tracing.trace(RSA)
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv(CACHE_FOLDER, "off")
    with traces.keeping_traces():
        tracing.trace(RSA)
    assert not list(tmp_path.iterdir())
    monkeypatch.delenv(CACHE_FOLDER)
    with traces.keeping_traces():
        tracing.trace(RSA)
    assert len(list((tmp_path / "spbench" / "traces").glob("??/*"))) == 1
