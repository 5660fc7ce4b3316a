"""Where tokens go by a plan, and what each rank knows of the others from it."""

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest

from spbench.impls.dispatchers.sent_tokens import dropped_tokens, positions_of, rows_of_ranks, sent_tokens
from spbench.impls.models.blocks.experts import call_of
from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.models.model import model_preset
from spbench.impls.place import Place
from spbench.impls.routing import RoutingPlan
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.nesting import nesting

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
