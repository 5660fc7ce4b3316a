"""What a search knows of candidates that were not traced: what cannot win is left out, and nothing else. Also
strategies that take the same steps: one of them stands for both, and only then."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from spbench.bench.measurement import Outcome
from spbench.bench.tools.choose.candidates import Candidate, candidates, undominated
from spbench.bench.tools.choose.estimates import Estimates
from spbench.bench.tools.choose.layouts import Layout, Refused, Way, backend_settings
from spbench.bench.tools.choose.learned import Learned
from spbench.bench.tools.choose.question import Question
from spbench.bench.tools.choose.ranking import SameSteps, Seen
from spbench.bench.tools.choose.references import BackendFigures, Depths, as_text, has_stages
from tests.tools.choose.questions import REFERENCES, SAVINGS, asked


def of(question: Question, usable: float = 0.0) -> Sequence[Candidate]:
    figures = {
        as_text(each): BackendFigures(
            2.0, 14.0, {}, {"all_gather": 4.0, "reduce_scatter": 2.0}, 12.0 if "optimizer" in each else 0.0
        )
        for each in backend_settings(question)
    }
    estimates = Estimates(question.cell, question.gpus, REFERENCES, figures)
    return [*candidates(question, estimates, SAVINGS, Refused(), usable)]


def kinds(some: Sequence[Candidate]) -> set[tuple[object, ...]]:
    return {(c.layout, as_text(c.training), c.saving_text) for c in some}


def test_the_host_is_looked_at_only_where_the_cards_may_be_too_small() -> None:
    """Where two layouts differ in the host alone, the one without it is never slower."""
    question = asked(8, only=["ulysses", "zero3"])
    small, large = of(question, usable=0.0), of(question, usable=1e15)
    on_host = [c for c in small if c.twin is not None]
    assert len(on_host) > 4
    assert {as_text(c.twin or {}) for c in on_host} == {'{"backend": "zero3"}'}
    assert [c for c in large if c.twin is None]
    assert not [c for c in large if c.twin is not None]
    for candidate in on_host:
        twin = next(
            c
            for c in small
            if c.training == candidate.twin and (c.layout, c.saving) == (candidate.layout, candidate.saving)
        )
        assert twin.estimated_s <= candidate.estimated_s
    assert kinds(large) < kinds(small)


def test_bytes_are_within_the_bounds_whatever_is_traced() -> None:
    """Steps take what was foreseen of states, and of activations a share more, with buffers that are the same
    for all ranks."""
    every = of(
        asked(16, seq_len=4096, batch=32, only=["ulysses", "upipe", "tensor_parallel", "ddp", "zero3"])
    )
    for seed in range(4):
        chance = random.Random(seed)
        share = {c.strategy: chance.uniform(1.0, 1.1) for c in every}
        buffers = {c.strategy: chance.uniform(0.0, 8e8) for c in every}

        def true(c: Candidate, share: dict[str, float] = share, buffers: dict[str, float] = buffers) -> float:
            states = c.estimated_bytes - c.activation_bytes
            return states + share[c.strategy] * c.activation_bytes + buffers[c.strategy]

        learned = Learned(every)
        unknown = learned.bounds()
        for at in chance.sample(range(len(every)), 12):
            learned.add(at, every[at].estimated_s, true(every[at]))
        bounds = learned.bounds()
        known = [at for at, c in enumerate(every) if learned.knows(c.strategy)]
        assert len(known) > 100
        for at in known:
            least, most = bounds.least_bytes[at], bounds.most_bytes[at]
            assert least <= true(every[at]) <= most, (seed, every[at])
        # and they are of use: without a trace both are farther off
        assert np.mean(bounds.least_bytes[known]) > np.mean(unknown.least_bytes[known])
        assert np.mean(bounds.most_bytes[known]) < np.mean(unknown.most_bytes[known])


def learned_of(every: Sequence[Candidate], traced: Mapping[int, float]) -> Learned:
    """What traces of candidates at these places say, whose steps take so many times their estimates."""
    learned = Learned(every)
    for at, times in traced.items():
        learned.add(at, times * every[at].estimated_s, 1.0)
    return learned


def least(learned: Learned, at: int) -> float:
    """The least seconds of the candidate at a place, over its estimate."""
    return float(learned.bounds().least_s[at] / learned.candidates[at].estimated_s)


def test_the_less_a_candidate_is_like_the_traced_one_the_less_is_known() -> None:
    """Another backend, another size of micro-batches, or more ranks leave more room each."""
    every = of(asked(8, batch=8, only=["ulysses", "ddp", "zero3"]))

    def place(ranks: int, size: int, backend: str) -> int:
        wanted = ({"sp": ranks}, 1, size, f'{{"backend": "{backend}"}}', "")
        return next(
            at
            for at, c in enumerate(every)
            if (c.layout.way.axes, c.layout.pp, c.layout.micro_batch, c.training_text, c.saving_text)
            == wanted
        )

    alike = place(2, 1, "zero3"), place(2, 1, "ddp"), place(4, 1, "ddp"), place(4, 2, "ddp")
    learned = learned_of(every, {alike[0]: 1.0})
    bounds = [least(learned, at) for at in alike]
    assert 0.95 < bounds[0] < 1
    assert bounds == sorted(bounds, reverse=True)
    assert len({*bounds}) == 4
    assert least(learned_of(every, {}), alike[3]) == pytest.approx(1 / 1.35)


def test_margins_shrink_as_traces_are_what_was_expected() -> None:
    every = of(asked(16, seq_len=4096, batch=32, only=["ulysses", "ddp", "zero3"]))
    margins = []
    for off in (0.0, 0.3):
        bounds = learned_of(every, {at: 1.1 + off * (at % 4) for at in range(0, 60, 2)}).bounds()
        margins.append(bounds.expected_s[61] / bounds.least_s[61])
    assert 1 < margins[0] < margins[1] / 1.05


def test_a_strategy_of_traced_parts_takes_hardly_less_than_the_slower_one() -> None:
    every = of(asked(16, only=["ulysses", "ring_attention", "ulysses+ring_attention", "zero3"]))
    first = {c.strategy: at for at, c in reversed([*enumerate(every)])}
    traced: dict[int, float] = {}
    for strategy, times, bound in (("ulysses", 1.0, 1 / 1.6), ("ring_attention", 1.5, 1.5 / 1.15)):
        traced[first[strategy]] = times
        assert bound <= least(learned_of(every, traced), first["ulysses+ring_attention"]) <= times


def test_what_each_micro_batch_takes_may_shrink_with_their_number() -> None:
    """Where the host bounds the step of micro-batches of 1, four times as large ones may take a fourth; where
    two sizes of one way were traced, others follow these."""
    every = of(asked(8, batch=8, only=["tensor_parallel", "zero3"]))
    of_size = {
        c.layout.micro_batch: at
        for at, c in enumerate(every)
        if c.layout.way.axes == {"tp": 4} and c.layout.pp == 1
    }
    one = learned_of(every, {of_size[1]: 4.0})
    assert least(one, of_size[1]) > 3.5
    assert least(one, of_size[4]) < 1 + 3 / 4
    two = learned_of(every, {of_size[1]: 4.0, of_size[2]: 2.5})
    expected = [each.bounds().expected_s[of_size[4]] for each in (one, two)]
    assert expected[1] < 0.8 * expected[0]


def test_of_settings_as_fast_the_simplest_that_surely_fits_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inputs of layers that wait on the host cost nothing where their copies hide, and are of no use where
    there is room."""
    text = '{"recompute": "full", "checkpoints": "host"}'
    as_fast = {text: replace(REFERENCES['{"recompute": "full"}'], activation_bytes=Depths(1e9, 1e9))}
    monkeypatch.setitem(SAVINGS, text, {"recompute": "full", "checkpoints": "host"})
    monkeypatch.setitem(REFERENCES, text, as_fast[text])
    monkeypatch.delitem(REFERENCES, "")
    question = asked(8, only=["ulysses", "zero3"], fixed=[("training.optimizer", "device")])
    small, large = of(question, usable=0.0), of(question, usable=1e15)
    assert len([c for c in small if "checkpoints" in c.saving]) == len(small) / 2
    assert [c for c in large if "checkpoints" in c.saving] == []
    assert len(large) == len(small) / 2


@pytest.mark.parametrize(
    ("times", "nbytes", "slack", "kept"),
    [
        ([1.0, 1.2, 0.9], [1, 1, 1], 1.0, [2]),
        ([0.5, 1.0, 1.1, 1.3], [2, 1, 1, 1], 1.0, [0, 1]),  # the first needs more
        ([0.5, 1.0, 1.1, 1.3], [2, 1, 1, 1], 1.1, [0, 1, 2]),
        ([1.0, np.inf, np.inf], [2, 1, 3], 1.1, [0]),
        ([np.inf, np.inf], [1, 1], 1.1, []),
    ],
)
def test_what_takes_longer_and_needs_no_fewer_bytes_is_left_out(
    times: list[float], nbytes: list[float], slack: float, kept: list[int]
) -> None:
    found = undominated(np.array([times] * 2), np.array([nbytes] * 2), slack)
    assert [np.flatnonzero(row).tolist() for row in found] == [kept] * 2


def test_stages_are_listed_only_where_model_and_backend_have_them() -> None:
    """A model without stages has none, nor a host optimizer where stages share the word embedding."""
    on_host = {"backend": "zero2", "optimizer": "host"}
    models = {
        "st-dit-tiny": (False, False),
        "gpt3-tiny": (True, False),
        "causal-transformer-tiny": (True, True),
    }
    for model, (plain, offloaded) in models.items():
        cell = asked(8, seq_len=64).cell.model_copy(update={"model": model, "model_options": {}})
        question = replace(asked(8), cell=cell)
        assert has_stages(question, {"backend": "zero2"}) == plain, model
        assert has_stages(question, on_host) == offloaded, model


UNLIKE = ("megatron_sp+ulysses", "odysseus+ring_attention")


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


@pytest.mark.parametrize(
    ("steps", "further"),
    [
        (same(second=1.01), []),  # another time, or other bytes, on one mesh
        (same(nbytes=2.02), []),
        (SameSteps(), [("megatron_sp", {"tp": 2}, 1.0), ("odysseus", {"tp": 2}, 1.0)]),  # one mesh alone
        (same(), [("megatron_sp", {"tp": 8}, 1.0), ("odysseus", {"tp": 8}, 1.1)]),  # one difference ends it
        # strategies that differ in two parts
        (SameSteps(), [(s, {"tp": 2, "sp": n}, 1.0) for s in UNLIKE for n in (2, 4)]),
    ],
)
def test_other_steps_stand_for_none(
    steps: SameSteps, further: list[tuple[str, dict[str, int], float]]
) -> None:
    for strategy, axes, seconds in further:
        steps.add(candidate(strategy, **axes), seconds, 2.0)
    assert steps.replaced == {}


def test_candidates_of_the_other_strategy_wait_no_longer() -> None:
    steps = same()
    names = ("megatron_sp", "odysseus", "odysseus", "ulysses")
    learned = Learned([candidate(name, tp=2) for name in names])
    learned.take([1])
    assert learned.leave_out(lambda strategy: steps.instead(strategy) != strategy) == 1
    assert learned.left.tolist() == [True, False, False, True]


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
