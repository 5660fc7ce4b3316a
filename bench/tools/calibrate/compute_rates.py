"""Rates of one device: of matmuls, attention and memory, and the seconds of a call.

All ranks measure at once, so that the rates include the effect of shared cores, caches and memory.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import Cell
from spbench.bench.measure import SEED, seconds, set_up
from spbench.bench.yaml_files import read_yaml
from spbench.impls import PRECISIONS, initialize

_KIB, _MIB = 2**10, 2**20
#: the most calls of a burst
_LONGEST_BURST = 1000


@dataclass(frozen=True)
class RateSweep:
    """The sizes at which rates are measured. Once a call takes longer than ``longest_call_s``, larger sizes
    of the same operation are left out.

    Attributes:
        precisions: the precisions of matmuls and attention.
        sides: the sides s of the matmuls [s, s] x [s, s] and [4s, s] x [s, 4s], ascending.
        lengths: the sequence lengths of attention in tokens, ascending.
        summed_bytes: the bytes of each of two tensors that are added, ascending.
        message_bytes: the sizes S of the collectives, ascending.
        steps: the training steps whose operators are timed, on CPUs.
        samples: the number of samples of a point, whose median is the point's time.
        sample_s: the seconds that a sample should take; shorter calls are repeated within a sample.
    """

    precisions: tuple[str, ...] = ("fp32",)
    sides: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    lengths: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    # more than a core's caches hold; still larger tensors would get new pages of the system in each call
    summed_bytes: tuple[int, ...] = tuple(4**n * _MIB for n in range(3))
    message_bytes: tuple[int, ...] = tuple(4**n * _KIB for n in range(9))
    steps: tuple[Cell, ...] = ()
    samples: int = 5
    sample_s: float = 0.02
    longest_call_s: float = 0.25

    @classmethod
    def of_gpus(cls, **sizes: Any) -> Self:
        """The default sizes for GPUs, in which the fields ``sizes`` replace the defaults."""
        usual = read_yaml(Path(__file__).with_name("tables.yaml"))["sizes of gpus"]
        by_default = {name: tuple(values) for name, values in usual.items()}
        return cls(**{**by_default, "samples": 10, **sizes})


@dataclass(frozen=True)
class RatePoint:
    """The times of one operation at one size, which all ranks run at once.

    Attributes:
        operation: "matmul", "attention forward", "sum", "training step", a collective, or an operation of
            :mod:`tools.calibrate.operator_times`.
        size: the size in words, as "[512, 512] x [512, 512]" or "1048576 B".
        extent: the size as a number for plots: a side, a length, or bytes.
        precision: the precision of the operands.
        ranks: the number of ranks.
        flops: the FLOPs of one call on one rank.
        nbytes: the bytes that one call reads and writes on one rank; for a collective the message's size S.
        bus_factor: for a collective, bus bandwidth over algorithm bandwidth.
        wrong: for a collective, the number of wrong elements in the results of all ranks.
        samples_s: samples of one call's seconds on the slowest rank.
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
        """The seconds of one call on the slowest rank: the median of the samples."""
        return median(self.samples_s)

    @property
    def flops_per_s(self) -> float | None:
        """The FLOPs per second of one rank; None for an operation whose FLOPs are not counted."""
        return self.flops / self.seconds if self.flops else None

    @property
    def bytes_per_s(self) -> float | None:
        """The bandwidth of a rank's own memory, or the algorithm bandwidth of a collective, in bytes per
        second; None for other operations."""
        return self.nbytes / self.seconds if self.nbytes else None

    @property
    def bus_bytes_per_s(self) -> float | None:
        """The bus bandwidth of a collective in bytes per second; None for other operations."""
        return self.nbytes * self.bus_factor / self.seconds if self.bus_factor else None


def timed(work: Callable[[], Any], device_type: str, sweep: RateSweep) -> list[float]:
    """Samples of one call's seconds on the slowest rank; all ranks call this together and get the same.

    A first call of ``work`` warms up, and a second one shows how many calls make a burst.
    """
    work()
    (once,) = seconds(work, device_type, repeats=1)
    burst = min(_LONGEST_BURST, max(1, math.ceil(sweep.sample_s / max(once, 1e-9))))
    return seconds(work, device_type, sweep.samples, burst=burst)


#: the heads and the head size of attention, as in many models of a billion parameters
HEADS, HEAD_SIZE = 16, 64
#: FLOPs of attention's backward over FLOPs of its forward: five matmuls, of which one computes the scores
#: again, over two (Dao 2023, arXiv 2307.08691, section 4.1)
_BACKWARD = 2.5
#: a training step whose tensors are so small that only calls cost time
SMALL = Cell(model="bert-tiny", strategy="single", batch=1, seq_len=8)


#: a point without samples, and a function that makes the call to time
_Trial = tuple[RatePoint, Callable[[], Callable[[], Any]]]


def compute_rates(mesh: DeviceMesh, cell: Cell, sweep: RateSweep) -> list[RatePoint]:
    """The points of matmuls, attention, sums and a small training step; the same on all ranks."""
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
    """The points of one operation's trials, in ascending size, until a trial would take too long or a rank
    has no memory for the trial."""
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
    """Make a call and run it once. Returns the call; None on all ranks if any rank has too little memory."""
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
    """Trials of attention without a mask: forward, or forward and then backward."""
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
    """Trials that add two tensors into new memory, like an activation; all three tensors' bytes count."""
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
