"""The search beside brute force, on made-up times: estimates, off by a factor of the strategy, one of the
ranks along its axes and a little noise."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, cast

import pytest

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.measurement import Outcome
from spbench.bench.tools.choose import layout_search as module
from spbench.bench.tools.choose import ranking
from spbench.bench.tools.choose.asking import Task
from spbench.bench.tools.choose.candidates import SLOWER, Candidate, Candidates
from spbench.bench.tools.choose.estimates import Estimates
from spbench.bench.tools.choose.layout_search import BEST, Search
from spbench.bench.tools.choose.layouts import Refused
from spbench.bench.tools.choose.learned import SAME_STEP, Bounds, Learned, Waiting
from spbench.bench.tools.choose.question import Question
from spbench.bench.tools.choose.ranking import (
    TOSS,
    SearchResult,
    complexity,
    ranked,
    tie_limit,
)
from spbench.bench.tools.choose.references import BackendFigures, as_text
from spbench.impls.strategies.nesting import PLUS
from tests.slow import slow
from tests.tools.choose.questions import REFERENCES, SAVINGS, asked, measured

GIB = 2**30
SEEDS = range(2)
#: each layout that was looked at became one of these
BECAME = (
    "cannot be",
    SLOWER,
    "need too much by the estimate",
    "too slow by the estimate, or too large after traces of their strategy",
    "cannot be run",
    SAME_STEP,
    "traced with few layers",
)
#: strategies beside which a search of the others has some hundreds of layouts
LEFT_OUT = ("dsp", "lasp", "lasp2", "ring_self_attention", "megatron_sp")
BACKENDS = {
    '{"backend": "ddp"}': BackendFigures(20.0, 0.0, {"all_reduce": 2.0}, {}),
    '{"backend": "zero3"}': BackendFigures(0.0, 16.0, {}, {"all_gather": 4.0, "reduce_scatter": 2.0}),
}


@cache
def question() -> Question:
    settings = {"model_options.layers": 8}
    return asked(16, seq_len=4096, batch=32, without=LEFT_OUT, settings=settings)


@cache
def every() -> Sequence[Candidate]:
    estimates = Estimates(question().cell, question().gpus, REFERENCES, BACKENDS)
    return [*Candidates(question(), estimates, SAVINGS, Refused())]


@cache
def by_key() -> Mapping[str, Candidate]:
    return {candidate.cell(question().cell).key: candidate for candidate in every()}


class MadeUp:
    """In place of :class:`Asking`: what each look would find, by a seed. Cells that are no candidates cannot
    be run.

    Attributes:
        looks: the keys of the layouts that were looked at.
    """

    jobs = 2

    def __init__(self, seed: int, usable: float):
        self.seed, self.usable = seed, usable
        self.looks: set[str] = set()
        self._factors: dict[tuple[object, ...], float] = {}

    def factor(self, spread: float, *of: object) -> float:
        if of not in self._factors:
            self._factors[of] = 1.0 + spread * random.Random(f"{self.seed} {of}").uniform(-1, 1)
        return self._factors[of]

    def seconds(self, candidate: Candidate) -> float:
        way = str(candidate.layout.way)
        # a strategy of several is off as the slowest of its parts, and by a little of its own
        parts = [self.factor(0.25, part) for part in candidate.strategy.split(PLUS)]
        off = max(parts) * self.factor(0.05, candidate.strategy) * self.factor(0.03, way)
        noise = self.factor(0.005, way, candidate.estimated_s)
        return candidate.estimated_s * off * noise

    def nbytes(self, candidate: Candidate) -> float:
        off = self.factor(0.08, "bytes", candidate.strategy)
        off *= self.factor(0.01, "bytes", str(candidate.layout.way), as_text(candidate.training))
        return candidate.estimated_bytes * off

    def __call__(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Outcome]]:
        for task in tasks:
            self.looks.add(task.cell.key)
            candidate = by_key().get(task.cell.key)
            if candidate is None:
                yield task, Outcome("unsupported", "no candidate")
                continue
            seconds, nbytes = self.seconds(candidate), int(self.nbytes(candidate))
            measurement = measured(seconds, nbytes, int(self.usable))
            yield task, Outcome(measurement["status"], measurement=measurement)


def searched(answers: MadeUp, monkeypatch: pytest.MonkeyPatch, toss: float = 1.0) -> SearchResult:
    """What a search finds by these answers; its estimates are those of the candidates.

    Args:
        toss: 1.0: of each strategy and mesh the fastest, not the simplest that is as fast but for a toss.
    """
    monkeypatch.setattr(ranking, "TOSS", toss)
    monkeypatch.setattr(module, "references", lambda *given: (REFERENCES, BACKENDS))
    monkeypatch.setattr(module, "savings_of", lambda question: SAVINGS)
    monkeypatch.setattr(module.candidates, "Candidates", lambda *given, **named: every())
    made = Search(question(), answers)  # type: ignore[arg-type]
    made.usable = made.most_bytes = answers.usable
    made.too_large = module.candidates.FAR_TOO_LARGE * answers.usable
    return made.run()


def brute_force(answers: MadeUp) -> list[float]:
    """The times of all layouts that fit, the shortest first; of each strategy and mesh one."""
    best: dict[tuple[str, str], float] = {}
    for candidate in every():
        if answers.nbytes(candidate) <= answers.usable:
            kind = candidate.strategy, str(candidate.layout.sizes)
            best[kind] = min(best.get(kind, float("inf")), answers.seconds(candidate))
    return sorted(best.values())


@pytest.mark.parametrize(
    ("usable", "seeds"),
    [(24 * GIB, SEEDS), slow(80 * GIB, SEEDS), *(slow(n * GIB, range(30)) for n in (16, 40, 80))],
)
def test_the_winner_is_that_of_brute_force(
    usable: float, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(every()) > 600
    for seed in seeds:
        answers = MadeUp(seed, usable)
        found, best = searched(answers, monkeypatch), brute_force(answers)
        assert found.best[0].step_s <= 1.01 * best[0], seed
        assert found.best[0].depth == "all_layers"
        times = [seen.step_s for seen in found.best]
        assert times == sorted(times)
        assert len(answers.looks) < len(every()) / 4
        assert 0 <= found.counts["looked at"] - len(every()) < 10  # single changes of the best
        assert found.counts["looked at"] == sum(found.counts[what] for what in BECAME)
        assert all(seen.peak <= usable for seen in found.best)


def test_a_naive_bound_would_lose_the_winner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail: with a bound above the truth the search passes over the winner."""
    answers = MadeUp(1, 80 * GIB)
    best = brute_force(answers)[0]

    def lost() -> float:
        return searched(answers, monkeypatch).best[0].step_s / best - 1

    assert lost() < 0.002
    plain = Learned.bounds

    def naive(self: Learned, waiting: Waiting) -> Bounds:
        return plain(self, waiting)._replace(least_s=waiting.estimated_s * 1.3)

    monkeypatch.setattr(Learned, "bounds", naive)
    assert lost() > 0.005


class SimpleSlower(MadeUp):
    """As :class:`MadeUp`, where strategies alone take a little longer than those around each other."""

    def seconds(self, candidate: Candidate) -> float:
        alone = 1.5 if candidate.strategy == "single" else 1.09
        return super().seconds(candidate) * (1.0 if PLUS in candidate.strategy else alone)


def test_no_tie_is_simpler_than_the_layout_that_is_named_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """No layout is, also none of those that were not traced."""
    for seed in range(3):
        answers = SimpleSlower(seed, 80 * GIB)
        best = searched(answers, monkeypatch, TOSS).best
        named = ranked(best)[0]
        assert named.depth == "all_layers"
        ties = [
            each.cell(question().cell)
            for each in every()
            if answers.nbytes(each) <= answers.usable / 1.1
            and answers.seconds(each) <= 0.97 * best[0].step_s * tie_limit(best)
        ]
        assert complexity(named.cell)[:2] <= min(complexity(cell)[:2] for cell in ties), seed


def test_simpler_layouts_that_may_tie_are_looked_at_though_none_is_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where only nested strategies were traced, a strategy alone that takes 9% longer is named first."""
    answers = SimpleSlower(0, 80 * GIB)

    def nested_alone(self: Search, waiting: Waiting) -> None:
        nested = [c for c in every() if PLUS in c.strategy and answers.nbytes(c) <= answers.usable]
        self._look(sorted(nested, key=answers.seconds)[:8])

    monkeypatch.setattr(Search, "_few_layers", nested_alone)
    named = ranked(searched(answers, monkeypatch, TOSS).best)[0]
    assert complexity(named.cell)[0] - len(question().cell.model_options) == 1


def test_where_nothing_fits_the_nearest_is_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = MadeUp(0, GIB / 64)
    found = searched(answers, monkeypatch)
    assert found.best == found.of_strategies == []
    assert found.nearest is not None
    least = min(answers.nbytes(candidate) for candidate in every())
    assert found.nearest.peak <= 1.1 * least
    assert found.nearest.peak == min(seen.peak for seen in found.traced)


@pytest.mark.parametrize("status", ["failed", "mismatch"])
def test_a_fault_of_a_worker_is_no_answer(status: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = [Outcome(status, "planted")]
    monkeypatch.setattr(MadeUp, "__call__", lambda self, tasks: zip(tasks, outcomes, strict=False))
    with pytest.raises(RuntimeError if status == "failed" else UserError, match="planted"):
        searched(MadeUp(0, 80 * GIB), monkeypatch)


class Refusing(MadeUp):
    """As :class:`MadeUp`, where looks that a function chooses cannot be run."""

    def __init__(self, refused: Callable[[Cell, str], bool]):
        super().__init__(0, 80 * GIB)
        self.refused = refused

    def __call__(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Outcome]]:
        for task, outcome in super().__call__(tasks):
            depth = cast(Any, task.run).keywords["depth"]
            yield task, Outcome("unsupported", "planted") if self.refused(task.cell, depth) else outcome


def test_what_cannot_be_run_with_all_layers_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    best = searched(MadeUp(0, 80 * GIB), monkeypatch).best[0].cell.key
    refusing = Refusing(lambda cell, depth: depth == "all_layers" and cell.key == best)
    found = searched(refusing, monkeypatch)
    assert best not in {seen.cell.key for seen in found.traced}
    assert len(found.best) >= BEST


def test_what_cannot_be_run_is_counted_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    found = searched(Refusing(lambda cell, _: cell.strategy == "ring_attention"), monkeypatch)
    assert found.counts["cannot be run"] > 0
    assert "planted" in found.refused.values()
    assert "ring_attention" not in {seen.cell.strategy for seen in found.traced}


def test_an_update_on_the_host_has_its_price() -> None:
    """On 16 GPUs of two nodes: half of each parameter's 28 bytes on each node's cores, and of the copies a
    rank's part."""
    ours = Estimates(question().cell, question().gpus, REFERENCES, BACKENDS)
    host = {name: replace(each, host_bytes=16.0) for name, each in BACKENDS.items()}
    theirs = Estimates(question().cell, question().gpus, REFERENCES, host)
    text = '{"backend": "zero3"}'
    candidate = next(c for c in every() if (c.strategy, c.layout.dp) == ("single", 16))
    way = ours.figures(candidate.layout.way, candidate.options)
    place = list(BACKENDS).index(text)
    layouts = [candidate.layout]
    seconds = [e.times(layouts, way, e.computing(layouts, way))[0, place, 0] for e in (ours, theirs)]
    elements = way.elements.ends + way.elements.layer * 8
    memory = load_cluster(question().cell.cluster).host_memory
    cores, link = memory.update_bytes_per_s.value, memory.bytes_per_s
    assert cores is not None
    assert link is not None
    nodes = 16 // load_cluster(question().cell.cluster).devices_per_node
    expected = 28 * elements / nodes / cores + 8 * elements / 16 / link
    assert seconds[1] - seconds[0] == pytest.approx(expected)
