"""What each operator takes inside training steps, on all ranks at once.

An operator alone in a loop finds its operands in the caches and its result's pages mapped; inside a step it
does not, and on a CPU some take several times as long. So small models of other sizes than anybody asks for
take steps, each rank one of its own, and a clock stands around each operator that they dispatch. The means
over calls of one name and size are points like those of the other rates. The same steps without the clock
say what the host takes beside its operators.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.calibration.rate_points import RatePoint, RateSweep
from spbench.bench.cell import Cell
from spbench.bench.engines.distributed import SEED
from spbench.bench.engines.setup import set_up
from spbench.bench.engines.timed_steps import seconds
from spbench.bench.meters.prices import price_of
from spbench.bench.meters.torch_internals import TorchDispatchMode
from spbench.bench.simulator.program import MATRIX_PRODUCT, PRECISION_NAMES
from spbench.impls.models.model import model_preset
from spbench.impls.training.step import initialize

#: an operator's point is called this and its name
OPERATOR = "operator "
PRODUCT = "matrix product in a step"
STEP = "step beside its operators"
_WARMUP = 2


def _step(model: str, hidden: int, heads: int, batch: int, seq_len: int) -> Cell:
    """A step of a model of plain operators, since a fused one is no single kernel on a CPU."""
    options = {"hidden": hidden, "heads": heads, **type(model_preset(model)).plain_options}
    return Cell(model=model, strategy="single", batch=batch, seq_len=seq_len, model_options=options)


#: the steps whose operators are timed, from small ones to some whose activations no cache holds
LADDER = (
    _step("bert-mini", 128, 4, 2, 64),
    _step("bert-mini", 128, 4, 4, 192),
    _step("bert-mini", 320, 5, 3, 96),
    _step("bert-mini", 320, 5, 6, 320),
    _step("bert-mini", 192, 3, 2, 640),
    _step("bert-mini", 192, 3, 4, 1152),
    _step("causal-transformer-tiny", 192, 6, 2, 96),
    _step("causal-transformer-tiny", 192, 6, 4, 384),
    _step("tnl-mini", 192, 6, 2, 96),
    _step("tnl-mini", 192, 6, 4, 384),
)


#: of one kind of call: the operator, its category, bytes, FLOPs, precision and shape
_Kind = tuple[str, int, int, int, int, tuple[int, ...]]


class _Clock(TorchDispatchMode):
    """Seconds of each kind of call of the operators that are dispatched while it is entered."""

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
        price = price_of(func)
        if not price.free:
            category, nbytes, flops, precision, shape, _ = price.of(args, kwargs, result)
            self.taken[price.name, category, nbytes, flops, precision, shape].append(end - start)
        return result


def operator_points(mesh: DeviceMesh, cell: Cell, sweep: RateSweep) -> list[RatePoint]:
    """The points of the sweep's steps; the same on all ranks of CPUs, which call this together.

    Of each step its time, without the clock, less that of its operators as a point :data:`STEP`, of which
    ``extent`` is the number of operators; and one point a kind of call, of products and of others.
    """
    points: list[RatePoint] = []
    for declared in sweep.steps:
        small = cell.model_copy(
            update=declared.model_dump(include={"model", "strategy", "batch", "seq_len", "model_options"})
        )
        points += _of_step(mesh, small, sweep)
    return points


def _of_step(mesh: DeviceMesh, cell: Cell, sweep: RateSweep) -> Iterator[RatePoint]:
    """The points of one step."""
    training, inputs = set_up(cell, mesh, torch.Generator().manual_seed(SEED))
    initialize(training.module, SEED)
    for _ in range(_WARMUP):
        training.step(inputs)
    steps_s, clocks = [], []
    for _ in range(sweep.samples):  # in turns, so that a busy moment falls on both
        steps_s += seconds(lambda: training.step(inputs), mesh.device_type, 1)
        clock = _Clock()
        with clock:
            seconds(lambda: training.step(inputs), mesh.device_type, 1)
        clocks.append(_without_collectives(clock))
    yield from points_of(cell, _over_ranks(steps_s, clocks), dist.get_world_size())


def _without_collectives(clock: _Clock) -> dict[_Kind, list[float]]:
    return {kind: taken for kind, taken in clock.taken.items() if kind[0] != "allreduce_"}


def _over_ranks(
    steps_s: Sequence[float], clocks: Sequence[dict[_Kind, list[float]]]
) -> tuple[list[float], dict[_Kind, tuple[int, list[float]]]]:
    """Of each kind its calls in a step and, by step, the mean seconds of one, over all ranks."""
    kinds = list(clocks[0])
    means = torch.tensor([[fmean(clock[kind]) for clock in clocks] for kind in kinds], dtype=torch.float64)
    dist.all_reduce(means)
    means /= dist.get_world_size()
    found = zip(kinds, means.tolist(), strict=True)
    return list(steps_s), {kind: (len(clocks[0][kind]), taken) for kind, taken in found}


def points_of(
    cell: Cell, found: tuple[Sequence[float], dict[_Kind, tuple[int, list[float]]]], ranks: int
) -> Iterator[RatePoint]:
    """The points of a step: of its samples in seconds, and of each kind of its operators, of which there are
    the calls in a step and the samples of one."""
    steps_s, kinds = found
    size = f"{cell.model}, {list(cell.shape)}"
    calls = sum(count for count, _ in kinds.values())
    inside = [sum(count * taken[i] for count, taken in kinds.values()) for i in range(len(steps_s))]
    beside = [max(0.0, step - of) for step, of in zip(steps_s, inside, strict=True)]
    yield RatePoint(STEP, size, calls, cell.precision, ranks, beside)
    for (name, category, nbytes, flops, precision, shape), (_, taken) in kinds.items():
        if flops and category == MATRIX_PRODUCT:
            where = f"{name} {list(shape)}"
            yield RatePoint(
                PRODUCT, where, nbytes, PRECISION_NAMES[precision], ranks, taken, flops=flops, nbytes=nbytes
            )
        elif not flops and nbytes:
            yield RatePoint(
                OPERATOR + name, f"{nbytes} B", nbytes, cell.precision, ranks, taken, nbytes=nbytes
            )
