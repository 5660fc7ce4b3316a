"""Every short cut beside the plain way, on small cells: what is traced and timed is the same in every field.

A cell also says which short cuts it takes; one that is not taken any more fails its cells. Faults that are
planted in each short cut are seen by the same comparison.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import deepened_traces, traces, tracing, virtual
from spbench.bench.measure.engines.class_traces import ClassTraces
from spbench.bench.measure.engines.listed import NotAlike
from spbench.bench.measure.engines.rank_turns import RankTurns
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measure.engines.turn_parts import put_together
from spbench.bench.measure.simulator.timeline import trace_events
from spbench.bench.measure.trace import step_records
from spbench.bench.measure.trace.event_log import RecordedEvent
from spbench.impls import rings
from spbench.impls.backends.ddp import DistributedDataParallel
from spbench.impls.backends.optimizer import Optimizer
from spbench.impls.keyed_steps import Key, keyed_steps
from spbench.impls.models.blocks import tiles
from spbench.impls.models.blocks.decoder import DecoderBlock
from spbench.impls.models.blocks.decoder_module import Decoder
from spbench.impls.registries import all_backends, all_models, all_strategies, model_preset
from spbench.impls.strategies import all_gather_kv, fpdt, upipe
from spbench.impls.strategies.meetings import Meetings
from spbench.impls.strategies.placed_chunks import PlacedChunks
from spbench.impls.strategies.placements import PLACEMENTS
from spbench.impls.training import interleaved, pipeline
from spbench.impls.training import step as training_step
from spbench.impls.training.pipeline import StageRun
from spbench.impls.training.turns import Turns
from tests.measure.engines.cells import (
    CELLS,
    LAYERS,
    PP,
    SMALL,
    N,
    approximately,
    deep,
    differences,
    piped,
    staged,
    supported,
    traced_layers,
    wide,
)
from tests.measure.simulator.step_programs import serial_s
from tests.slow import mostly_slow

TINY = [name for name in all_models() if "-tiny" in name]


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    for effort in deepened_traces.LEAST:
        monkeypatch.setitem(deepened_traces.LEAST, effort, LAYERS)


@contextmanager
def noting(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The short cuts that are taken inside, but for that of ranks; a set that grows."""
    taken = set[str]()

    def notes(where: Any, name: str, words: str) -> None:
        function = getattr(where, name)

        def noted(*args: Any, **settings: Any) -> Any:
            result = function(*args, **settings)
            if result is not None:
                taken.add(words)
            return result

        patched.setattr(where, name, noted)

    def choosing(words: str) -> Callable[..., Iterator[int]]:
        def steps(size: int, key: Key, **how: Any) -> Iterator[int]:
            run = 0
            for step in keyed_steps(size, key, **how):
                run += 1
                yield step
            if run < size:
                taken.add(words)

        return steps

    def stages(cell: Cell, classes: Any, **asked: Any) -> list[Trace]:
        traced: list[int] = []
        trace = tracing.trace

        def counted(cell: Cell, rank: int, **settings: Any) -> Trace:
            traced.append(rank)
            return trace(cell, rank, **settings)

        with monkeypatch.context() as counting:
            counting.setattr(tracing, "trace", counted)
            made = tracing.stage_traces(cell, classes, **asked)
        if len(traced) < len(classes):
            taken.add("stages")
        return made

    with monkeypatch.context() as patched:
        for module in (rings, all_gather_kv, fpdt, tiles, upipe):
            patched.setattr(module, "keyed_steps", choosing("steps"))
        for module in (pipeline, interleaved):
            patched.setattr(module, "keyed_steps", choosing("micro_batches"))
        patched.setattr(virtual, "stage_traces", stages)
        notes(tracing, "_put_together", "layers")
        yield taken


def assert_same_timelines(quick: ClassTraces, plain: ClassTraces) -> None:
    """Every time, and every event of the first, a middle and the last rank, is the same."""
    ours, theirs = quick.simulator()(), plain.simulator()()
    assert ours.step_time_s == theirs.step_time_s
    # sums of seconds, which are added up in another order
    assert [ours.breakdown, ours.parts, ours.priced_by] == approximately(
        [theirs.breakdown, theirs.parts, theirs.priced_by]
    )
    for name, values in theirs.by_rank.items():
        assert np.allclose(ours.by_rank[name], values, rtol=1e-9, atol=1e-15), name
    ranks = sorted({0, theirs.world_size // 2, theirs.world_size - 1})
    assert list(trace_events(ours, ranks)) == list(trace_events(theirs, ranks))
    assert serial_s(ours) == pytest.approx(serial_s(theirs))


def plain_traces(asked: Cell) -> ClassTraces:
    with tracing.only_plain_traces():
        return virtual.trace_classes(asked, events=True)


@cache
def plain_traces_of_case(name: str) -> ClassTraces:
    """Traced once for a cell and for the faults in its short cuts."""
    return plain_traces(CELLS[name][0])


def check(
    asked: Cell, monkeypatch: pytest.MonkeyPatch, plain_traces: Callable[[Cell], ClassTraces] = plain_traces
) -> set[str]:
    """Compare a cell with its plain traces and their timeline; returns the short cuts that it takes."""
    with noting(monkeypatch) as taken:
        quick = virtual.trace_classes(asked, events=True)
    plain = plain_traces(asked)
    for ours, theirs in zip(quick.traces, plain.traces, strict=True):
        assert (ours.cell, ours.rank, ours.found) == (theirs.cell, theirs.rank, theirs.found)
        assert differences(ours, theirs) == [], ours.rank
        meters = ours.communication, theirs.communication
        assert len({meter.current_phase for meter in meters}) == 1
        # groups are numbered as they are made, in other ranks' traces too
        assert len({tuple(meter.axes.values()) for meter in meters}) == 1
    assert (quick.fold, plain.fold) == (True, False)
    assert quick.memory_measurement() == plain.memory_measurement()
    assert_same_timelines(quick, plain)
    simulated = sum(len(steps.ranks) for steps in quick.simulator().world.steps)
    return taken | {"ranks"} if simulated < asked.sizes.world else taken


def check_case(name: str, monkeypatch: pytest.MonkeyPatch, *, changed_step: bool = False) -> None:
    """Compare one of CELLS; it takes the short cuts that it names, and no other. A step
    that is changed is changed in its plain traces too."""
    asked, takes = CELLS[name]
    plain = plain_traces if changed_step else lambda asked: plain_traces_of_case(name)
    taken = check(asked, monkeypatch, plain)
    assert taken == takes


#: what differs in kind; the others are traced in the slow run
ALWAYS = "contiguous", "micro-batches under zero3", "gpipe", "main gradients", "layers in a bucket"


@pytest.mark.parametrize("name", mostly_slow(CELLS, *ALWAYS))
def test_short_cuts_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_case(name, monkeypatch)


@pytest.mark.parametrize("name", mostly_slow(SMALL, "tensor_parallel"))
def test_operators_that_are_remembered_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = plain_traces(SMALL[name])
    for _ in range(2):
        check(SMALL[name], monkeypatch, lambda _: plain)


def test_a_steady_state_of_unlike_turns_is_traced_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second forward makes a tensor more, so that no short step shows what each turn does."""
    forward, odd = StageRun.forward, dict[StageRun, int]()

    def uneven(run: StageRun, *inputs: Any) -> Any:
        odd[run] = 1 - odd.get(run, 0)
        torch.empty(odd[run])
        return forward(run, *inputs)

    monkeypatch.setattr(StageRun, "forward", uneven)
    assert check(piped(), monkeypatch) == {"ranks"}


def check_rank(asked: Cell, rank: int, *, events: bool = True) -> None:
    quick = tracing.trace(asked, rank, events=events)
    with tracing.only_plain_traces():
        assert differences(quick, tracing.trace(asked, rank, events=events)) == []


@pytest.mark.parametrize("strategy", mostly_slow(all_strategies(), "ring_self_attention"))
def test_every_strategy(strategy: str) -> None:
    """The middle rank, which has owners of lower and of higher ranks."""
    asked = next(c for c in (wide(strategy, model) for model in TINY) if supported(c))
    check_rank(asked, asked.sizes.world // 2)


@pytest.mark.slow
@pytest.mark.parametrize("backend", all_backends())
@pytest.mark.parametrize("strategy", all_strategies())
def test_every_strategy_and_backend(strategy: str, backend: str) -> None:
    asked = [
        deep(strategy, name, training={"backend": backend}, model_options={"layers": LAYERS * period})
        for name in TINY
        if name != "attention-call-tiny" and (period := model_preset(name).period)
    ]
    one = next((each for each in asked if supported(each)), None)
    if one is None:
        pytest.skip(f"no tiny model runs on {strategy} with {backend}")
    check_rank(one, one.sizes.world // 2)


def all_cells(strategy: str) -> Iterator[tuple[Cell, int]]:
    """A strategy on all tiny models and their variants, and a rank of each; kinds of step, placements and
    ranks take turns, as all of them with all take an hour of a core a strategy."""
    trainings: list[dict[str, Any]] = [{}, {"step": "inference"}, {"micro_batches": 2}]
    placed = issubclass(all_strategies()[strategy], PlacedChunks)
    chosen: list[dict[str, Any]] = [{"placement": placement} for placement in PLACEMENTS if placed] or [{}]
    turns = deque(product(range(3), chosen, trainings))
    for model, options in [(m, {**o}) for m in TINY for o in [{}, *model_preset(m).variants()]]:
        for _ in range(len(turns)):
            part, strategy_options, training = turns[0]
            turns.rotate(-1)
            asked = wide(strategy, model, options, training=training, strategy_options=strategy_options)
            if supported(asked):
                yield asked, part * (asked.sizes.world - 1) // 2
                break


@pytest.mark.slow
@pytest.mark.parametrize("strategy", all_strategies())
def test_all_models_and_steps(strategy: str) -> None:
    cells = [*all_cells(strategy)]
    assert len(cells) > 3
    for asked, rank in cells:
        check_rank(asked, rank)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["contiguous", "layers of a ring", "micro-batches"])
def test_without_events(name: str) -> None:
    check_rank(CELLS[name][0], 0, events=False)


def test_a_guess_is_put_together_without_a_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, _ = CELLS["main gradients"]
    traced = traced_layers(monkeypatch)
    guess, proved, whole = (
        tracing.trace(asked, events=True, effort=effort) for effort in ("guess", "proved", "whole")
    )
    assert differences(guess, proved) == differences(guess, whole) == []
    assert traced == [3, 5, 3, 5, 4, LAYERS]


def test_a_trace_on_disk_is_of_few_layers(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """A model of yet another depth is put together from the same ones."""
    monkeypatch.setenv("SPBENCH_CACHE", str(tmp_path))
    with traces.keeping_traces():
        tracing.trace(deep("single"))
        monkeypatch.setattr(tracing, "_traced", lambda *_: pytest.fail("traced"))
        ours = tracing.trace(deep("single", model_options={"layers": LAYERS + 1}))
    assert ours.cell.model_options["layers"] == LAYERS + 1


def test_plain_and_real_steps_are_all_run() -> None:
    with tracing.only_plain_traces():
        virtual.trace_classes(SMALL["ring_attention"])
    assert list(keyed_steps(N, lambda step: 0)) == list(range(N))
    tracing.trace(SMALL["ring_attention"])
    assert list(keyed_steps(N, lambda step: 0)) == list(range(N))


Change = Callable[[Any], Any]


def less(index: int) -> Change:
    """As a method whose argument of that index is smaller by 1."""
    return lambda method: lambda *args: method(*args[:index], max(0, args[index] - 1), *args[index + 1 :])


def nothing(_: Any) -> Any:
    return lambda *args: None


def changed(change: Callable[[Trace], object]) -> Change:
    def changing(method: Any) -> Any:
        def made(*args: Any) -> Any:
            trace = method(*args)
            change(trace)
            return trace

        return made

    return changing


def larger(trace: Trace) -> None:
    trace.memory.sizes[-1] += 512


def slower(trace: Trace) -> None:
    trace.program.flops[100] += 1


def other_fourth(of: Any) -> Any:
    return lambda self, owner: None if owner == 3 else of(self, owner)


def other_fourth_layer(forward: Any) -> Any:
    """As the model that is the proof is not as the others."""

    def other(self: Any, *args: Any) -> Any:
        if len(self.blocks) == 4:
            torch.empty(1)
        return forward(self, *args)

    return other


def other_eighth(forward: Any) -> Any:
    number = [0]

    def other(self: Any, *args: Any) -> Any:
        number[0] += 1
        if number[0] % 17 == 8:
            torch.ones(3)
        return forward(self, *args)

    return other


def numbered_windows(made: Any) -> Any:
    def numbered(self: Any, model: Any, strategy: Any, number: int) -> None:
        made(self, model, strategy, number)
        self.window = number

    return numbered


#: by name: a cell, and what is changed in its short cuts, or in what they trust
FAULTS: dict[str, tuple[str, Any, str, Change]] = {
    "a count is dropped": ("contiguous", step_records.MessageRecord, "repeat", less(1)),
    "a step is dropped": ("contiguous", step_records.EventRecord, "repeat", less(1)),
    "storages of a step are dropped": ("contiguous", step_records.StorageRecord, "repeat", less(1)),
    "storages keep their numbers": ("contiguous", step_records.MemoryMeter, "renumber", nothing),
    "posts keep their numbers": ("contiguous", step_records.EventLog, "renumber_posts", nothing),
    "losses are not kept": ("micro-batches under zero3", step_records.KeptTensors, "repeat", nothing),
    "a step depends on more than its key": ("striped", Meetings, "of", other_fourth),
    "a micro-batch is not as the others": ("stages", StageRun, "forward", other_eighth),
    "a stage's storage is larger": ("stages", tracing, "put_together", changed(larger)),
    "a stage's kernel is slower": ("stages", tracing, "put_together", changed(slower)),
    "stages differ otherwise": ("stages", DecoderBlock, "__init__", numbered_windows),
    "a layer is not as the others": ("main gradients", Decoder, "forward", other_fourth_layer),
    "layers refer elsewhere": (
        "main gradients",
        tracing.DeepTrace,
        "by",
        lambda by: lambda self, layers: by(self, max(1, layers - 1)),
    ),
}


@pytest.mark.parametrize(
    "fault", mostly_slow(FAULTS, *(name for name, (cell, *_) in FAULTS.items() if cell != "stages"))
)
def test_a_planted_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a difference, or since the proof of a short cut sees it, so that it is not taken."""
    name, where, attribute, change = FAULTS[fault]
    changed_step = getattr(where, "__module__", "").startswith("spbench.impls")
    if not changed_step:
        plain_traces_of_case(name)  # before the fault
    monkeypatch.setattr(where, attribute, change(getattr(where, attribute)))
    with pytest.raises(AssertionError):
        check_case(name, monkeypatch, changed_step=changed_step)


def test_a_stage_is_put_together_or_refused_where_it_is_not_made_of_turns() -> None:
    trace, ahead = (tracing.trace(staged(), 2 * (PP - 1 - held), events=True) for held in (4, 5))
    alternating, held, more = (RankTurns(Turns(0, ahead + 1, 1, 17)) for ahead in (0, 4, 5))
    assert differences(put_together(trace, held, more), ahead) == []
    with pytest.raises(NotAlike, match="turn 1 is forward"):
        put_together(trace, alternating, more)
    trace.memory.marks.append(("forward", len(trace.memory.events)))
    with pytest.raises(NotAlike, match="forward comes after the last step"):
        put_together(trace, held, more)


def test_all_are_run_where_points_of_streams_are_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held, recorded = [], RecordedEvent.__init__

    def hold(event: RecordedEvent, *arguments: Any, **options: Any) -> None:
        recorded(event, *arguments, **options)
        held.append(event)

    monkeypatch.setattr(RecordedEvent, "__init__", hold)
    with noting(monkeypatch) as taken:
        tracing.trace(piped("zero3", 1), events=True)
    assert not taken


class Counting(DistributedDataParallel):
    """Finds the last of eight backwards by its number."""

    def zero(self) -> None:
        super().zero()
        self.backwards = 0

    def begin_last_backward(self, stage: nn.Module) -> None:
        pass

    def prepare(self) -> Optimizer:
        self.module.register_forward_hook(lambda *_: self._count())
        return super().prepare()

    def _count(self) -> None:
        self.backwards += 1
        if self.backwards == 8:
            super().begin_last_backward(self.module)


def test_a_backend_that_counts_backwards_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = piped("ddp", 1)
    monkeypatch.setattr(training_step, "backend_class", lambda name: Counting)
    with pytest.raises(AssertionError, match="backward gave no gradient"):
        tracing.trace(asked, 0)
    with tracing.only_plain_traces():
        tracing.trace(asked, 0)
