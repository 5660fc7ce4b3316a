"""Changes of a cell that does not fit, with made-up memory: pairs where no single one is enough."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.measure.trace.memory_log import MemoryLog
from spbench.bench.measurement import Outcome
from spbench.bench.tools.fit.anatomy import ANATOMY, anatomy
from spbench.bench.tools.fit.asking import Task
from spbench.bench.tools.fit.fit_verdict import Verdict
from spbench.bench.tools.fit.proofs import ENOUGH, MOST, MOST_PAIRS, Proofs, prove
from spbench.bench.tools.fit.suggestions import both, pairs, single_changes
from tests.tools.fit.test_suggestions import cell

GIB = 2**30
#: of the card, and of the cell as it is
USABLE, NOW = 40 * GIB, 100 * GIB


class Made:
    """In place of :class:`Asking`: cells need what a function says."""

    def __init__(self, needs: Callable[[Cell], float]):
        self.needs, self.asked = needs, 0

    def __call__(
        self, tasks: Sequence[Task], enough: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[Task, Outcome]]:
        for task in tasks:
            if enough():
                return
            self.asked += 1
            needed = round(self.needs(task.cell))
            measured = {"peak_memory_bytes": needed, "usable_memory_bytes": USABLE, "step_time_s": 1.0}
            yield task, Outcome("ok" if needed <= USABLE else "oom", measurement=measured)


def proved(needs: Callable[[Cell], float], states: int = 2**30, most: int = MOST) -> tuple[Proofs, Made]:
    asked = cell(sizes={"dp": 8, "sp": 1}, strategy="single", training={"backend": "ddp"}, cluster="l40s")
    taken_apart = replace(
        anatomy(MemoryLog([states], [1])), held={"optimizer_state": states}, least_usable_bytes=NOW
    )
    meters = {ANATOMY: asdict(taken_apart)}
    before = Verdict(asked, {"usable_memory_bytes": USABLE, "step_time_s": 1.0, "meters": meters})
    asking: Any = Made(needs)
    return prove(before, asking, most), asking


def settings_of(found: Proofs) -> list[Mapping[str, Any]]:
    return [each.change.settings for each in found.fitting if each.change]


def shares(recompute: float, zero3: float) -> Callable[[Cell], float]:
    def needs(each: Cell) -> float:
        share = recompute if each.model_options.get("recompute") == "full" else 1.0
        return NOW * share * (zero3 if each.training.backend == "zero3" else 1.0)

    return needs


def test_where_no_single_change_is_enough_pairs_are_tried() -> None:
    found, asking = proved(shares(0.6, 0.5))
    settings = settings_of(found)[0]
    assert settings["model_options.recompute"] == "full"
    assert settings["training.backend"] == "zero3"
    for each in found.fitting:
        assert each.memory.spare_bytes >= 0
    assert 0 < found.pairs_tried <= MOST_PAIRS
    assert asking.asked == found.tried + found.pairs_tried


def test_where_a_single_change_is_enough_no_pair_is() -> None:
    def needs(each: Cell) -> float:
        return NOW * (0.3 if each.strategy == "ulysses" else 0.9)

    found, _ = proved(needs)
    assert found.pairs_tried == 0
    assert {each["strategy"] for each in settings_of(found)} == {"ulysses"}


def test_as_many_as_are_asked_for_are_enough() -> None:
    found, asking = proved(lambda each: NOW * 0.3, most=ENOUGH)
    assert len(found.fitting) == found.tried == asking.asked == ENOUGH


def test_switches_of_the_model_are_not_tried_where_its_states_alone_are_too_large() -> None:
    def needs(each: Cell) -> float:
        return NOW * (0.3 if each.strategy == "ulysses" else 0.9)

    found, asking = proved(needs, states=USABLE + 1)
    whole, asking_of_all = proved(needs, states=USABLE)
    assert settings_of(found) == settings_of(whole) != []
    assert asking.asked < asking_of_all.asked
    # where pairs follow, it must be known what each takes off
    found, asking = proved(shares(0.6, 0.5), states=USABLE + 1)
    assert found.fitting
    assert asking.asked == proved(shares(0.6, 0.5))[1].asked


def test_where_no_strategy_is_enough_alone_pairs_with_one_are_tried() -> None:
    def needs(each: Cell) -> float:
        return (
            shares(0.3, 0.9)(each) if each.strategy == "single" else 0.8 * NOW * shares(0.45, 1.0)(each) / NOW
        )

    found, _ = proved(needs)
    assert found.pairs_tried
    divided = [each for each in settings_of(found) if "strategy" in each]
    assert 0 < len(divided) < len(found.fitting)
    assert all(each["model_options.recompute"] == "full" for each in divided)


def test_where_no_pair_can_be_enough_the_few_nearest_are_tried() -> None:
    found, _ = proved(shares(0.9, 0.8))
    assert not found.fitting
    assert found.pairs_tried <= ENOUGH
    assert found.closest is not None
    assert found.closest.memory.total_bytes == round(NOW * 0.9 * 0.8)


def test_strategies_that_divide_a_sequence_are_among_the_changes() -> None:
    made = [
        each.settings for each in single_changes(cell(sizes={"dp": 16}, strategy="single", cluster="l40s"))
    ]
    named = {each["strategy"] for each in made if "strategy" in each}
    assert {"ulysses", "ring_attention", "megatron_sp"} <= named
    of_ulysses = [each for each in made if each.get("strategy") == "ulysses"]
    assert [each["sizes.sp"] * each["sizes.dp"] for each in of_ulysses] == [16, 16]
    divided = [each for each in single_changes(cell(sizes={"sp": 2})) if "strategy" in each.settings]
    assert not divided


def test_pairs_are_of_different_things() -> None:
    single = single_changes(cell(sizes={"dp": 8}, strategy="single", training={"backend": "ddp"}))
    for one, other in pairs(single):
        settings = both(one, other).settings
        assert len(settings) == len(one.settings) + len(other.settings)
        assert {one.other_job, other.other_job} == {False}
