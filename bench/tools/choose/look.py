"""What workers measure. For `spbench advise` :func:`look`: the step time and the peak of a cell, from traces
of fewer layers and micro-batches; for `spbench fit` :func:`examine` and :func:`attempt`.

Each further layer, and each further micro-batch once the pipeline is full, adds the same time and bytes to a
step, so time and bytes follow from traces of two depths and two numbers of micro-batches. :func:`deep_peak`
gives the peak of a deep model; a transient of the first layers can put it far too high, so no price is
printed from such a look. A look at all layers gives the numbers of `spbench run`, except that few of very
many micro-batches are traced: the peak lacks a rank's inputs of the others (less than 0.01%).
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Literal

import numpy as np

from spbench.bench import measure
from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.measurement import Measurement, Outcome
from spbench.bench.tools.choose.anatomy import ANATOMY, anatomy, fullest
from spbench.bench.tools.choose.asking import COST, Asking, Task
from spbench.bench.units import GIB
from spbench.impls import Unsupported, backend_class, model_preset

#: the depths of shallow traces, in layers a pipeline stage
DEPTHS = (1, 2)
#: the depths for a backend that frees weights between layers: the weights of two are held at once
_DEPTHS_OF_SHARDS = (2, 3)
#: how closely a cell is looked at: "small": a small cell as it is, with :data:`ACTIVATIONS`; else see
#: :func:`look`
Depth = Literal["small", "few_layers", "all_layers"]
#: the most micro-batches that a look at all layers traces all, without stages of a pipeline
_EVERY = 16
#: under this name the meters of small looks have ``bytes``: the most bytes during forward and backward that
#: are no states of training (tensors made during the optimizer's update do not count)
ACTIVATIONS = "activations"


def step_of(traces: measure.ClassTraces) -> measure.StepNumbers:
    """The times of one step, simulated from the traces of all classes of ranks.

    Raises:
        Unsupported: the cluster lacks a rate that the simulation needs.
    """
    try:
        return measure.StepNumbers.of(traces.simulator()())
    except measure.RatesUnknown as error:
        raise Unsupported(f"no time: {error}", "name a cluster that has it") from error


def looks(
    asking: Asking,
    cells: Iterable[Cell],
    depth: Depth,
    ended: Callable[[int, int], None] = lambda n, of: None,
) -> Iterator[tuple[Cell, Outcome]]:
    """Look at cells; yields each with its outcome, "ok", "oom" or "unsupported". Cells come in the order in
    which they were asked for, so that no answer depends on which worker was quick.

    Args:
        ended: takes, each time a look ends, how many looks have ended, and how many there are.

    Raises:
        UserError: a strategy or backend is not verified, or contradicts its closed form.
        RuntimeError: a look failed or took too long.
    """
    tasks = {cell.key: Task(cell, partial(look, depth=depth)) for cell in cells}
    outcomes: dict[str, tuple[Cell, Outcome]] = {}
    for task, outcome in asking([*tasks.values()]):
        outcomes[task.cell.key] = task.cell, outcome
        ended(len(outcomes), len(tasks))
    for cell, outcome in map(outcomes.__getitem__, tasks):
        if outcome.status == "mismatch":
            raise UserError(f"{cell.key}: {outcome.reason}; --without leaves a strategy or backend out")
        if outcome.status not in ("ok", "oom", "unsupported"):
            raise RuntimeError(f"{cell.key}: {outcome.status}: {outcome.reason}\n{outcome.traceback}")
        yield cell, outcome


def look(cell: Cell, depth: Depth) -> Measurement:
    """Measure the peak and step time of a cell, even if it does not fit; a look at all layers also has the
    other numbers of a row's memory. ``meters`` have :data:`COST`, the seconds of a core.

    Args:
        depth: "few_layers": by traces of few layers and micro-batches; "all_layers": as `spbench run` does.

    Raises:
        Unsupported: the strategy cannot run these sizes, or the cluster lacks a rate.
    """
    begun = time.process_time()
    if depth == "few_layers" and model_preset(*cell.model_arguments).unlike_layers > 1:
        # further dense layers take equally long, as wide as a token's experts together, and hold less
        cell = cell.model_copy(update={"model_options": {**cell.model_options, "dense_layers": 1}})
    shared = backend_class(cell.training.backend).shares_out or ()
    depths = _DEPTHS_OF_SHARDS if "parameters" in shared else DEPTHS
    # layers of the stage that has fewest, counted as by `stage_layers`
    layers, leading = min(cell.training.stage_layers or [measure.stage_layers(cell)[0]]), _leading(cell)
    # with hardly more layers than both depths together, one trace of all takes no longer and is exact
    if depth != "few_layers" or layers <= sum(depths) + 2 * leading:
        by_depth, more = [by_count := _traced(cell, None)], 0.0
        most = by_count[max(by_count)]
        # a look at few layers compares allocated bytes with the card, without an allocator
        measurement = _memory([most], more, cell) if depth == "few_layers" else most.memory_measurement()
        if depth == "small":
            measurement.meters[ACTIVATIONS] = {
                "bytes": max(_activation_bytes(each.memory) for each in most.traces)
            }
        elif depth == "all_layers" and measurement.usable_memory_bytes is not None:
            measurement.meters[ANATOMY] = {"least_usable_bytes": fullest(most).usable_bytes}
    else:
        measure.check_sizes(cell)
        by_depth = [_traced(cell, d + leading) for d in depths]
        more = (layers - leading - depths[0]) / (depths[1] - depths[0])
        measurement = _memory([traces[max(traces)] for traces in by_depth], more, cell)
    micro_batches = cell.training.micro_batches
    step, *deeper = (_grown({n: step_of(each) for n, each in t.items()}, micro_batches) for t in by_depth)
    step = step.on(deeper[0], more) if deeper else step
    measurement.communication = []
    measure.add_simulated_time(measurement, cell, step)
    measurement.meters[COST] = {"cpu_s": time.process_time() - begun}
    return measurement


def _leading(cell: Cell) -> int:
    """How many layers more the stage with fewest must have, so that the first stage has a layer that repeats
    after its leading ones; 0 if the first stage has that many more itself."""
    stages = cell.training.stage_layers or (0,)
    return max(0, measure.leading_runs(cell) - (stages[0] - min(stages)))


def _counts(cell: Cell, layers: int | None = 1) -> tuple[int, int] | tuple[int]:
    """The numbers of micro-batches with which steps are timed: two from which on each further micro-batch
    takes equally long, or the cell's number if there are no more.

    Args:
        layers: see :func:`_traced`.
    """
    count = cell.training.micro_batches
    if layers is None and cell.sizes.pp == 1 and count <= _EVERY:
        return (count,)
    first, second = measure.steady_counts(cell)
    return (first, second) if count > second else (count,)


def _traced(cell: Cell, layers: int | None) -> dict[int, measure.ClassTraces]:
    """Traces by their numbers of micro-batches, of the cell with ``layers`` layers in the stage with fewest;
    None: with all. Traces of fewer micro-batches are cut out of those of more, if these determine them; they
    then have the memory of more."""
    counts = _counts(cell, layers)
    most = measure.trace_classes(_with(cell, layers, counts[-1]), events=True)
    if len(counts) == 1:
        return {counts[0]: most}
    try:
        fewer = most.without_one()
    except measure.NotAlike:
        fewer = measure.trace_classes(_with(cell, layers, counts[0]), events=True)
    return {counts[0]: fewer, counts[-1]: most}


def _with(cell: Cell, layers: int | None, micro_batches: int) -> Cell:
    """The cell with ``layers`` layers in the stage with fewest (None: all), and with another number of
    micro-batches of the same size."""
    training = cell.training.model_copy(update={"micro_batches": micro_batches})
    batch, _ = cell.shape
    batch = batch // cell.training.micro_batches * micro_batches
    other = cell.model_copy(update={"training": training, "batch": batch})
    if layers is None:
        return other
    if sizes := training.stage_layers:
        sizes = [n - min(sizes) + layers for n in sizes]
        training = training.model_copy(update={"stage_layers": sizes})
        return measure.with_layers(other.model_copy(update={"training": training}), sum(sizes))
    return measure.with_layers(other, layers * measure.stage_layers(cell)[1])


def _grown(steps: Mapping[int, measure.StepNumbers], micro_batches: int) -> measure.StepNumbers:
    """The step with ``micro_batches``, on the line through one or two ``steps``, by their micro-batches."""
    (first, a), *rest = steps.items()
    if not rest:
        return a
    ((second, b),) = rest
    return a.on(b, (micro_batches - first) / (second - first))


def _memory(by_depth: Sequence[measure.ClassTraces], more: float, cell: Cell) -> Measurement:
    """The largest peak of all rank classes, whether it fits the card, and the bytes that ranks hold on hosts,
    from traces of all layers or of two depths; ``more``: see :func:`deep_peak`."""
    usable = measure.usable_memory_bytes(cell, by_depth[-1].planned)
    shallow, deeper = by_depth[0].traces, by_depth[-1].traces
    hosts = (
        (measure.host_peaks(each.host_memory)[-1] for each in pair)
        for pair in zip(shallow, deeper, strict=True)
    )
    by_rank = [
        Measurement(peak_rank=trace.rank, peak_host_memory_bytes=round(low + more * (high - low)))
        for trace, (low, high) in zip(deeper, hosts, strict=True)
    ]
    peaks = [deep_peak(a.memory, b.memory, more) for a, b in zip(shallow, deeper, strict=True)]
    peak = max(peaks)
    fits = usable is None or peak <= usable
    reason = "" if fits else f"needs about {peak / GIB:.0f} GiB"
    measurement = Measurement(
        status="ok" if fits else "oom", reason=reason, peak_memory_bytes=peak, usable_memory_bytes=usable
    )
    return measure.limit_by_host(measurement, cell, by_rank)


def deep_peak(shallow: measure.MemoryLog, deeper: measure.MemoryLog, more: float) -> int:
    """Peak allocated bytes of the step of a stage with more layers.

    The overall peak must not be extrapolated, because the phase of the peak changes with the depth. So each
    phase is extrapolated on its own. In a deeper model a phase begins and ends with the same events; the
    layers between are equal, so that bytes are linear in depth.

    Args:
        shallow, deeper: logs of stages with few layers.
        more: layers beyond ``shallow``, in units of the layers that ``deeper`` has beyond it.
    """
    changes = [log.signed_bytes() for log in (shallow, deeper)]
    lives = [np.cumsum(each) for each in changes]
    peaks = []
    for spans in zip(shallow.spans(), deeper.spans(), strict=True):
        where = [np.arange(len(each))[span] for (_, span), each in zip(spans, changes, strict=True)]
        # empty tensors may live longer in a deeper model, which would shift all events that follow
        where = [places[each[places] != 0] for places, each in zip(where, changes, strict=True)]
        live, more_live = (each[places] for each, places in zip(lives, where, strict=True))
        change, more_change = (each[places] for each, places in zip(changes, where, strict=True))
        front, back = _alike(change, more_change)
        ends = slice(len(live) - back, None), slice(len(more_live) - back, None)
        for a, b in ((slice(front), slice(front)), ends):
            # a peak is at an allocation; frees come at other events in a deeper model
            if (rises := (change[a] > 0) & (more_change[b] > 0)).any():
                low, high = live[a][rises], more_live[b][rises]
                peaks.append((low + more * (high - low)).max())
    return int(max(peaks))


def _alike(shallow: np.ndarray, deeper: np.ndarray) -> tuple[int, int]:
    """How many events of a phase, from its start and from its end, have the same bytes in both depths; at
    least half of the phase each, because buffers of all layers differ only in size."""
    # in a deeper model fewer may be born in a phase: a bucket of gradients that holds more layers
    n = min(len(shallow), len(deeper))
    half = n // 2
    front = np.flatnonzero(shallow[:n] != deeper[:n])
    back = np.flatnonzero(shallow[len(shallow) - n :] != deeper[len(deeper) - n :])
    return (
        max(half, int(front[0]) if len(front) else n),
        max(n - half, n - 1 - int(back[-1]) if len(back) else n),
    )


def _activation_bytes(log: measure.MemoryLog) -> int:
    """The most bytes during forward and backward that are no states of training; see :data:`ACTIVATIONS`."""
    counted = log.categories() >= len(log.STATES)  # the first of all categories
    live = np.cumsum(log.signed_bytes() * counted[np.abs(np.asarray(log.events)) - 1])
    spans = (span for name, span in log.spans() if name in ("forward", "backward"))
    return max((int(live[span].max(initial=0)) for span in spans), default=0)


# -- `spbench fit` ------------------------------------------------------------------------------------------

#: a changed cell is not traced whole if its guessed peak is more than this many times the card's memory
_PLAINLY_TOO_MUCH = 1.1


def examine(cell: Cell) -> Measurement:
    """Measure a cell, with its step time even if it does not fit; ``meters`` have the :class:`Anatomy` of the
    class of ranks that needs the largest card.

    Raises:
        Unsupported: the strategy cannot run these sizes.
    """
    short = measure.ShortSteps()
    measurement, traces = measure.measured(cell, short, also_too_large=True)
    at, least = fullest(traces)
    ranks, log = traces.classes[at], traces.traces[at].memory
    if traces.of_all is not None:  # the log has fewer micro-batches
        log = measure.stage_traces(cell, [ranks], events=False, short=short)[0].memory
    stage = ranks.stage.index if ranks.stage.count > 1 else None
    taken_apart = anatomy(log, measure.allocator_of(cell), least, ranks.ranks, stage)
    measurement.meters = {**measurement.meters, ANATOMY: asdict(taken_apart)}
    return measurement


def trace_stage(cell: Cell, stage: int) -> Measurement:
    """Trace the first rank of a stage; the trace is kept on disk, for :func:`examine` of the cell."""
    ranks = next(each for each in measure.rank_classes(cell) if each.stage.index == stage)
    measure.trace_of_class(cell, ranks, events=measure.can_time(cell))
    return Measurement()


def attempt(cell: Cell) -> Measurement:
    """Search if the cell asks for a search, else :func:`examine` it. If the guessed peak of the first class
    of ranks exceeds the card by 10%, returns the status oom with that peak, and traces no more."""
    if cell.search is not None:
        return measure.run_cell(cell)
    usable = measure.usable_memory_bytes(cell)
    if usable is not None:
        # where no guess can be put together, this is the whole trace, which is kept on disk for `examine`
        guess = measure.trace_of_class(
            cell, measure.rank_classes(cell)[0], events=measure.can_time(cell), effort="guess"
        )
        peak = guess.memory.peak().nbytes
        if peak > _PLAINLY_TOO_MUCH * usable:
            reason = f"needs about {peak / GIB:.0f} GiB"
            return Measurement(
                status="oom", reason=reason, peak_memory_bytes=peak, usable_memory_bytes=usable
            )
    return examine(cell)
