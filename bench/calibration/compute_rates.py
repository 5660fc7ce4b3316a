"""Rates of one device: matrix products, attention, memory, and what a call costs.

All ranks measure at once, each with the threads that the engine gives it. So what ranks share (cores, caches,
memory) is in the rates: four ranks on two cores get about half a core each.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.calibration.rate_points import RatePoint, RateSweep, timed
from spbench.bench.cell import Cell
from spbench.bench.engines.distributed import SEED
from spbench.bench.engines.setup import set_up
from spbench.impls.training.step import PRECISIONS, initialize

#: of attention: heads and the size of a head, as in many models of a billion parameters
HEADS, HEAD_SIZE = 16, 64
#: FLOPs of attention's backward over those of its forward: five products, of which one is the forward's
#: scores again, beside two (Dao 2023, arXiv 2307.08691, section 4.1)
_BACKWARD = 2.5
#: a training step whose tensors are so small that only calls cost time
SMALL = Cell(model="bert-tiny", strategy="single", batch=1, seq_len=8)


def compute_rates(mesh: DeviceMesh, cell: Cell, sweep: RateSweep) -> list[RatePoint]:
    """The points of this rank's device; the same on all ranks."""
    device, ranks = mesh.device_type, dist.get_world_size()
    points: list[RatePoint] = []
    for precision in sweep.precisions:
        dtype = PRECISIONS[precision].parameters
        points += _matrix_products(precision, dtype, device, ranks, sweep)
        points += _attention(precision, dtype, device, ranks, sweep)
    points += _sums(device, ranks, sweep)
    return [*points, _small_step(mesh, cell, ranks, sweep)]


def _matrix_products(
    precision: str, dtype: torch.dtype, device: str, ranks: int, sweep: RateSweep
) -> Iterator[RatePoint]:
    for widening in (1, 4):
        expected_s = 0.0
        for side in sweep.sides:
            rows, inner, columns = widening * side, side, widening * side
            flops = 2 * rows * inner * columns
            if expected_s * flops > sweep.longest_call_s:
                break
            a = torch.randn(rows, inner, device=device).to(dtype)
            b = torch.randn(inner, columns, device=device).to(dtype)
            samples = timed(partial(torch.matmul, a, b), device, sweep)
            size = f"[{rows}, {inner}] x [{inner}, {columns}]"
            yield RatePoint("matrix product", size, side, precision, ranks, samples, flops)
            expected_s = min(samples) / flops


def _attention(
    precision: str, dtype: torch.dtype, device: str, ranks: int, sweep: RateSweep
) -> Iterator[RatePoint]:
    """Without a mask; forward alone, and forward with backward."""
    for backward in (False, True):
        expected_s = 0.0
        for length in sweep.lengths:
            flops = round(4 * HEADS * length**2 * HEAD_SIZE * (1 + _BACKWARD * backward))
            if expected_s * flops > sweep.longest_call_s:
                break
            q, k, v = (
                torch.randn(1, HEADS, length, HEAD_SIZE, device=device).to(dtype).requires_grad_(backward)
                for _ in range(3)
            )
            samples = timed(partial(_attend, q, k, v), device, sweep)
            operation = "attention forward and backward" if backward else "attention forward"
            size = f"[1, {HEADS}, {length}, {HEAD_SIZE}]"
            yield RatePoint(operation, size, length, precision, ranks, samples, flops)
            expected_s = min(samples) / flops


def _attend(q: Tensor, k: Tensor, v: Tensor) -> None:
    o = F.scaled_dot_product_attention(q, k, v)
    if o.requires_grad:
        torch.autograd.grad(o, (q, k, v), torch.ones_like(o))


def _sums(device: str, ranks: int, sweep: RateSweep) -> Iterator[RatePoint]:
    """Two tensors into new memory, as an activation is made; the bytes are those of all three."""
    for nbytes in sweep.summed_bytes:
        x, y = (torch.randn(nbytes // 4, device=device) for _ in range(2))
        samples = timed(partial(torch.add, x, y), device, sweep)
        yield RatePoint("sum", f"{nbytes} B", nbytes, "fp32", ranks, samples, nbytes=3 * nbytes)


def _small_step(mesh: DeviceMesh, cell: Cell, ranks: int, sweep: RateSweep) -> RatePoint:
    # strategy single: each rank has a model of its own, and they do not talk
    small = cell.model_copy(update=SMALL.model_dump(include={"model", "strategy", "batch", "seq_len"}))
    training, inputs = set_up(small, mesh, torch.Generator().manual_seed(SEED))
    initialize(training.module, SEED)
    samples = timed(lambda: training.step(inputs), mesh.device_type, sweep)
    return RatePoint("training step", f"{SMALL.model}, [1, 8]", 8, cell.precision, ranks, samples)
