"""The shared communication primitives: what they compute, forward and backward, on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.impls.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    copy_rows_to_group,
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    reduce_scatter,
    ring,
    scatter_to_group,
    sum_over_group,
)
from spbench.impls.traffic import WIRE_SHARE, wire_bytes

N = 4


def mine(rank: int) -> Tensor:
    return torch.arange(6, dtype=torch.float64).reshape(2, 3) + 10 * rank


def forward_and_backward(
    mesh: DeviceMesh, primitive: Callable[..., Tensor], transposed: bool
) -> tuple[Tensor, Tensor]:
    """The output, and the input's gradient where each rank's loss weights the output by its rank + 1."""
    group, rank = mesh.get_group("sp"), dist.get_rank()
    x = mine(rank).requires_grad_()
    y = primitive(x * 1, group)
    weight = torch.full_like(y, rank + 1)
    if transposed:  # a gradient that is not contiguous arrives
        (y.t() * weight.t()).sum().backward()
    else:
        (y * weight).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("primitive", "sums_forward", "sums_backward"),
    [(copy_to_group, False, True), (reduce_from_group, True, False), (sum_over_group, True, True)],
)
def test_what_is_summed(
    pool: RankPool,
    primitive: Callable[..., Tensor],
    sums_forward: bool,
    sums_backward: bool,
    transposed: bool,
) -> None:
    total = torch.stack([mine(rank) for rank in range(N)]).sum(0)
    for rank, (y, gradient) in enumerate(pool.run({"sp": N}, forward_and_backward, primitive, transposed)):
        assert torch.equal(y, total if sums_forward else mine(rank))
        expected = sum(range(1, N + 1)) if sums_backward else rank + 1
        assert torch.equal(gradient, torch.full_like(y, expected))


def chunks_of_second_dim(
    mesh: DeviceMesh, primitive: Callable[..., Tensor], xs: list[Tensor], weights: list[Tensor]
) -> tuple[Tensor, Tensor | None]:
    x = xs[dist.get_rank()].requires_grad_()
    y = primitive(x, 1, mesh.get_group("sp"))
    (y * weights[dist.get_rank()]).sum().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize("primitive", [all_gather, gather_from_group, scatter_to_group, reduce_scatter])
def test_backward_is_the_transpose_of_forward(pool: RankPool, primitive: Callable[..., Tensor]) -> None:
    whole, chunk = ([torch.randn(2, n * 3, 5) for _ in range(N)] for n in (N, 1))
    gathers = primitive in (all_gather, gather_from_group)
    xs, weights = (chunk, whole) if gathers else (whole, chunk)
    ranks = pool.run({"sp": N}, chunks_of_second_dim, primitive, xs, weights)
    for rank, (y, gradient) in enumerate(ranks):
        summed = sum(whole) if primitive in (all_gather, reduce_scatter) else whole[rank]
        own, joined = summed.chunk(N, 1)[rank], torch.cat(chunk, 1)
        torch.testing.assert_close(y, joined if gathers else own)
        torch.testing.assert_close(gradient, own if gathers else joined)


def copy_second_row(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return copy_rows_to_group(x, slice(1, None), group)


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_some_rows_are_summed(pool: RankPool, transposed: bool) -> None:
    ranks = pool.run({"sp": N}, forward_and_backward, copy_second_row, transposed)
    for rank, (y, gradient) in enumerate(ranks):
        assert torch.equal(y, mine(rank))
        assert gradient.tolist() == [[rank + 1] * 3, [sum(range(1, N + 1))] * 3]


@pytest.mark.parametrize("primitive", [copy_to_group, reduce_from_group, sum_over_group, all_reduce])
def test_without_a_group_nothing_happens(primitive: Callable[..., Tensor]) -> None:
    x = mine(0)
    assert primitive(x, None) is x


def round_the_ring(mesh: DeviceMesh) -> tuple[list[int], list[Tensor], Tensor]:
    chunk = mine(dist.get_rank()).t()  # not contiguous
    passed = [(owner, received.clone()) for owner, received in ring(chunk, mesh.get_group("sp"))]
    return [owner for owner, _ in passed], [received for _, received in passed], chunk


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_ring_shows_every_chunk_with_its_owner(pool: RankPool, n: int) -> None:
    for rank, (owners, chunks, own) in enumerate(pool.run({"sp": n}, round_the_ring)):
        assert owners == [(rank - step) % n for step in range(n)]
        assert all(torch.equal(chunk, mine(owner).t()) for owner, chunk in zip(owners, chunks, strict=True))
        assert torch.equal(own, mine(rank).t())  # what was given is left as it was


@pytest.mark.parametrize("n", [1, 2, 3, 64])
def test_wire_bytes_of_ring_algorithms(n: int) -> None:
    payload = 7  # divides by none of them
    assert wire_bytes("all_reduce", payload, n) == Fraction(2 * 7 * (n - 1), n)
    for name in ("all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce"):
        assert wire_bytes(name, payload, n) == Fraction(7 * (n - 1), n)
    # an all-reduce is a reduce-scatter and an all-gather
    assert WIRE_SHARE["all_reduce"](n) == WIRE_SHARE["reduce_scatter"](n) + WIRE_SHARE["all_gather"](n)
    assert (wire_bytes("send", payload, n), wire_bytes("recv", payload, n)) == (7, 0)


def exchanged(mesh: DeviceMesh, split_dim: int, gather_dim: int, transposed: bool) -> list[Tensor]:
    """What rank r has of x[i, j, k] after an exchange, and the gradient of what it had before."""
    group, rank, n = mesh.get_group("sp"), dist.get_rank(), mesh.get_group("sp").size()
    whole = torch.arange(2.0 * 12 * 24).reshape(24, 2, 12).movedim(1, 3 - split_dim - gather_dim)
    before = whole.chunk(n, gather_dim)[rank]
    if transposed:
        before = before.mT.contiguous().mT
    x = before.clone(memory_format=torch.preserve_format).requires_grad_()
    y = all_to_all(x, split_dim, gather_dim, group)
    expected = whole.chunk(n, split_dim)[rank]
    y.backward(expected.mT.contiguous().mT if transposed else expected)  # the inverse must bring x back
    assert x.grad is not None
    return [y.detach(), expected, x.grad, before]


@pytest.mark.covering(1)
@pytest.mark.parametrize("dims", [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)])
@pytest.mark.parametrize("transposed", [False, True])
def test_all_to_all_swaps_the_dim_that_is_spread(
    pool: RankPool, dims: tuple[int, int], transposed: bool
) -> None:
    for n in (1, 2, 3, 4):
        for y, expected, gradient, before in pool.run({"sp": n}, exchanged, *dims, transposed):
            assert torch.equal(y, expected)
            assert torch.equal(gradient, before)
