"""Rates of one device: matmuls, attention, memory, and what a call costs.

All ranks measure at once, so what they share (cores, caches, memory) is in the rates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import Cell
from spbench.bench.measure import SEED, seconds, set_up
from spbench.impls import PRECISIONS, initialize

_KIB, _MIB = 2**10, 2**20
#: calls of a burst at most
_LONGEST_BURST = 1000


@dataclass(frozen=True)
class RateSweep:
    """The sizes at which rates are measured; larger ones of a kind are left out once one call takes longer
    than ``longest_call_s``.

    Attributes:
        precisions: of matmuls and attention.
        sides: s of the matmuls [s, s] x [s, s] and [4s, s] x [s, 4s], ascending.
        lengths: of sequences, for attention, ascending.
        summed_bytes: of each of two tensors that are added, ascending.
        message_bytes: S of the collectives, ascending.
        steps: of training, whose operators are timed; on CPUs.
        samples: of each point, the median of which counts.
        sample_s: that a sample takes about; calls that are shorter are repeated in it.
    """

    precisions: tuple[str, ...] = ("fp32",)
    sides: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    lengths: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    # more than a core's caches hold; larger ones are new pages of the system each time
    summed_bytes: tuple[int, ...] = tuple(4**n * _MIB for n in range(3))
    message_bytes: tuple[int, ...] = tuple(4**n * _KIB for n in range(9))
    steps: tuple[Cell, ...] = ()
    samples: int = 5
    sample_s: float = 0.02
    longest_call_s: float = 0.25

    @classmethod
    def of_gpus(cls, **sizes: Any) -> RateSweep:
        """The sizes for GPUs; ``sizes`` are fields that differ."""
        return cls(
            **{
                "precisions": ("bf16", "fp16", "fp32"),
                "sides": tuple(2**n for n in range(8, 15)),
                "lengths": tuple(2**n for n in range(9, 16)),
                "summed_bytes": tuple(4**n * _MIB for n in range(6)),
                "message_bytes": tuple(4**n * _KIB for n in range(11)),
                "samples": 10,
                **sizes,
            }
        )


@dataclass(frozen=True)
class RatePoint:
    """One operation at one size, done by all ranks at once.

    Attributes:
        operation: "matmul", "attention forward", "sum", "training step", a collective, or one of
            :mod:`tools.calibrate.operator_times`.
        size: in words, as "[512, 512] x [512, 512]" or "1048576 B".
        extent: what the size is plotted over: the side, the length, or bytes.
        precision: of the operands.
        ranks: how many took part.
        flops: of one call on one rank.
        nbytes: what one call reads and writes on one rank; of a collective its message, S.
        bus_factor: of a collective: bus bandwidth over algorithm bandwidth.
        wrong: of a collective: how many elements of the results of all ranks were wrong.
        samples_s: seconds of one call on the slowest rank.
    """

    operation: str
    size: str
    extent: int
    precision: str
    ranks: int
    samples_s: list[float] = field(default_factory=list)
    flops: int = 0
    nbytes: int = 0
    bus_factor: float = 0.0
    wrong: int = 0

    @property
    def seconds(self) -> float:
        """The median of the samples."""
        return median(self.samples_s)

    @property
    def is_steady(self) -> bool:
        """Whether no sample took half as long again as another."""
        return max(self.samples_s) < 1.5 * min(self.samples_s)

    @property
    def flops_per_s(self) -> float | None:
        """FLOPs per second of one rank; None where nothing is computed."""
        return self.flops / self.seconds if self.flops else None

    @property
    def bytes_per_s(self) -> float | None:
        """Bandwidth of a rank's own memory, or the algorithm bandwidth of a collective; None for other
        operations."""
        return self.nbytes / self.seconds if self.nbytes else None

    @property
    def bus_bytes_per_s(self) -> float | None:
        """The bus bandwidth of a collective; None for other operations."""
        return self.nbytes * self.bus_factor / self.seconds if self.bus_factor else None


def timed(work: Callable[[], Any], device_type: str, sweep: RateSweep) -> list[float]:
    """Samples of one call in seconds, of the slowest rank; the same on all ranks, which call this together.

    The first call warms up and the second says how many are in a burst.
    """
    work()
    (once,) = seconds(work, device_type, repeats=1)
    burst = min(_LONGEST_BURST, max(1, math.ceil(sweep.sample_s / max(once, 1e-9))))
    return seconds(work, device_type, sweep.samples, burst=burst)


#: of attention: heads and the size of a head, as in many models of a billion parameters
HEADS, HEAD_SIZE = 16, 64
#: FLOPs of attention's backward over those of its forward: five matmuls, of which one is the forward's
#: scores again, beside two (Dao 2023, arXiv 2307.08691, section 4.1)
_BACKWARD = 2.5
#: a training step whose tensors are so small that only calls cost time
SMALL = Cell(model="bert-tiny", strategy="single", batch=1, seq_len=8)


#: a point without samples, and what makes the call to time
_Trial = tuple[RatePoint, Callable[[], Callable[[], Any]]]


def compute_rates(mesh: DeviceMesh, cell: Cell, sweep: RateSweep) -> list[RatePoint]:
    """The points of this rank's device; the same on all ranks."""
    device, ranks = mesh.device_type, dist.get_world_size()
    points: list[RatePoint] = []
    for precision in sweep.precisions:
        for widening in (1, 4):
            points += _series(_matmuls(precision, widening, device, ranks, sweep), device, sweep)
        for backward in (False, True):
            points += _series(_attention(precision, backward, device, ranks, sweep), device, sweep)
    points += _series(_sums(device, ranks, sweep), device, sweep)
    return [*points, _small_step(mesh, cell, ranks, sweep)]


def _series(trials: Iterable[_Trial], device: str, sweep: RateSweep) -> Iterator[RatePoint]:
    """Time trials of one operation, by size, until a trial would take too long or some rank has no memory for
    it."""
    expected_s = 0.0  # for a FLOP or a byte
    for point, make in trials:
        work = point.flops or point.nbytes
        if expected_s * work > sweep.longest_call_s:
            return
        call = _made_on_all_ranks(make, device)
        if call is None:
            return
        samples = timed(call, device, sweep)
        yield replace(point, samples_s=samples)
        expected_s = min(samples) / work


def _made_on_all_ranks(make: Callable[[], Callable[[], Any]], device: str) -> Callable[[], Any] | None:
    """Make a call and run it once; returns the call, or on all ranks None if one has no memory for it."""
    call = None
    with suppress(torch.OutOfMemoryError):
        built = make()
        built()
        call = built
    failed = torch.tensor(int(call is None), device=device)
    dist.all_reduce(failed, dist.ReduceOp.MAX)
    return None if failed else call


def _matmuls(precision: str, widening: int, device: str, ranks: int, sweep: RateSweep) -> Iterator[_Trial]:
    dtype = PRECISIONS[precision].parameters
    for side in sweep.sides:
        outer = widening * side
        size = f"[{outer}, {side}] x [{side}, {outer}]"

        def make(outer: int = outer, side: int = side) -> Callable[[], Any]:
            a, b = (torch.randn(shape, device=device).to(dtype) for shape in ((outer, side), (side, outer)))
            return partial(torch.matmul, a, b)

        yield RatePoint("matmul", size, side, precision, ranks, flops=2 * outer * side * outer), make


def _attention(precision: str, backward: bool, device: str, ranks: int, sweep: RateSweep) -> Iterator[_Trial]:
    """Trials of attention without a mask: forward alone, or forward with backward."""
    operation = "attention forward and backward" if backward else "attention forward"
    dtype = PRECISIONS[precision].parameters
    for length in sweep.lengths:
        shape = (1, HEADS, length, HEAD_SIZE)
        flops = round(4 * HEADS * length**2 * HEAD_SIZE * (1 + _BACKWARD * backward))

        def make(shape: tuple[int, ...] = shape) -> Callable[[], Any]:
            q, k, v = (torch.randn(shape, device=device).to(dtype).requires_grad_(backward) for _ in range(3))
            return partial(_attend, q, k, v)

        yield RatePoint(operation, str(list(shape)), length, precision, ranks, flops=flops), make


def _attend(q: Tensor, k: Tensor, v: Tensor) -> None:
    o = F.scaled_dot_product_attention(q, k, v)
    if o.requires_grad:
        torch.autograd.grad(o, (q, k, v), torch.ones_like(o))


def _sums(device: str, ranks: int, sweep: RateSweep) -> Iterator[_Trial]:
    """Trials that add two tensors into new memory, as an activation is; all three tensors count as bytes."""
    for nbytes in sweep.summed_bytes:

        def make(count: int = nbytes // 4) -> Callable[[], Any]:
            x, y = (torch.randn(count, device=device) for _ in range(2))
            return partial(torch.add, x, y)

        yield RatePoint("sum", f"{nbytes} B", nbytes, "fp32", ranks, nbytes=3 * nbytes), make


def _small_step(mesh: DeviceMesh, cell: Cell, ranks: int, sweep: RateSweep) -> RatePoint:
    # strategy single: each rank has a model of its own, and they do not talk
    small = cell.model_copy(update=SMALL.model_dump(include={"model", "strategy", "batch", "seq_len"}))
    training, inputs = set_up(small, mesh, torch.Generator().manual_seed(SEED))
    initialize(training.module, SEED)
    samples = timed(lambda: training.step(inputs), mesh.device_type, sweep)
    return RatePoint("training step", f"{SMALL.model}, [1, 8]", 8, cell.precision, ranks, samples)
