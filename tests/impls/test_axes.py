"""Sizes, coordinates and groups of ranks by axis name."""

from __future__ import annotations

from itertools import permutations, product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.impls.axes import MESH_AXES, in_order, ranks_along, spelled, unused_axes, whole_mesh
from spbench.impls.composition import Composition
from spbench.impls.place import ALONE, Place, global_ranks
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.sequence_chunks import SequenceChunks


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
    assert strategy.group is not None
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


@pytest.mark.parametrize(
    ("sizes", "axis", "size", "sums"),
    [
        ({"tp": 4}, "tp", 2, [1, 1, 5, 5]),
        ({"tp": 4}, "tp", 1, [0, 1, 2, 3]),
        ({"tp": 2, "sp": 2}, "tp", 2, [2, 4, 2, 4]),
    ],
)
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
