"""The ranks of a pipeline stage, arranged anew for experts. Bounds of options, from both sides. Loops whose
steps can be chosen among.
Where tokens go by a plan, and what each rank knows of the others from it."""

import gc
import weakref
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import Cell, Sizes
from spbench.bench.measure.engines.run_cell import run_cell
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.scenarios.choices import option_mistakes
from spbench.impls.axes import group_name, in_order, ranks_along, spelled, unused_axes
from spbench.impls.dispatchers.sent_tokens import dropped_tokens, positions_of, rows_of_ranks, sent_tokens
from spbench.impls.folding import folded_sizes, members
from spbench.impls.keyed_steps import Key, choosing_steps, keyed_steps
from spbench.impls.models.blocks.experts import call_of
from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.options import LARGEST, LARGEST_OF, wrong_values
from spbench.impls.place import Place
from spbench.impls.registries import model_preset
from spbench.impls.routing import RoutingPlan
from spbench.impls.strategies.base import Strategy, Unsupported
from spbench.impls.strategies.nesting import nesting
from tests.grid import tabled

NOTHING = "does nothing without {}; set that, or leave {} out"
SIZES = {"dp": 2, "pp": 2, "tp": 2, "sp": 3, "ep": 3, "etp": 2}


def test_folded_ranks_are_a_tensor_of_those_of_a_stage() -> None:
    """edp x ep x etp, the last fastest, over the numbers of the stage's ranks in the order of the mesh."""
    assert folded_sizes(SIZES) == {"edp": 2, "ep": 3, "etp": 2}
    whole = torch.arange(24).view(2, 2, 2, 3)  # dp, pp, tp, sp
    for pp in (0, 1):
        stage = whole[:, pp].flatten()
        for edp, ep, etp in product(range(2), range(3), range(2)):
            place = Place.of_rank(SIZES, int(stage.view(2, 3, 2)[edp, ep, etp]))
            assert (place.rank("edp"), place.rank("ep"), place.rank("etp")) == (edp, ep, etp)
            assert place.rank("ep", "etp") == place.rank("etp", "ep") == ep * 2 + etp
            assert place.stage_rank == edp * 6 + ep * 2 + etp
            assert place.members("edp") == stage.view(2, 3, 2)[:, ep, etp].tolist()
            assert place.members("ep", "etp") == stage.view(2, 6)[edp].tolist()
    assert (place.size("ep"), place.size("etp", "ep"), place.size("edp"), place.global_rank) == (3, 6, 2, 23)


def test_sizes_without_ep_have_one_rank_along_it() -> None:
    place = Place({"dp": 2, "sp": 2}, {"sp": 1})
    assert (place.size("ep"), place.size("edp"), place.rank("ep"), place.rank("edp")) == (1, 4, 0, 1)
    assert members(1, ["edp"], place.sizes) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="ep, dp: folded axes have no groups together with axes of the mesh"):
        place.size("ep", "dp")


def test_folded_axes_multiply_no_ranks() -> None:
    assert ranks_along(["dp", "sp"], SIZES) == 6
    assert group_name(["etp", "ep"], SIZES) == "ep_etp"
    assert group_name(["etp", "edp"], {"sp": 2, "ep": 2}) == ""
    assert unused_axes(["tp", "sp"], SIZES) == []
    assert in_order(SIZES, ["sp", "dp", "pp", "tp"]) == {"sp": 3, "dp": 2, "pp": 2, "tp": 2, "cp": 1} | {
        "ep": 3,
        "etp": 2,
    }
    assert spelled(SIZES) == "dp2xpp2xtp2xsp3·ep3xetp2"
    sizes = Sizes.model_validate({"dp": 2, "sp": 4, "ep": 8, "etp": 1})
    assert (sizes.world, str(sizes), sizes.by_axis["ep"]) == (8, "dp2xsp4·ep8", 8)
    assert Sizes.model_validate({"sp": 4, "ep": 1}).model_dump() == Sizes(sp=4).model_dump()


def sums_over_groups(mesh: DeviceMesh, sizes: dict[str, int]) -> tuple[dict[str, int], dict[str, str], int]:
    """The sum of global ranks over folded groups of this rank's, the names of the groups, and the ranks of
    the mesh along edp."""
    place, found = Place.on(mesh, sizes), {}
    for axes in (("ep",), ("etp",), ("edp",), ("ep", "etp")):
        x, group = torch.tensor(dist.get_rank()), place.group(*axes)
        assert group is place.group(*axes)
        if group is not None:
            assert (group.size(), group.rank()) == (place.size(*axes), place.rank(*axes))
            dist.all_reduce(x, group=group)
        found[" ".join(axes)] = int(x)
    along = place.submesh("edp")
    assert (along.size(), along.get_local_rank()) == (place.size("edp"), place.rank("edp"))
    dist.barrier()
    return found, place.flattened, along.size()


@pytest.mark.parametrize(
    ("sizes", "sums"),
    [
        ({"dp": 2, "sp": 2, "ep": 2}, {"ep": [1, 1, 5, 5], "edp": [2, 4, 2, 4], "ep etp": [1, 1, 5, 5]}),
        ({"pp": 2, "tp": 2, "ep": 2}, {"ep": [1, 1, 5, 5], "ep etp": [1, 1, 5, 5]}),
        ({"tp": 2, "pp": 2, "ep": 2}, {"ep": [2, 4, 2, 4], "ep etp": [2, 4, 2, 4]}),
        ({"sp": 4, "ep": 2, "etp": 2}, {"ep": [2, 4, 2, 4], "etp": [1, 1, 5, 5], "ep etp": [6] * 4}),
    ],
)
def test_groups_of_folded_axes(pool: RankPool, sizes: dict[str, int], sums: dict[str, list[int]]) -> None:
    for rank, (found, flattened, along) in enumerate(pool.run(sizes, sums_over_groups, sizes)):
        assert found == {axes: sums[axes][rank] if axes in sums else rank for axes in found}
        names = {group_name(axes.split(), sizes) for axes in sums}
        assert sorted({*flattened.values()}) == sorted(names)
        assert along == folded_sizes(sizes)["edp"]


@pytest.mark.parametrize("name", ["experts", "shared_inner", "dense_layers", "mtp_layers"])
def test_zero_switches_off_what_a_preset_has(name: str) -> None:
    model = model_preset("deepseek-v3")
    assert getattr(model, name)
    assert [*wrong_values(model, {name: 0})] == []


@pytest.mark.parametrize(
    ("name", "least", "most"), [("layers", 1, LARGEST_OF["layers"]), ("hidden", 1, LARGEST)]
)
def test_both_ends_are_allowed_and_nothing_beyond(name: str, least: int, most: int) -> None:
    model = model_preset("bert-tiny")
    assert not [*wrong_values(model, {name: least}), *wrong_values(model, {name: most})]
    assert [*wrong_values(model, {name: least - 1})] == [(name, f"must be at least {least}, not {least - 1}")]
    assert [*wrong_values(model, {name: most + 1})] == [(name, f"must be at most {most}, not {most + 1}")]


def ends(size: int, key: Key, backward_within: bool, kept: list[Tensor]) -> Iterator[int]:
    """The steps whose key is not that of the step before."""
    return (step for step in range(size) if step == 0 or key(step) != key(step - 1))


def test_a_choice_holds_within_its_context() -> None:
    def loop() -> list[int]:
        return list(keyed_steps(10, lambda step: step // 4))

    with choosing_steps(ends):
        assert loop() == [0, 4, 8]
        with choosing_steps(lambda size, *_: iter([size - 1])):
            assert loop() == [9]
        assert loop() == [0, 4, 8]
    assert loop() == list(range(10))


def test_a_failure_ends_the_choice_too() -> None:
    with pytest.raises(ZeroDivisionError), choosing_steps(ends):
        raise ZeroDivisionError
    assert list(keyed_steps(3, lambda step: 0)) == [0, 1, 2]


@tabled(__file__, "options_that_cannot_be_or_do_nothing_are_refused")
def test_options_that_cannot_be_or_do_nothing_are_refused(
    model: str, options: dict[str, Any], problem: str
) -> None:
    found = option_mistakes("model_options", model, options)
    assert [message for _, message in found] == ([problem] if problem else [])


@tabled(__file__, "one_refusal_names_all_that_mends_it")
def test_one_refusal_names_all_that_mends_it(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unsupported) as refused:
        run_cell(Cell.model_validate({"batch": 4, **settings}))
    assert str(refused.value) == reason


LENGTH, BATCH = 96, 3


def moe(**options: object) -> CausalTransformerModel:
    model = model_preset("moe-tiny", options)
    assert isinstance(model, CausalTransformerModel)
    return model


def planned(strategy: str, sizes: dict[str, int], rank: int = 0) -> Strategy:
    return nesting(strategy).configured(Place.of_rank(sizes, rank))


@pytest.mark.parametrize(("experts", "per_token"), [(12, 3), (8, 2), (160, 6), (128, 8), (5, 5), (1, 1)])
def test_even_routing_gives_each_expert_as_many_tokens(experts: int, per_token: int) -> None:
    plan = RoutingPlan("even", experts, per_token)
    chosen = plan.of_positions(2 * experts)
    assert all(len(set(row)) == per_token for row in chosen.tolist())
    assert plan.tokens(np.arange(2 * experts), 2 * experts, 3).tolist() == [6 * per_token] * experts


@pytest.mark.parametrize("stride", [2, 4, 8, 64])
@pytest.mark.parametrize(("experts", "per_token", "groups"), [(8, 2, 0), (64, 6, 8)])
def test_even_routing_is_even_for_a_rank_with_stripes(
    stride: int, experts: int, per_token: int, groups: int
) -> None:
    plan, length = RoutingPlan("even", experts, per_token, groups, groups // 4), stride * experts**2
    for first in {0, 1, stride - 1}:
        counts = plan.tokens(np.arange(first, length, stride), length, 1)
        assert counts.tolist() == [experts * per_token] * experts


def test_round_robin_gives_each_token_the_next_experts() -> None:
    plan = RoutingPlan("round_robin", 128, 8)
    chosen = plan.of_positions(256)
    assert chosen[[0, 1, 16]].tolist() == [[*range(8)], [*range(8, 16)], [*range(8)]]
    assert {*plan.tokens(np.arange(256), 256, 1)} == {16}
    # of 8 ranks with 16 experts each, a token meets one
    assert (chosen // 16 == chosen[:, :1] // 16).all()


def test_even_routing_keeps_to_groups() -> None:
    plan = RoutingPlan("even", 160, 6, groups=8, group_topk=3)
    chosen = plan.of_positions(320)
    assert all(len(set(row)) == 6 for row in chosen.tolist())
    assert {len({expert // 20 for expert in row}) for row in chosen.tolist()} == {3}
    assert set(plan.tokens(np.arange(320), 320, 1)) == {12}


def test_a_skew_is_drawn_once_and_for_all() -> None:
    one = RoutingPlan("zipf:1.2", 12, 3).of_positions(5000)
    assert np.array_equal(one, RoutingPlan("zipf:1.2:0", 12, 3).of_positions(5000))
    assert not np.array_equal(one, RoutingPlan("zipf:1.2:1", 12, 3).of_positions(5000))
    counts = np.sort(np.bincount(one.ravel()))[::-1]
    assert counts[0] > 3 * counts[-1]


def test_a_file_of_counts_is_met_in_proportion(tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    path.write_text("100, 50\n25,25")
    plan = RoutingPlan(str(path), 4, 1)
    counts = np.bincount(plan.of_positions(20_000).ravel(), minlength=4) / 20_000
    assert counts == pytest.approx([0.5, 0.25, 0.125, 0.125], abs=0.01)
    with pytest.raises(ValueError, match="has 4 counts; give one for each of 8 experts"):
        RoutingPlan(str(path), 8, 1)
    with pytest.raises(
        ValueError, match="routing is learned, even, round_robin, zipf:S or a file of counts, not 'zipff'"
    ):
        moe(routing="zipff")
    for routing in ("zipf:-1", "zipf:nan", "zipf:1.2.3"):
        with pytest.raises(ValueError, match=f"routing '{routing}' has no skew S of at least 0"):
            moe(routing=routing)


@pytest.mark.parametrize("strategy", ["ulysses", "ring_attention", "megatron_sp"])
def test_what_ranks_send_is_what_all_receive(strategy: str) -> None:
    axis = "tp" if strategy == "megatron_sp" else "sp"
    sizes, call = {"dp": 2, axis: 4, "ep": 4}, call_of(moe(routing="zipf:1.5"))
    rows = rows_of_ranks(call, planned(strategy, sizes), BATCH, LENGTH)
    assert rows.sum() == 2 * BATCH * LENGTH * 3
    for rank in range(8):
        each = planned(strategy, sizes, rank)
        sent = sent_tokens(call, each, BATCH, LENGTH)
        mine = slice(each.place.rank("ep") * 3, each.place.rank("ep") * 3 + 3)
        assert sent[:, mine].sum() == rows[rank]
        own = positions_of(each, each.place, LENGTH)
        assert sent[each.place.rank("ep")].tolist() == call.plan.tokens(own, LENGTH, BATCH).tolist()


def test_full_experts_drop_what_is_more_than_their_capacity() -> None:
    sizes = {"sp": 4, "ep": 4}
    even, skewed = (call_of(moe(routing=r, capacity=1.0)) for r in ("even", "zipf:1.5"))
    assert dropped_tokens(even, planned("ulysses", sizes), BATCH, LENGTH) == 0
    dropped = dropped_tokens(skewed, planned("ulysses", sizes), BATCH, LENGTH)
    rows = rows_of_ranks(skewed, planned("ulysses", sizes), BATCH, LENGTH)
    assert dropped == BATCH * LENGTH * 3 - rows.sum() > 0


def test_plans_that_are_kept_do_not_keep_the_strategy() -> None:
    """It holds the process groups of a job, and a rank runs thousands of jobs."""
    model = model_preset("moe-tiny")
    strategy = nesting("ulysses").configured(Place({"sp": 2}, {"sp": 0}), {})
    sent_tokens(call_of(model), strategy, 1, 24)
    held = weakref.ref(strategy)
    del strategy
    gc.collect()
    assert held() is None
