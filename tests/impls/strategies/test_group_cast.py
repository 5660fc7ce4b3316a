"""Keys and values only where they are needed, against a naive dispatcher that looks at each query and key."""

from itertools import product

import numpy as np
import pytest
import torch

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.plan import closed_form
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.verify.beside_values import seen_pairs
from spbench.impls.attended import CAUSAL, Attended
from spbench.impls.strategies.group_cast import GroupCastOptions
from spbench.impls.strategies.needed_rows import needed_rows
from spbench.impls.strategies.placements import intervals
from tests.cells import make_cell

LENGTH = 96
#: one text, short and long documents, windows within a rank and over several, and both
MASKS = [CAUSAL, Attended((7, 1, 30, 2, 41, 15)), Attended(window=5), Attended((50, 46), window=9)]
MASKS += [Attended(window=40)]


def naive(placement: str, size: int, attended: Attended) -> tuple[list[list[list[int]]], list[list[int]]]:
    """(the rows of each owner that each rank needs, the positions that each rank has): query by query."""
    held = [
        [position for run in runs.tolist() for position in range(*run)]
        for runs in intervals(placement, size, LENGTH // size, attended)
    ]
    seen = seen_pairs(attended, LENGTH)
    needed = [
        [
            [row for row, key in enumerate(keys) if any(bool(seen[query, key]) for query in queries)]
            for queries in held
        ]
        for keys in held
    ]
    return needed, held


@pytest.mark.parametrize("placement", GroupCastOptions.words["placement"])
@pytest.mark.parametrize("attended", MASKS, ids=str)
def test_needed_rows_are_those_of_a_naive_dispatcher(placement: str, attended: Attended) -> None:
    for size in (2, 4):
        truth, held = naive(placement, size, attended)
        needed, seen = needed_rows(placement, size, LENGTH // size, attended), seen_pairs(attended, LENGTH)
        for owner, rank in product(range(size), repeat=2):
            runs = needed.rows(owner, rank)
            assert [row for run in runs.tolist() for row in range(*run)] == truth[owner][rank]
            assert needed.count(owner, rank) == len(truth[owner][rank])
            assert (runs[1:, 0] > runs[:-1, 1]).all(), "two runs touch"
        for rank in range(size):
            assert truth[rank][rank] == [*range(LENGTH // size)]
            for owners in ((*range(size),), tuple(each for each in range(size) if each != rank)):
                keys = [held[owner][row] for owner in owners for row in truth[owner][rank]]
                met = np.zeros((LENGTH // size, len(keys)), bool)
                for each in needed.ranges(rank, owners):
                    i, j = np.mgrid[: each.queries, : each.keys]
                    part = met[each.first_query :, each.first_key :][: each.queries, : each.keys]
                    assert not part[(each.low <= j - i) & (j - i <= each.high)].any(), "a pair meets twice"
                    part |= (each.low <= j - i) & (j - i <= each.high)
                assert torch.equal(torch.from_numpy(met), seen[held[rank]][:, keys])


def cell(strategy: str, size: int, attended: Attended, options: dict[str, object]) -> Cell:
    return make_cell(
        *("attention-call-tiny", strategy, {"sp": size}, 2, LENGTH),
        model_options={"documents": attended.documents, "window": attended.window},
        strategy_options=options,
        training={"step": "inference"},
    )


@pytest.mark.parametrize(
    "options", [{}, {"placement": "zigzag", "stages": 2}, {"placement": "contiguous"}], ids=str
)
@pytest.mark.parametrize("attended", MASKS[::2], ids=str)
def test_bytes_are_those_of_the_needed_rows(attended: Attended, options: dict[str, object]) -> None:
    size, row = 4, 2 * 4 * (4 + 4) * 2  # of two samples, four heads, a key and a value, in bf16
    asked = cell("group_cast", size, attended, options)
    truth, _ = naive(str(options.get("placement", "by_work")), size, attended)
    sent = [
        sum(entry.count * entry.payload_bytes for entry in closed_form(asked, rank)) for rank in range(size)
    ]
    assert sent == [
        row * sum(len(rows) for rank, rows in enumerate(of_owner) if rank != owner)
        for owner, of_owner in enumerate(truth)
    ]
    gathered = closed_form(cell("all_gather_kv", size, CAUSAL, {}), 0)
    assert max(sent) <= sum(entry.sent_bytes(size) for entry in gathered)
    measured = VirtualEngine().measure(asked)
    assert measured.formula_difference == []
    assert sum(entry["sent_bytes"] for entry in measured.communication) == max(sent)
