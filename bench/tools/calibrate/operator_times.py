"""The seconds of each operator inside training steps, on all ranks at once, and the rates that follow.

An operator in a loop of its own has its operands in the caches and its result's pages mapped; inside a step
it has neither, so that some operators take several times as long on a CPU. Therefore small models, of sizes
that nobody simulates, run steps on every rank by itself, and a clock times each operator that a step
dispatches. The means over calls of one operator and size are points, like those of the other rates. A call's
seconds include giving its result's pages back to the system later, as the C library does with large tensors:
this is measured by size and added. Steps without the clock show the host's seconds outside of operators.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from math import log2
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench import measure
from spbench.bench.cell import Cell
from spbench.bench.measure import seconds
from spbench.bench.tools.calibrate.compute_rates import RatePoint, RateSweep, timed
from spbench.bench.tools.calibrate.rate_fits import LeastSquares, least_squares
from spbench.bench.yaml_files import read_yaml
from spbench.impls import initialize, model_preset
from spbench.plots.series import grouped

#: the prefix of the names of points of host work
HOST = "host: "
#: a call of an operator that also makes a node for backward; and a call without Python's and autograd's part
WITH_NODE, BARE = HOST + "operator with its node", HOST + "operator alone"
VIEW, BACKWARD, MODULE = HOST + "view", HOST + "operator in backward", HOST + "module"
#: operators in a row, over which the seconds of their backward pass are averaged
_IN_A_ROW = 50


def host_points(sweep: RateSweep) -> Iterator[RatePoint]:
    """A point for each kind of host work, on all ranks at once; ``extent``: its repetitions in a call."""
    x = torch.ones(1, requires_grad=True)
    bare, bare_x, identity = torch.ops.aten.neg.default, x.detach(), nn.Identity()
    row = reduce(lambda y, _: torch.neg(y), range(_IN_A_ROW), x)
    calls: dict[str, tuple[int, Callable[[], Any]]] = {
        WITH_NODE: (1, partial(torch.neg, x)),
        BARE: (1, partial(bare, bare_x)),
        VIEW: (1, partial(x.view, 1)),
        BACKWARD: (_IN_A_ROW, partial(torch.autograd.grad, row, x, retain_graph=True)),
        MODULE: (1, partial(identity, x)),
    }
    for operation, (count, call) in calls.items():
        samples = timed(call, "cpu", sweep)
        yield RatePoint(operation, f"{count} in a call", count, "fp32", dist.get_world_size(), samples)


#: the prefix of the names of operators' points
OPERATOR = "operator "
MATMUL_IN_STEP = "matmul in a step"
STEP = "step beside its operators"
#: the prefixes of the names of points from training steps and from host work
INSIDE_STEPS = (OPERATOR, MATMUL_IN_STEP, STEP, HOST)
_WARMUP = 2
#: bytes of tensors whose freeing is timed: from sizes that C libraries keep to sizes that they give back
_FREED_BYTES = tuple(2**n for n in range(20, 29))


def _step(model: str, hidden: int, heads: int, batch: int, seq_len: int) -> Cell:
    """A cell whose model has only plain operators, because a fused operator is many kernels on a CPU."""
    options = {"hidden": hidden, "heads": heads, **type(model_preset(model)).plain_options}
    return Cell(model=model, strategy="single", batch=batch, seq_len=seq_len, model_options=options)


#: the steps whose operators are timed, from small activations to some that are larger than all caches
LADDER = tuple(_step(*each) for each in read_yaml(Path(__file__).with_name("tables.yaml"))["ladder"])


#: a kind of call: the operator, its category, bytes, FLOPs, precision, shape, and bytes of each new result
_Kind = tuple[str, int, int, int, int, tuple[int, ...], tuple[int, ...]]
#: (bytes of a tensor, seconds to free it), by ascending bytes
_Freeing = list[tuple[float, float]]


class _Clock(measure.TorchDispatchMode):
    """Times the operators that are dispatched inside this mode: seconds of each call, by kind of call."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: dict[_Kind, list[float]] = defaultdict(list)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        start = time.perf_counter()
        result = func(*args, **kwargs)
        end = time.perf_counter()
        price = measure.price_of(func)
        if not price.free:
            category, nbytes, flops, precision, shape, *_ = price.of(args, kwargs, result)
            kind = price.name, category, nbytes, flops, precision, shape, _made(args, result)
            self.taken[kind].append(end - start)
        return result


def _made(args: Sequence[Any], result: Any) -> tuple[int, ...]:
    """The bytes of each tensor in a result, without tensors that share the memory of an argument."""
    taken = {x.data_ptr() for x in args if isinstance(x, Tensor)}
    results = result if isinstance(result, (tuple, list)) else [result]
    return tuple(x.nbytes for x in results if isinstance(x, Tensor) and x.data_ptr() not in taken)


def _freeing(sweep: RateSweep) -> _Freeing:
    """The seconds to free a tensor whose pages were written, by the tensor's bytes; means over all ranks."""
    times = []
    for nbytes in _FREED_BYTES:
        samples = []
        for _ in range(sweep.samples):
            x = torch.ones(nbytes // 4)
            start = time.perf_counter()
            del x
            samples.append(time.perf_counter() - start)
        times.append(median(samples))
    return list(zip(map(float, _FREED_BYTES), _mean_over_ranks([times])[0], strict=True))


def _mean_over_ranks(seconds: Sequence[Sequence[float]]) -> list[list[float]]:
    means = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(means)
    mean: list[list[float]] = (means / dist.get_world_size()).tolist()
    return mean


def operator_points(mesh: DeviceMesh, cell: Cell, sweep: RateSweep) -> list[RatePoint]:
    """The points of :func:`host_points` and of the sweep's steps; all ranks call this together, on CPUs, and
    get the same points.

    A step gives a point :data:`STEP` with its seconds outside of operators, measured without the clock, and
    with its number of operators as ``extent``; and a point for each kind of call of its operators.
    """
    if not sweep.steps:
        return []
    points, freeing = list(host_points(sweep)), _freeing(sweep)
    kept = {"model", "strategy", "batch", "seq_len", "model_options"}
    for declared in sweep.steps:
        points += _of_step(mesh, cell.model_copy(update=declared.model_dump(include=kept)), sweep, freeing)
    return points


def _of_step(mesh: DeviceMesh, cell: Cell, sweep: RateSweep, freeing: _Freeing) -> Iterator[RatePoint]:
    """Yield the measured seconds of one training step: outside of operators, and of each kind of call."""
    training, inputs = measure.set_up(cell, mesh, torch.Generator().manual_seed(measure.SEED))
    initialize(training.module, measure.SEED)
    for _ in range(_WARMUP):
        training.step(inputs)
    steps_s, clocks = [], []
    for _ in range(sweep.samples):  # in turns, so that a busy moment slows steps with and without the clock
        steps_s += seconds(lambda: training.step(inputs), mesh.device_type, 1)
        clock = _Clock()
        with clock:
            seconds(lambda: training.step(inputs), mesh.device_type, 1)
        clocks.append({kind: taken for kind, taken in clock.taken.items() if kind[0] != "allreduce_"})
    calls = {kind: len(taken) for kind, taken in clocks[0].items()}
    means = _mean_over_ranks([[fmean(clock[kind]) for clock in clocks] for kind in calls])
    samples = dict(zip(calls, means, strict=True))
    yield from points_of(cell, steps_s, calls, samples, freeing)


def points_of(
    cell: Cell,
    steps_s: Sequence[float],
    calls: Mapping[_Kind, int],
    samples: Mapping[_Kind, Sequence[float]],
    freeing: _Freeing,
) -> Iterator[RatePoint]:
    """The points of a step: the seconds outside of operators, and then each kind of call.

    Args:
        steps_s: samples of the step's seconds, without a clock.
        calls: the number of calls of each kind in a step.
        samples: samples of the seconds of one call, by kind of call.
        freeing: the seconds to free a tensor, by its bytes.
    """
    ranks = cell.sizes.world
    whole = {
        kind: [s + float(measure.operator_seconds(freeing, np.array(kind[-1])).sum()) for s in taken]
        for kind, taken in samples.items()
    }
    inside = [sum(count * whole[kind][i] for kind, count in calls.items()) for i in range(len(steps_s))]
    beside = [max(0.0, step - of) for step, of in zip(steps_s, inside, strict=True)]
    size = f"{cell.model}, {list(cell.shape)}"
    yield RatePoint(STEP, size, sum(calls.values()), cell.precision, ranks, beside)
    for (name, category, nbytes, flops, number, shape, _), taken in whole.items():
        precision = measure.PRECISION_NAMES[number]
        if flops and category == measure.Category.MATMUL:
            size = f"{name} {list(shape)}"
            yield RatePoint(MATMUL_IN_STEP, size, nbytes, precision, ranks, taken, flops=flops, nbytes=nbytes)
        elif nbytes and not flops:
            size = f"{nbytes} B"
            yield RatePoint(OPERATOR + name, size, nbytes, cell.precision, ranks, taken, nbytes=nbytes)


#: bytes below which the seconds of a call do not depend on the size
_SMALLEST = 4096
#: matmuls of fewer FLOPs take little longer than their calls
_LEAST_FLOPS = 1e7
_ALONE = (WITH_NODE, BARE, VIEW, BACKWARD, MODULE)


def operator_times(points: Sequence[RatePoint]) -> dict[str, measure.OperatorTimes]:
    """The mean bytes and seconds of the calls of each operator, by powers of two of bytes."""
    times: dict[str, measure.OperatorTimes] = defaultdict(list)
    of_calls = [point for point in points if point.operation.startswith(OPERATOR)]
    by_size = grouped(of_calls, lambda p: (p.operation, int(log2(max(p.nbytes, _SMALLEST)))))
    for (operation, _), alike in sorted(by_size.items()):
        mean = [fmean(p.nbytes for p in alike), fmean(p.seconds for p in alike)]
        times[operation.removeprefix(OPERATOR)].append(mean)
    return dict(times)


def matmul_fit(points: Sequence[RatePoint], precision: str) -> LeastSquares | None:
    """The seconds per FLOP and per byte of the matmuls inside steps; None if no large matmul was timed."""
    of_precision = [p for p in points if p.operation == MATMUL_IN_STEP and p.precision == precision]
    chosen = [point for point in of_precision if point.flops >= _LEAST_FLOPS]
    if not chosen:
        return None
    return least_squares([p.seconds for p in chosen], [p.flops for p in chosen], [p.nbytes for p in chosen])


def host_figures(points: Sequence[RatePoint], counts: Sequence[Sequence[int]]) -> dict[str, float]:
    """The host's seconds for an operator, a view, a node of autograd and a module call, from calls of each by
    itself; and for a step, the median of the timed steps' seconds without all of these.

    Args:
        counts: for each timed step, its numbers of operators, views, nodes of autograd and module calls.
    """
    alone = {p.operation: p.seconds / p.extent for p in points if p.operation in _ALONE}
    bare = alone[BARE]
    figures = {
        "operator_s": max(0.0, alone[WITH_NODE] - bare),
        "view_s": alone[VIEW],
        "node_s": max(0.0, alone[BACKWARD] - bare),
        "module_s": alone[MODULE],
    }
    beside = [point.seconds for point in points if point.operation == STEP]
    left = [
        taken - sum(n * each for n, each in zip(work, figures.values(), strict=True))
        for taken, work in zip(beside, counts, strict=True)
    ]
    return figures | {"step_s": max(0.0, median(left))}
