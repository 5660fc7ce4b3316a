"""DSP: its plans, its primitives on real ranks, and steps on grids that ranks do not divide.
docs/add_strategy.md lists hooks, kinds of sites and collectives as the code has them."""

import math
import re
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import spbench
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.impls.layout import MEETINGS, SITE_KINDS
from spbench.impls.place import Place
from spbench.impls.strategies.base import Strategy, Unsupported
from spbench.impls.strategies.dsp import DynamicSequenceParallel, plan_switches, switched_elements
from spbench.impls.strategies.grid import Grid, part_of

# -- plans -------------------------------------------------------------------------------------------


def spent(cut: list[int | None], sizes: tuple[int, ...], parts: int) -> int:
    """Positions that a rank puts into the all-to-alls of a way to cut."""
    return sum(
        switched_elements(sizes, parts, before, after)
        for before, after in pairwise(cut)
        if before is not None and after is not None and before != after
    )


@given(st.data())
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_no_way_is_cheaper_than_the_plan(data: st.DataObject) -> None:
    sizes = tuple(data.draw(st.lists(st.integers(1, 7), min_size=2, max_size=4)))
    dims = st.integers(0, len(sizes) - 1)
    stages = data.draw(st.lists(dims, min_size=1, max_size=4))
    parts, first, last = (data.draw(x) for x in (st.integers(2, 5), st.none() | dims, st.none() | dims))
    plan = plan_switches(stages, sizes, parts, first, last)
    assert all(cut != needed for cut, needed in zip(plan, stages, strict=True))
    ways = [
        [*cut]
        for cut in product(range(len(sizes)), repeat=len(stages))
        if all(c != needed for c, needed in zip(cut, stages, strict=True))
    ]
    cheapest = min(spent([first, *way, last], sizes, parts) for way in ways)
    assert spent([first, *plan, last], sizes, parts) == cheapest


def test_of_two_dims_each_stage_switches() -> None:
    """Section 3.3 of the paper: a message of M/N before every stage but the first, and one at the end."""
    plan = plan_switches([1, 0] * 3, (8, 16), 4, 0, 0)
    assert plan == [0, 1] * 3
    assert spent([0, *plan, 0], (8, 16), 4) == 6 * 8 * 16 // 4


def test_padding_is_paid_for() -> None:
    """The dim that ranks divide is the cheaper of two that would do."""
    assert plan_switches([0], (4, 5, 4), 4, first=0) == [2]
    assert switched_elements((4, 5, 4), 4, 0, 1) == 4 * 1 * 2 * 4


def test_one_dim_has_no_plan() -> None:
    with pytest.raises(Unsupported, match=r"one dim .* use ulysses or ring_attention"):
        plan_switches([0], (8,), 2)


# -- primitives --------------------------------------------------------------------------------------

#: which 2, 3 and 4 ranks do not divide, and of whose 5 places 4 ranks have 2, 2, 1 and none
SIZES = (5, 3, 4)


def whole_tensor(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, *SIZES, 3, generator=generator, dtype=torch.float64)


def errors_of_switches(mesh: DeviceMesh) -> float:
    """Largest error of values and gradients: after a switch a rank has what a split would have given it."""
    dsp, worst = DynamicSequenceParallel(Place.on(mesh)), 0.0
    for before, after in product(range(len(SIZES)), repeat=2):
        x, gradient = whole_tensor().requires_grad_(), whole_tensor(1)
        switched = dsp.switch(dsp.split(x, before), before, after)
        assert (switched.sharded, switched.index) == (after, dsp.rank)
        worst = max(worst, _difference(switched.x, dsp.split(whole_tensor(), after).x))
        (switched.x * dsp.split(gradient, after).x).sum().backward()
        worst = max(worst, _difference(x.grad, _alone(dsp, gradient, before)))
    return worst


def errors_of_gathers(mesh: DeviceMesh) -> float:
    """The same of a gather, whose whole each rank uses in its own way."""
    dsp, worst = DynamicSequenceParallel(Place.on(mesh)), 0.0
    for dim in range(len(SIZES)):
        x = whole_tensor().requires_grad_()
        whole = dsp.gather(dsp.split(x, dim))
        worst = max(worst, _difference(whole, whole_tensor()))
        uses = [whole_tensor(2 + rank) for rank in range(dsp.size)]
        (whole * uses[dsp.rank]).sum().backward()
        worst = max(worst, _difference(x.grad, _alone(dsp, torch.stack(uses).sum(0), dim)))
    return worst


def _alone(dsp: DynamicSequenceParallel, x: Tensor, dim: int) -> Tensor:
    """x with zeros but for this rank's part along a grid dim."""
    first, count = part_of(SIZES[dim], dsp.size, dsp.rank)
    kept = torch.zeros(SIZES[dim], dtype=x.dtype)
    kept[first : first + count] = 1
    return x * kept.view(-1, *[1] * (x.ndim - 2 - dim))


def _difference(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return math.inf
    return (a - b).abs().max().item() if a.numel() else 0.0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_switch_and_gather_give_what_a_split_would(pool: RankPool, n: int) -> None:
    assert max(pool.run({"sp": n}, errors_of_switches)) == 0
    assert max(pool.run({"sp": n}, errors_of_gathers)) < 1e-12


def messages_of_wrong_switches(mesh: DeviceMesh) -> list[str]:
    dsp = DynamicSequenceParallel(Place.on(mesh))
    grid, messages = dsp.split(whole_tensor(), 1), []
    for wrong in (
        lambda: dsp.switch(grid, 0, 2),
        lambda: dsp.switch(Grid(whole_tensor(), SIZES), None, 0),
        lambda: dsp.along(grid, 2, 2),
        lambda: Grid(grid.x, SIZES, 0, dsp.size, dsp.rank),
    ):
        with pytest.raises(ValueError) as raised:
            wrong()
        messages.append(str(raised.value))
    return messages


def test_wrong_switches_are_errors(pool: RankPool) -> None:
    for messages in pool.run({"sp": 2}, messages_of_wrong_switches):
        wrong_dim, whole, same_dim, wrong_part = messages
        assert wrong_dim == "the grid is cut along dim 1, not along dim 0"
        assert whole == "the grid is cut along dim None, not along dim None"
        assert same_dim == "a stage along dim 2 cannot have the grid cut along dim 2"
        assert "sharded along dim 0, is" in wrong_part


def test_one_device_switches_nothing() -> None:
    dsp = DynamicSequenceParallel()
    grid = dsp.split(whole_tensor(), 0)
    assert dsp.along(grid, 0, None) is grid
    assert dsp.restored(grid) is grid
    assert torch.equal(dsp.gather(grid), whole_tensor())


@pytest.mark.parametrize(("size", "parts"), [(5, 4), (1, 3), (9, 4), (8, 4)])
def test_parts_are_all_and_no_more(size: int, parts: int) -> None:
    held = [part_of(size, parts, index) for index in range(parts)]
    assert [place for first, count in held for place in range(first, first + count)] == [*range(size)]


# -- steps -------------------------------------------------------------------------------------------


PAGE = Path(__file__).parents[3] / "docs" / "add_strategy.md"
ROWS = [
    [set(re.findall(r"`(\w+)`", cell)) for cell in line.split("|")[1:-1]]
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ")
]


def is_hook(name: str, value: Any) -> bool:
    function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return not name.startswith("_") and not getattr(function, "__final__", False)


def hooks() -> set[str]:
    ours = [cls for cls in Strategy.__mro__ if cls.__module__.startswith("spbench.")]
    return {name for cls in ours for name, value in vars(cls).items() if is_hook(name, value)}


def test_every_hook_is_on_the_page() -> None:
    listed = [row[1] for row in ROWS if len(row) == 3 and not row[0] and not row[2]]
    assert sorted(name for names in listed for name in names) == sorted(hooks())


def test_every_kind_of_site_is_on_the_page() -> None:
    (row,) = (row for row in ROWS if len(row) == 3 and all(row))
    assert row[0] == set(MEETINGS)
    assert row[1] <= hooks()
    assert set.union(*row) == SITE_KINDS


def test_collectives_lists_what_it_has_for_strategies_alone() -> None:
    listed = {name for row in ROWS if len(row) == 4 for name in row[0]}
    assert {"all_gather", "reduce_scatter"} < listed <= set(dir(spbench.collectives))
    assert not {"Any", "torch", "dist"} & set(dir(spbench.collectives))


def test_a_misspelt_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="a site cannot be 'attenton'; its kind is one of attention"):
        spbench.Site("attenton", 1)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"Misspelt.meets has 'attenton', where positions cannot meet; choices: "
    ):
        type("Misspelt", (Strategy,), {"meets": frozenset({"attenton"})})
