"""Steps put together from traces of few layers and micro-batches beside those that were traced whole."""

from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.clusters.figures import Sourced
from spbench.bench.measure.clusters.rates import HostMemory
from spbench.bench.measure.engines import rank_memory, virtual
from spbench.bench.measure.engines.deepened_traces import with_layers
from spbench.bench.measure.engines.listed import NotAlike
from spbench.bench.measure.engines.plan import model_parameters
from spbench.bench.measure.trace.memory_log import MemoryLog
from spbench.bench.tools.choose.look import ACTIVATIONS, _counts, _with, deep_peak, look
from spbench.impls.backends.optimizer import PRECISIONS
from spbench.impls.registries import backend_class
from tests.grid import data
from tests.slow import slow

#: layers of made-up logs
DEPTHS = (2, 3)

pytestmark = pytest.mark.usefixtures("kept_traces")

#: of a size that keeps cards busy: where the host falls behind them from some layer on, times are not linear
LARGE = {"layers": 8, "hidden": 1536, "inner": 4096, "vocabulary": 32000}

CASES = data(__file__)["CASES"]
ALWAYS = ("one micro-batch",)


def cell_of(case: str, **changes: Any) -> Cell:
    strategy, sizes, model_options, training = CASES[case]
    ring = {"strategy_options": {"placement": "zigzag"}, "seq_len": 8192}
    asked = {
        "model": "causal-transformer-tiny",
        "strategy": strategy,
        "sizes": sizes,
        "batch": 16,
        "seq_len": 2048,
        "cluster": "dgx-a100",
        "precision": "bf16",
        "model_options": model_options,
        "training": {"moments": "later", "steps": 2, **training},
    }
    return Cell.model_validate({**asked, **(ring if case == "ring" else {}), **changes})


def whole(cell: Cell) -> tuple[float, int | None]:
    """Step time and peak by one trace of everything."""
    traces = virtual.trace_classes(cell, events=True)
    return traces.simulator()().step_time_s, traces.memory_measurement().peak_memory_bytes


@pytest.mark.parametrize("case", [case if case in ALWAYS else slow(case) for case in CASES])
def test_times_and_peaks_are_those_of_a_whole_trace(case: str) -> None:
    cell = cell_of(case)
    step_s, peak = whole(cell)
    few, every = look(cell, "few_layers"), look(cell, "all_layers")
    assert few.step_time_s == pytest.approx(step_s, rel=0.01)
    # buckets of gradients hold other layers in a deeper model
    assert few.peak_memory_bytes == pytest.approx(peak, rel=0.015)
    # two rings of the last micro-batch may wait for each other otherwise than those of the first two
    assert every.step_time_s == pytest.approx(step_s, rel=1e-3 if case == "ring" else 1e-6)
    assert every.peak_memory_bytes == pytest.approx(peak, rel=1e-4)
    assert sum(row["sent_bytes"] for row in every.formula) > 0


@pytest.mark.parametrize("case", ["micro-batches", *map(slow, ("long pipeline", "zero3", "ring"))])
def test_a_micro_batch_less_is_cut_out_of_a_trace(case: str) -> None:
    cell = cell_of(case)
    traces = [virtual.trace_classes(of_few(cell, n), events=True) for n in _counts(cell)]
    seconds = [each.simulator()().step_time_s for each in traces]
    cut = traces[1].without_one()
    assert cut.simulator()().step_time_s == pytest.approx(seconds[0], rel=1e-9)
    assert seconds[0] < seconds[1]


@pytest.mark.parametrize(("case", "count"), [("interleaved", 4), slow("longer pipeline", 6)])
def test_what_a_short_step_does_not_determine_is_not_cut(case: str, count: int) -> None:
    traces = virtual.trace_classes(of_few(cell_of(case, model_options=SMALL), count), events=True)
    with pytest.raises(NotAlike, match=r"several runs|no action of the short step"):
        traces.without_one()


SMALL = {"layers": 4, "hidden": 96, "inner": 128, "vocabulary": 128}


def of_few(cell: Cell, micro_batches: int) -> Cell:
    return _with(cell, None, micro_batches)


#: one bucket holds several layers, so that states die at other events of the optimizer in a deeper model
BUCKETS = {"layers": 24, "hidden": 768, "inner": 2048, "vocabulary": 32000}


@pytest.mark.parametrize("backend", ["ddp", slow("megatron")])
def test_the_peak_of_many_layers_in_buckets(backend: str) -> None:
    training = {"backend": backend, "moments": "kept", "micro_batches": 1, "steps": 1}
    cell = cell_of("micro-batches", sizes={"dp": 16}, model_options=BUCKETS, training=training, seq_len=512)
    _, peak = whole(cell)
    assert look(cell, "few_layers").peak_memory_bytes == pytest.approx(peak, rel=0.01)


def step_with_buckets(layers: int) -> MemoryLog:
    """The step of a model whose layers keep 4 KiB of activations each, and whose update has buckets of three
    layers in 2 KiB buffers of their own, a rest of which goes to the bucket before: so three layers have
    fewer events in the update than two."""
    log = MemoryLog()

    def born(nbytes: int) -> int:
        log.sizes.append(nbytes)
        log.events.append(len(log.sizes))
        return len(log.sizes)

    states = [born(1024) for _ in range(layers)]
    log.marks.append(("forward", len(log.events)))
    kept = [born(4096) for _ in range(layers)]
    log.marks.append(("backward", len(log.events)))
    for number in reversed(kept):
        temporary = born(8192)
        log.events += [-temporary, -number]
    log.marks.append(("optimizer", len(log.events)))
    for _ in range(layers // 3 or layers):
        log.events.append(-born(2048))
    log.marks.append(("end", len(log.events)))
    log.events += [-number for number in states]
    return log


@pytest.mark.parametrize("layers", [4, 7, 30])
def test_a_deeper_model_may_have_fewer_events_in_a_phase(layers: int) -> None:
    shallow, deeper = logs = [step_with_buckets(n) for n in DEPTHS]
    events = [dict(log.spans())["optimizer"] for log in logs]
    assert events[0].stop - events[0].start > events[1].stop - events[1].start
    peak = step_with_buckets(layers).peak().nbytes
    assert deep_peak(shallow, deeper, layers - DEPTHS[0]) == peak == 8192 + layers * (1024 + 4096)


def step_with_empty_tensors(layers: int) -> MemoryLog:
    """The step of a model whose layers keep 4 KiB each and an empty tensor, and whose head takes 64 KiB; the
    empty ones die at the end."""
    log = MemoryLog()

    def born(nbytes: int) -> int:
        log.sizes.append(nbytes)
        log.events.append(len(log.sizes))
        return len(log.sizes)

    log.marks.append(("forward", 0))
    kept, empty = [], []
    for _ in range(layers):
        kept.append(born(4096))
        empty.append(born(0))
        for _ in range(10):
            log.events.append(-born(8192))
    log.events.append(-born(65536))
    log.events += [-number for number in empty]
    log.marks.append(("end", len(log.events)))
    log.events += [-number for number in kept]
    return log


def test_empty_tensors_of_each_layer_shift_nothing() -> None:
    shallow, deeper = (step_with_empty_tensors(n) for n in DEPTHS)
    peak = step_with_empty_tensors(30).peak().nbytes
    assert deep_peak(shallow, deeper, 30 - DEPTHS[0]) == peak == 65536 + 30 * 4096


def test_a_peak_is_where_something_is_born() -> None:
    """In a deeper model the same place may be one where something dies: what is alive there is not linear in
    depth, and is no peak."""

    def log(n: int) -> MemoryLog:
        # one storage a layer; they die one after another in the shallow model, at the end in the deeper one
        born, dead = [*range(1, n + 1)], [-number for number in range(1, n + 1)]
        made = MemoryLog([1024] * (n + 1), [*born, *dead], [("forward", 0), ("optimizer", n)])
        if n == DEPTHS[0]:
            made.events.append(n + 1)
        else:
            made.events.insert(n, n + 1)
        return made

    # of five layers: five storages, and the last one with the deeper model's five still alive
    assert deep_peak(*map(log, DEPTHS), 5 - DEPTHS[0]) <= 6 * 1024


@pytest.mark.parametrize("layers", [2, slow(6)])
def test_hosts_that_are_full_are_seen_by_few_layers(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a trace of all of few layers, and by two depths of many."""
    case = cell_of("zero3", model_options={**LARGE, "layers": layers})
    training = case.training.model_copy(update={"optimizer": "host", "parameters": "host"})
    cell = case.model_copy(update={"training": training})
    held = virtual.trace_classes(cell).memory_measurement().node_host_memory_bytes
    assert held
    found = look(cell, "few_layers")
    assert found.status == "ok"
    assert found.node_host_memory_bytes == pytest.approx(held, rel=0.1)
    cluster = rank_memory.load_cluster(cell.cluster)
    little = HostMemory(total_bytes=Sourced(value=1, source="a test"))
    monkeypatch.setattr(
        rank_memory, "load_cluster", lambda _: cluster.model_copy(update={"host_memory": little})
    )
    assert look(cell, "few_layers").reason.startswith("the host of a node has")


@pytest.mark.parametrize("backend", ["ddp", "zero1", "zero3"])
def test_what_a_backend_has_in_backward_beside_its_states(backend: str) -> None:
    """At few positions a peak in backward is states, and what the backend says that it has beside them."""
    training = {"backend": backend, "micro_batches": 2}
    of_layers = {**LARGE, "vocabulary": 256}
    cell = cell_of(
        "zero3",
        strategy="single",
        sizes={"dp": 4},
        batch=8,
        seq_len=16,
        model_options=of_layers,
        training=training,
    )
    measured = look(cell, "small")
    cls, elements = backend_class(backend), model_parameters(cell)
    beside = cls.bytes_in_backward(PRECISIONS["bf16"], cls.options_type(), False)
    of_layer = model_parameters(with_layers(cell, 2)) - model_parameters(with_layers(cell, 1))
    expected = beside.whole * elements + beside.shared * elements / 4 + beside.layer * of_layer
    assert measured.meters[ACTIVATIONS]["bytes"] == pytest.approx(expected, rel=0.15)
