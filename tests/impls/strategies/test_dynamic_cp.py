"""Groups of ranks for packed documents: Megatron-LM's printed examples, each token once, and the ranks'
messages and work."""

import pytest

from spbench.impls.attended import Attended
from spbench.impls.layout import Site, Unsupported
from spbench.impls.models.blocks.packing import distributions
from spbench.impls.place import Place
from spbench.impls.registries import model_preset, strategy_class
from spbench.impls.strategies.document_groups import RULES, GroupRule, Round, fewest_rounds, scheduled
from spbench.impls.strategies.dynamic_cp import DynamicCP
from spbench.impls.strategies.nesting import nesting
from tests.grid import tabled

#: the lengths of examples/training_features/long_context/README.md of NVIDIA-NeMo/Megatron-Bridge
TOY = (128, 96, 64, 48, 32, 24, 16, 8)
#: the lengths by which a page on Megatron-LM compares static groups with groups of a power of two
MIXED = (1024, 4096, 2048, 1024, 2048, 1024, 2048, 1024)


def by_rank(groups: Round) -> list[tuple[int, ...]]:
    """The numbers of each rank's documents."""
    return [group.documents for group in groups for _ in group.ranks]


def critical_work(rounds: tuple[Round, ...], lengths: tuple[int, ...]) -> float:
    """The work of the busiest rank of each round, summed."""
    return sum(
        max(sum(lengths[n] ** 2 / len(group.ranks) for n in group.documents) for group in groups)
        for groups in rounds
    )


def test_the_first_scheduler_gives_the_printed_example() -> None:
    """Megatron-Bridge prints for rank 3 of DP 2 x CP 2: sample_ids=[5, 6, 7], local_cp_size=1; and that only
    the samples longer than 64 need two ranks."""
    rule = GroupRule("buckets", 4, most_tokens=64)
    first, second = scheduled(rule, TOY)
    assert by_rank(first) == [(0,), (0,), (1,), (1,)]
    assert by_rank(second) == [(2,), (3,), (4,), (5, 6, 7)]
    assert [rule.needed(length) for length in TOY] == [2, 2, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("ranks", "most", "lengths", "expected"),
    [
        # tests/unit_tests of Megatron-LM: test_next_hdp_group_packing_aware_...
        (2, 4096, (6144, 2048), [[(0, 1), (0, 1)]]),
        (14, 100, (50, 50), [[(0, 1)] * 14]),
        (4, 2048, MIXED, [[(1,), (1,), (2,), (4,)], [(6,), (6,), (0, 3), (5, 7)]]),
    ],
)
def test_the_scheduler_of_today_gives_the_examples_of_its_tests(
    ranks: int, most: int, lengths: tuple[int, ...], expected: list[list[tuple[int, ...]]]
) -> None:
    rounds = scheduled(GroupRule("power_of_two", ranks, most), lengths)
    assert [by_rank(groups) for groups in rounds] == expected


def test_least_work_has_a_shorter_critical_path_than_static_groups() -> None:
    """13.11 million for three static rounds, 10.49 million for two of a power of two."""
    static = scheduled(GroupRule("static", 4, 2048, 2), MIXED)
    assert [by_rank(groups)[::2] for groups in static] == [[(0,), (1,)], [(2, 3), (4, 5)], [(6,), (7,)]]
    assert critical_work(static, MIXED) == pytest.approx(13.11e6, rel=1e-3)
    dynamic = scheduled(GroupRule("power_of_two", 4, 2048), MIXED)
    assert critical_work(dynamic, MIXED) == pytest.approx(10.49e6, rel=1e-3)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", sorted(distributions()))
@pytest.mark.parametrize(("ranks", "most"), [(8, 8192), (8, None), (6, 16384)])
def test_each_document_is_in_one_group_that_holds_it(
    rule: str, name: str, ranks: int, most: int | None
) -> None:
    lengths = model_preset("attention-call", {"documents": name}).attended(2**18).documents
    groups_of = GroupRule(rule, ranks, most or 1, ranks // 2 if rule == "static" else 1)
    if max(lengths) > (most or 2**18) * groups_of.sizes[-1]:
        with pytest.raises(Unsupported, match=r"exceeds groups of .*most_tokens to \d+ or more"):
            scheduled(groups_of, lengths)
        return
    rounds = scheduled(groups_of, lengths) if most else fewest_rounds(groups_of, lengths)
    numbers = [n for groups in rounds for group in groups for n in group.documents]
    assert sorted(numbers) == [*range(len(lengths))]
    for groups in rounds:
        assert [rank for group in groups for rank in group.ranks] == [*range(ranks)]
        for group in groups:
            tokens = sum(lengths[n] for n in group.documents) / len(group.ranks)
            assert most is None or tokens <= most
            assert group.documents or rule == "static"
    if most is None and rule != "buckets":
        assert len(rounds) == 1


@pytest.mark.parametrize("options", [{}, {"groups": "any_size"}, {"groups": "static", "least_ranks": 2}])
def test_ranks_share_out_positions_and_work_and_send_what_their_groups_gather(
    options: dict[str, str],
) -> None:
    attended = Attended((700, 90, 31, 200, 3))
    site = Site("causal_attention", 2, {"B": 3, "L": 1024, "Z": 4, "G": 2, "A": 8, "documents": 5})
    held, pairs = [], 0
    for rank in range(4):
        each = DynamicCP.configured(Place({"sp": 4}, {"sp": rank}), options)
        each.pack(attended)
        shares = each._held(1024)
        held += [n for share in shares for start, end in share.positions.tolist() for n in range(start, end)]
        pairs += each.attended_pairs(attended, 1024)
        assert each.outside(site).dims["L"] == sum(each._rows(1024))
        sent = sum(entry.sent_bytes(entry.group_size({"sp": 4})) for entry in each.communication([site], 2))
        # twice in bfloat16, once in float32: the other ranks' parts of 16 numbers a row and head
        rows = sum((share.size - 1) * share.rows for share in shares)
        assert sent == 2 * 3 * 2 * 16 * rows * (2 + 2 + 4)
    assert sorted(held) == [*range(1024)]
    assert pairs == attended.pairs([(0, 1024)]).sum()


def test_a_document_alone_is_on_all_ranks() -> None:
    each = strategy_class("dynamic_cp").planned(4, 1)
    assert each.attended_pairs(Attended(), 64) == 64 * 65 // 2 // 4


@tabled(__file__, "unlike_numbers_of_positions_are_refused_where_they_must_be_alike")
def test_unlike_numbers_of_positions_are_refused_where_they_must_be_alike(
    strategy: str, model: str, sizes: dict[str, int], message: str
) -> None:
    sites = model_preset(model, {"documents": (7, 1, 11, 5)}).sites(4, 24)
    with pytest.raises(Unsupported, match=message):
        nesting(strategy).configured(Place(sizes)).check(sites)


@pytest.mark.parametrize(
    ("name", "static", "dynamic"), [("magi-attention", 27, 24), ("uniform", 39, 31), ("at-the-cap", 32, 31)]
)
def test_rounds_of_a_batch(name: str, static: int, dynamic: int) -> None:
    """With most documents at the cap, static groups of 4 of 8 ranks need hardly more rounds than dynamic."""
    lengths = model_preset("attention-call", {"documents": name}).attended(60 * 2**15).documents
    lengths = tuple(min(length, 2**15) for length in lengths)
    assert len(scheduled(GroupRule("static", 8, 8192, 4), lengths)) == static
    assert len(scheduled(GroupRule("power_of_two", 8, 8192), lengths)) == dynamic
