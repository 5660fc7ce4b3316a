"""Strategies that take the same steps: one of them stands for both, and only then."""

from __future__ import annotations

import pytest

from spbench.bench.measurement import Outcome
from spbench.bench.tools.advise.candidates import Candidate
from spbench.bench.tools.advise.layouts import Layout, Way
from spbench.bench.tools.advise.learned import Waiting
from spbench.bench.tools.advise.looked_at import SameSteps
from spbench.bench.tools.advise.ranking import Seen
from tests.tools.advise.questions import asked


def candidate(strategy: str, **axes: int) -> Candidate:
    layout = Layout(Way(strategy, axes), dp=4, pp=1, micro_batch=1)
    return Candidate(layout, {}, {"backend": "zero3"}, {}, "zero3", "", 1.0, 2.0, 1.0)


def same(second: float = 1.0, nbytes: float = 2.0) -> SameSteps:
    """What two strategies on two meshes teach, where one differs on the second."""
    steps = SameSteps()
    for axes, took, held in (({"tp": 2}, 1.0, 2.0), ({"tp": 4}, second, nbytes)):
        steps.add(candidate("megatron_sp", **axes), 1.0, 2.0)
        steps.add(candidate("odysseus", **axes), took, held)
    return steps


def test_two_meshes_alike_make_one_strategy_stand_for_both() -> None:
    steps = same(second=1.0005)
    assert steps.replaced == {"odysseus": "megatron_sp"}
    assert steps.instead("odysseus+ulysses") == "megatron_sp+ulysses"
    assert steps.instead("megatron_sp+ulysses") == "megatron_sp+ulysses"


@pytest.mark.parametrize(("second", "nbytes"), [(1.01, 2.0), (1.0, 2.02)])
def test_other_seconds_or_bytes_are_another_step(second: float, nbytes: float) -> None:
    assert same(second, nbytes).replaced == {}


def test_one_mesh_is_not_enough_and_one_difference_ends_it() -> None:
    steps = SameSteps()
    steps.add(candidate("megatron_sp", tp=2), 1.0, 2.0)
    steps.add(candidate("odysseus", tp=2), 1.0, 2.0)
    assert steps.replaced == {}
    steps = same()
    steps.add(candidate("megatron_sp", tp=8), 1.0, 2.0)
    steps.add(candidate("odysseus", tp=8), 1.1, 2.0)
    assert steps.replaced == {}


def test_strategies_that_differ_in_two_parts_teach_nothing() -> None:
    steps = SameSteps()
    for sp in (2, 4):
        steps.add(candidate("megatron_sp+ulysses", tp=2, sp=sp), 1.0, 2.0)
        steps.add(candidate("odysseus+ring_attention", tp=2, sp=sp), 1.0, 2.0)
    assert steps.replaced == {}


def test_candidates_of_the_other_strategy_wait_no_longer() -> None:
    steps = same()
    waiting = Waiting([candidate(name, tp=2) for name in ("megatron_sp", "odysseus", "odysseus", "ulysses")])
    waiting.take([1])
    assert waiting.leave_out(lambda strategy: steps.instead(strategy) != strategy) == 1
    assert waiting.left.tolist() == [True, False, False, True]


def test_a_layout_is_named_by_one_of_both_strategies() -> None:
    cell = asked(4).cell
    outcome = Outcome("ok", measurement={"step_time_s": 1.0, "peak_memory_bytes": 2})
    cells = [
        cell.model_copy(update={"strategy": name, "sizes": cell.sizes.model_copy(update={"tp": tp})})
        for name, tp in (("megatron_sp", 2), ("odysseus", 2), ("odysseus", 4))
    ]
    kept = same().without([Seen(each, outcome, "few_layers") for each in cells])
    assert [(each.cell.strategy, each.cell.sizes.tp) for each in kept] == [
        ("megatron_sp", 2),
        ("odysseus", 4),
    ]
