"""Rates of one device: matrix products, attention, memory, and what a call costs.

All ranks measure at once, so what they share (cores, caches, memory) is in the rates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.distributed import SEED
from spbench.bench.measure.engines.setup import set_up
from spbench.bench.tools.calibrate.rate_points import RatePoint, RateSweep, timed
from spbench.impls.training.step import PRECISIONS, initialize

#: of attention: heads and the size of a head, as in many models of a billion parameters
HEADS, HEAD_SIZE = 16, 64
#: FLOPs of attention's backward over those of its forward: five products, of which one is the forward's
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
            points += _series(_products(precision, widening, device, ranks, sweep), device, sweep)
        for backward in (False, True):
            points += _series(_attention(precision, backward, device, ranks, sweep), device, sweep)
    points += _series(_sums(device, ranks, sweep), device, sweep)
    return [*points, _small_step(mesh, cell, ranks, sweep)]


def _series(trials: Iterable[_Trial], device: str, sweep: RateSweep) -> Iterator[RatePoint]:
    """Time trials of one operation, by size, up to one that would take too long or for which there is no
    memory on some rank."""
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
    """The call, which has run once; None on all ranks if one of them has no memory for it."""
    call = None
    with suppress(torch.OutOfMemoryError):
        made = make()
        made()
        call = made
    failed = torch.tensor(int(call is None), device=device)
    dist.all_reduce(failed, dist.ReduceOp.MAX)
    return None if failed else call


def _products(precision: str, widening: int, device: str, ranks: int, sweep: RateSweep) -> Iterator[_Trial]:
    dtype = PRECISIONS[precision].parameters
    for side in sweep.sides:
        outer = widening * side
        size = f"[{outer}, {side}] x [{side}, {outer}]"

        def make(outer: int = outer, side: int = side) -> Callable[[], Any]:
            a, b = (torch.randn(shape, device=device).to(dtype) for shape in ((outer, side), (side, outer)))
            return partial(torch.matmul, a, b)

        yield RatePoint("matrix product", size, side, precision, ranks, flops=2 * outer * side * outer), make


def _attention(precision: str, backward: bool, device: str, ranks: int, sweep: RateSweep) -> Iterator[_Trial]:
    """Without a mask; forward alone, or forward with backward."""
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
    """Two tensors into new memory, as an activation is made; the bytes are those of all three."""
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
