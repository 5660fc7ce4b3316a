"""Sizes, coordinates and groups of ranks by axis name. The shared communication primitives: what they
compute, forward and backward, on real ranks."""

from collections.abc import Callable
from fractions import Fraction
from itertools import permutations, product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.impls.axes import MESH_AXES, in_order, ranks_along, spelled, unused_axes, whole_mesh
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
from spbench.impls.composition import Composition
from spbench.impls.place import ALONE, Place, global_ranks
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.sequence_chunks import SequenceChunks
from spbench.impls.traffic import WIRE_SHARE, wire_bytes
from tests.grid import tabled


def test_a_place_is_where_the_mesh_has_its_rank() -> None:
    """As a row-major tensor of ranks has them."""
    for order in permutations([("dp", 2), ("tp", 3), ("sp", 2)]):
        sizes = dict(order)
        ranks = torch.arange(12).view(*sizes.values())
        for coordinates in product(*(range(n) for n in ranks.shape)):
            along = dict(zip(sizes, coordinates, strict=True))
            place = Place.of_rank(sizes, int(ranks[coordinates]))
            assert place.coordinates == {"pp": 0, "cp": 0} | along
            assert place.global_rank == ranks[coordinates]
            assert (place.size("tp", "sp"), place.size("pp"), place.size()) == (6, 1, 1)
            tp_outside = [*sizes].index("tp") < [*sizes].index("sp")
            number = along["tp"] * 2 + along["sp"] if tp_outside else along["sp"] * 3 + along["tp"]
            assert place.rank("tp", "sp") == place.rank("sp", "tp") == number
            assert place.group("sp") is None
    chosen = {"tp": [2, 0], "sp": [1]}
    assert list(global_ranks({"dp": 2, "tp": 3, "sp": 2}, chosen)) == [5, 1, 11, 7]
    assert list(global_ranks({"sp": 2, "tp": 3, "dp": 2}, chosen)) == [10, 11, 6, 7]


def test_what_is_left_out_has_one_rank() -> None:
    assert [*whole_mesh({"sp": 4}).items()] == [("sp", 4), ("dp", 1), ("pp", 1), ("cp", 1), ("tp", 1)]
    assert ranks_along(["tp", "sp"], {"sp": 4}) == 4
    assert (ALONE.size(*MESH_AXES), ALONE.global_rank) == (1, 0)
    for wrong in ({"xp": 2}, {"sp": 0}):
        with pytest.raises(ValueError, match="the axes are dp, pp, cp, tp, sp, each 1 or more"):
            whole_mesh(wrong)
    with pytest.raises(ValueError, match="device mesh"):
        ALONE.submesh("dp")


def test_sizes_in_an_order() -> None:
    sizes = {"dp": 2, "pp": 1, "cp": 1, "tp": 3, "sp": 2}
    assert spelled(in_order(sizes, ["sp", "pp", "dp", "tp"])) == "sp2xdp2xtp3"
    assert [*in_order(sizes, ["sp", "dp", "tp"])] == ["sp", "dp", "tp", "pp", "cp"]
    assert (spelled(sizes), spelled({"sp": 1})) == ("dp2xtp3xsp2", "1")
    for order, message in (
        (["sp", "dp"], "leaves out the axis tp, which has 3 ranks; add it"),
        (["sp", "dp", "tp", "ep"], "unknown axis 'ep'; the axes are dp, pp, cp, tp, sp"),
        (["sp", "dp", "tp", "sp"], "the axis sp is there 2 times; name it once"),
    ):
        with pytest.raises(ValueError, match=message):
            in_order(sizes, order)


class Rows(SequenceChunks):
    """A strategy of two axes that does nothing with them."""

    name = "rows"
    axes = ("tp", "sp")

    @classmethod
    def roles(cls, axis: str, size: int) -> list[list[int]]:
        return [[0], list(range(1, size))] if axis == "sp" else super().roles(axis, size)


def sums_over_groups(mesh: DeviceMesh) -> tuple[dict[str, int], dict[str, str], tuple[int, int]]:
    """The sum of global ranks over groups of this rank's, and the axes noted for groups over several."""
    place, found = Place.on(mesh), {}
    for axes in (("sp",), ("tp",), ("tp", "sp"), ("sp", "tp"), ("dp", "sp"), ("dp", "pp")):
        x = torch.tensor(dist.get_rank())
        if (group := place.group(*axes)) is not None:
            dist.all_reduce(x, group=group)
        found[" ".join(axes)] = int(x)
    strategy = Rows(place)
    assert (strategy.group.size(), strategy.group.rank()) == (strategy.size, strategy.rank)
    assert Composition(place).gradient_mesh(["sp"]).size() == mesh["sp"].size()
    assert place.global_rank == dist.get_rank()
    return found, dict.fromkeys(place.flattened.values(), ""), (strategy.size, strategy.rank)


@pytest.mark.parametrize(("outer", "inner"), [("tp", "sp"), ("sp", "tp")])
def test_groups_are_those_of_the_mesh(pool: RankPool, outer: str, inner: str) -> None:
    for rank, (sums, flattened, own) in enumerate(pool.run({outer: 2, inner: 2}, sums_over_groups)):
        along = {inner: [1, 5][rank // 2], outer: [2, 4][rank % 2]}
        assert sums == along | {"tp sp": 6, "sp tp": 6, "dp sp": along["sp"], "dp pp": rank}
        assert set(flattened) == {"tp_sp"}
        assert own == (4, rank)


def test_a_strategy_knows_the_axes_that_are_not_its_own() -> None:
    assert unused_axes(Rows.axes, {"dp": 2, "tp": 2, "sp": 2}) == []
    assert unused_axes(Strategy.axes, {"dp": 2, "tp": 2, "sp": 2}) == ["tp", "sp"]
    assert Rows.sizes_for(3) == {"tp": 3}
    assert (Rows.planned(3, 2).size, Rows.planned(3, 2).rank) == (3, 2)


def sum_over_a_run(mesh: DeviceMesh, axis: str, size: int, asking: int) -> tuple[int, dict[str, str]]:
    """The sum of global ranks over runs along an axis, of which only ranks below ``asking`` ask for one."""
    place, x = Place.on(mesh), torch.tensor(dist.get_rank())
    if dist.get_rank() < asking:
        group = place.subgroup(axis, size=size)
        assert group is place.subgroup(axis, size=size)
        if group is not None:
            dist.all_reduce(x, group=group)
    dist.barrier()  # a rank that leaves closes the connections that others still make
    return int(x), place.flattened


@tabled(__file__, "runs_along_an_axis")
def test_runs_along_an_axis(
    pool: RankPool, sizes: dict[str, int], axis: str, size: int, sums: list[int]
) -> None:
    found = pool.run(sizes, sum_over_a_run, axis, size, 4)
    assert [total for total, _ in found] == sums
    part = 1 < size < sizes[axis]
    assert [[*noted.values()] for _, noted in found] == [[axis] if part else []] * 4


def sum_across_runs(mesh: DeviceMesh, *axes: str) -> tuple[int, dict[str, str]]:
    place, x = Place.on(mesh), torch.tensor(dist.get_rank())
    dist.all_reduce(x, group=place.subgroup(*axes, size=2, across=True))
    dist.barrier()
    return int(x), place.flattened


def test_the_same_place_in_each_run(pool: RankPool) -> None:
    assert [total for total, _ in pool.run({"dp": 4}, sum_across_runs, "dp")] == [2, 4, 2, 4]
    found = pool.run({"dp": 2, "sp": 2}, sum_across_runs, "dp", "sp")
    assert [total for total, _ in found] == [2, 4, 2, 4]
    assert {*found[0][1].values()} == {"dp_sp"}
    assert Place({"dp": 4}).subgroup("dp", size=2, across=True) is None


def test_a_run_is_made_by_its_ranks_alone(pool: RankPool) -> None:
    """As a pipeline stage may have parameters that others have not."""
    assert [total for total, _ in pool.run({"tp": 4}, sum_over_a_run, "tp", 2, 2)] == [1, 1, 2, 3]


def test_runs_divide_the_axis() -> None:
    with pytest.raises(ValueError, match="6 ranks along tp cannot be divided into runs of 4"):
        Place({"tp": 6}).subgroup("tp", size=4)
    assert Place({"tp": 6}).subgroup("tp", size=3) is None


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
