"""The turns of a rank of an interleaved pipeline: which of them repeat, and which another rank has too."""

from __future__ import annotations

from collections import Counter
from itertools import chain, product

import pytest

from spbench.bench.measure.engines.interleaved_turns import InterleavedTurns
from spbench.bench.measure.engines.plan import plan
from spbench.bench.measure.engines.tracing import trace
from spbench.bench.measure.engines.turn_parts import put_together
from spbench.impls.training.turns import Turns
from tests.measure.engines.short_cut_cells import staged
from tests.measure.trace.same_traces import differences

CASES = [
    Turns(rank, ranks, chunks, micro_batches, group)
    for (ranks, group), chunks, micro_batches in product([(2, None), (4, None), (3, 5)], [2, 3, 4], [20, 30])
    for rank in range(ranks)
]


@pytest.mark.parametrize("turns", CASES, ids=repr)
def test_periods_repeat_but_for_the_micro_batches(turns: Turns) -> None:
    """Each does the same with the next group of micro-batches; what is left over is less than two more."""
    edges = [turns.ahead + i * turns.period for i in range(turns.periods + 1)]
    first = [*turns.alternating(range(turns.ahead, turns.ahead + turns.period))]
    for start in edges[:-1]:
        later = [*turns.alternating(range(start, start + turns.period))]
        by = start - turns.ahead
        assert later == [(name, number + by) for name, number in first]
        for action, number in later:
            order = turns.forwards if action in ("forward", "pass_on") else turns.backwards
            if number >= turns.period:
                before = order[number - turns.period]
                assert order[number] == before._replace(micro_batch=before.micro_batch + turns.group)
            assert action == "free" or (turns.received(action, number) is None) == (
                turns.received(action, number % turns.period + turns.period) is None
            )
    assert len(turns) - edges[-1] <= 2 * turns.period


@pytest.mark.parametrize("turns", CASES, ids=repr)
def test_every_turn_is_taken_once(turns: Turns) -> None:
    parts = turns.warm_up(), turns.alternating(range(turns.ahead, len(turns))), turns.cool_down()
    taken = Counter(chain(*parts))
    assert {*taken.values()} == {1}
    for action in ("forward", "backward"):
        assert sum(name == action for name, _ in taken) == len(turns)


@pytest.mark.parametrize("chunks", [2, 3, 5])
@pytest.mark.parametrize("rank", range(8))
def test_each_action_is_a_copy_of_one_of_a_short_step(chunks: int, rank: int) -> None:
    """One of the same name, through the same chunk, with as many phases; the first and the last micro-batch
    of a backward are copies of such ones."""
    whole = InterleavedTurns(Turns(rank, 8, chunks, 64))
    short = next(whole.shorter())
    assert 5 * len(short) < 2 * len(whole)
    for place, (name, number) in enumerate(whole.actions):
        like = whole.like(place, short)
        other = short.actions[like]
        assert other[0] == name
        assert whole.phases(place) == short.phases(like)
        if number >= 0:
            turns = "backwards" if "back" in name else "forwards"
            mine, theirs = (getattr(each.of, turns)[n] for each, n in ((whole, number), (short, other[1])))
            assert mine.chunk == theirs.chunk
            assert (mine.micro_batch == 0) == (theirs.micro_batch == 0)
            if name == "backward":
                last = [
                    each.micro_batch == n - 1 for each, n in ((mine, 64), (theirs, short.of.micro_batches))
                ]
                assert last[0] == last[1]


def test_a_step_that_is_short_is_run_whole() -> None:
    for turns in (Turns(1, 4, 2, 8), Turns(1, 4, 2, 64, 6), Turns(1, 4, 2, 64, overlapped=True)):
        assert not [*InterleavedTurns(turns).shorter()]


SHORTENED = [*((4, 2, rank, "legacy_ddp") for rank in (0, 2, 3)), (6, 4, 3, "megatron")]


@pytest.mark.parametrize(("ranks", "chunks", "rank", "backend"), SHORTENED)
def test_a_rank_is_put_together_from_a_short_step(ranks: int, chunks: int, rank: int, backend: str) -> None:
    """The first rank, one between, and the last, whose losses live to the end of the step; and one of which
    the shortest step has a forward next to the backward that it comes two after here."""
    training = {"schedule": "interleaved", "virtual_stages": chunks, "backend": backend}
    sizes, count = {"pp": ranks, "tp": 2}, 4 * ranks
    layers = {"layers": ranks * chunks}
    cell = staged(count, batch=count, model_options=layers, sizes=sizes, training=training)
    turns, first = (
        InterleavedTurns(Turns(rank, ranks, chunks, count), backend == "megatron"),
        plan(cell).classes[rank].first,
    )
    short = next(turns.shorter())
    together = put_together(trace(cell, first, events=True, turns=short.run), short, turns)
    assert differences(together, trace(cell, first, events=True)) == []
