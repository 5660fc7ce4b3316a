"""What a search knows of candidates that were not traced: what cannot win is left out, and nothing else.
Also strategies that take the same steps: one of them stands for both, and only then. `spbench fit --budget`:
the switches that cost least, against all single ones and all pairs.
"""

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from scripts.budget_pairs import JOBS, Job, beside_pairs
from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.measure.scenarios.scenario import changed
from spbench.bench.measurement import Outcome
from spbench.bench.tools.choose import suggestions
from spbench.bench.tools.choose.anatomy import ANATOMY
from spbench.bench.tools.choose.asked import Asked
from spbench.bench.tools.choose.asking import Asking, Task
from spbench.bench.tools.choose.candidates import Candidate, Candidates
from spbench.bench.tools.choose.estimates import Estimates
from spbench.bench.tools.choose.fit_verdict import Verdict
from spbench.bench.tools.choose.layouts import Layout, Refused, Way, backend_settings
from spbench.bench.tools.choose.learned import Learned, Waiting
from spbench.bench.tools.choose.look import examine
from spbench.bench.tools.choose.proofs import _Row, _Sums, plan_budget
from spbench.bench.tools.choose.question import Question
from spbench.bench.tools.choose.ranking import Seen
from spbench.bench.tools.choose.references import BackendFigures, Depths, as_text, has_stages
from spbench.bench.tools.choose.subject import subject
from spbench.bench.tools.choose.suggestions import MODULES, Change, switches, together
from spbench.bench.units import GIB
from spbench.impls.registries import model_preset
from tests.tools.choose.questions import REFERENCES, SAVINGS, asked, small_cards
from tests.tools.choose.test_fit import longer
from tests.tools.commands.conftest import Run


def of(question: Question, usable: float = 0.0) -> Sequence[Candidate]:
    figures = {
        as_text(each): BackendFigures(2.0, 14.0 - host, {}, {"all_gather": 4.0, "reduce_scatter": 2.0}, host)
        for each in backend_settings(question)
        for host in [12.0 if "optimizer" in each else 0.0]
    }
    estimates = Estimates(question.cell, question.gpus, REFERENCES, figures)
    return [*Candidates(question, estimates, SAVINGS, Refused(), usable)]


def kinds(some: Sequence[Candidate]) -> set[tuple[object, ...]]:
    return {(c.layout, as_text(c.training), c.saving_text) for c in some}


def test_the_host_is_looked_at_only_where_the_cards_may_be_too_small() -> None:
    """Where two layouts differ in the host alone, the one without it is never slower."""
    question = asked(8, only=["ulysses", "zero3"])
    small, large = of(question, usable=0.0), of(question, usable=1e15)
    on_host = [c for c in small if "host" in c.training_text]
    assert len(on_host) > 4
    assert not [c for c in large if "host" in c.training_text]
    for candidate in on_host:
        alike = [
            c
            for c in small
            if (c.family, c.layout, c.saving) == (candidate.family, candidate.layout, candidate.saving)
        ]
        assert {c.training["backend"] for c in alike} == {"zero3"}
        on_cards = [c for c in alike if "host" not in c.training_text]
        assert all(c.estimated_s < candidate.estimated_s for c in on_cards)
    assert kinds(large) < kinds(small)


def test_bytes_are_within_the_bounds_whatever_is_traced() -> None:
    """Steps take what was foreseen of states, and of activations a share more or less, with buffers in
    proportion to a rank's part of a sample, as ones of all-to-alls, or as chunks save them, and with tensor
    parallelism a tenth of all activations whole on each rank."""
    every = of(
        asked(16, seq_len=4096, batch=32, only=["ulysses", "upipe", "tensor_parallel", "ddp", "zero3"])
    )
    for seed in range(4):
        chance = random.Random(seed)
        share = {c.strategy: chance.uniform(0.97, 1.1) for c in every}
        buffers = {c.strategy: chance.uniform(-2e8, 8e8) for c in every}

        def true(c: Candidate, share: dict[str, float] = share, buffers: dict[str, float] = buffers) -> float:
            states = c.estimated_bytes - c.activation_bytes
            part = c.layout.micro_batch / c.layout.way.ranks
            whole = 0.1 * (c.layout.way.axes.get("tp", 1) - 1) * c.activation_bytes
            return states + share[c.strategy] * c.activation_bytes + whole + buffers[c.strategy] * part

        learned = Learned()
        for c in chance.sample(every, 12):
            learned.add(c, c.estimated_s, true(c))
        learned.fit()
        known = [c for c in every if learned.knows(c.strategy)]
        assert len(known) > 100
        for c in known:
            assert learned.least_bytes(c) <= true(c) <= learned.most_bytes(c), (seed, c)
        # and they are of use: without a trace both are farther off
        assert all(learned.least_bytes(c) > Learned().least_bytes(c) for c in known if share[c.strategy] > 1)


def test_what_cannot_be_told_from_a_way_counts_as_unknown() -> None:
    """Larger micro-batches were traced with one way alone, which was traced with no others: whether its steps
    are long by the way or by the size is not known, so another way may be fast with that size."""
    every = of(asked(8, batch=8, only=["ulysses", "ring_attention", "zero3"]))
    by_size: dict[tuple[str, int], Candidate] = {}
    for c in every:
        if c.layout.way.axes in ({"sp": 2}, {"sp": 4}) and c.layout.pp == 1 and "host" not in c.training_text:
            by_size.setdefault((str(c.layout.way), c.layout.micro_batch), c)
    ways = sorted({way for way, _ in by_size})
    first, other = (next(way for way in ways if name in way) for name in ("ring", "ulysses"))
    learned = Learned()
    for way, size in ((first, 2), (other, 1)):
        learned.add(by_size[way, size], by_size[way, size].estimated_s, 0.0)
    learned.fit()
    known, unknown = Waiting([by_size[other, 1]]), Waiting([by_size[other, 2]])
    assert learned.bounds(known).least_s > 0.95 * known.estimated_s
    assert learned.bounds(unknown).least_s < 0.9 * unknown.estimated_s
    # the first way with both sizes tells them apart
    learned.add(by_size[first, 1], by_size[first, 1].estimated_s, 0.0)
    learned.fit()
    assert learned.bounds(unknown).least_s > 0.93 * unknown.estimated_s


def test_a_strategy_of_traced_parts_takes_hardly_less_than_the_slower_one() -> None:
    every = of(asked(16, only=["ulysses", "ring_attention", "ulysses+ring_attention", "zero3"]))
    first = {c.strategy: c for c in reversed(every)}
    nested, learned = first["ulysses+ring_attention"], Learned()
    for strategy, times, least in (("ulysses", 1.0, 1 / 1.6), ("ring_attention", 1.5, 1.5 / 1.15)):
        learned.add(first[strategy], times * first[strategy].estimated_s, 0.0)
        learned.fit()
        (bound,) = learned.bounds(Waiting([nested])).least_s
        assert least <= bound / nested.estimated_s <= times


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


def same(second: float = 1.0, nbytes: float = 2.0) -> Learned:
    """What two strategies on two meshes teach, where one differs on the second."""
    steps = Learned()
    for axes, took, held in (({"tp": 2}, 1.0, 2.0), ({"tp": 4}, second, nbytes)):
        steps.add(candidate("megatron_sp", **axes), 1.0, 2.0)
        steps.add(candidate("odysseus", **axes), took, held)
    steps.fit()
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
        (Learned(), [("megatron_sp", {"tp": 2}, 1.0), ("odysseus", {"tp": 2}, 1.0)]),  # one mesh alone
        (same(), [("megatron_sp", {"tp": 8}, 1.0), ("odysseus", {"tp": 8}, 1.1)]),  # one difference ends it
        # strategies that differ in two parts
        (Learned(), [(s, {"tp": 2, "sp": n}, 1.0) for s in UNLIKE for n in (2, 4)]),
    ],
)
def test_other_steps_stand_for_none(steps: Learned, further: list[tuple[str, dict[str, int], float]]) -> None:
    for strategy, axes, seconds in further:
        steps.add(candidate(strategy, **axes), seconds, 2.0)
    steps.fit()
    assert steps.replaced == {}


def test_candidates_of_the_other_strategy_wait_no_longer() -> None:
    steps = same()
    waiting = Waiting([candidate(name, tp=2) for name in ("megatron_sp", "odysseus", "odysseus", "ulysses")])
    waiting.take([1])
    assert waiting.leave_out(lambda strategy: steps.instead(strategy) != strategy) == 1
    assert waiting.left.tolist() == [True, False, False, True]


def test_a_layout_is_named_by_one_of_both_strategies() -> None:
    cell = asked(4).cell
    measured = {"status": "ok", "step_time_s": 1.0, "peak_memory_bytes": 2}
    cells = [
        cell.model_copy(update={"strategy": name, "sizes": cell.sizes.model_copy(update={"tp": tp})})
        for name, tp in (("megatron_sp", 2), ("odysseus", 2), ("odysseus", 4))
    ]
    kept = same().without_same([Seen(each, measured, depth="few_layers") for each in cells])
    assert [(each.cell.strategy, each.cell.sizes.tp) for each in kept] == [
        ("megatron_sp", 2),
        ("odysseus", 4),
    ]


MODEL = Cell(
    model="causal-transformer-tiny",
    model_options={"layers": 8},
    strategy="single",
    batch=2,
    seq_len=64,
    cluster="dgx-h100",
)
PHASES = ("forward", "backward", "optimizer")


def measured_peaks(peaks: Sequence[int], seconds: float) -> dict[str, Any]:
    """A measurement with these peaks of :data:`PHASES`, in bytes."""
    anatomy = {
        "ranks": [0],
        "stage": None,
        "moment": {"step": 1, "phase": "forward", "micro_batch": 1, "micro_batches": 1, "module": ""},
        "peak_memory_bytes": max(peaks),
        "reserved_memory_bytes": max(peaks),
        "least_usable_bytes": max(peaks),
        "held": {},
        "parts": [],
        "curve": {"event": [0, 10, 20], "activations": peaks},
        "phases": [(phase, 10 * n) for n, phase in enumerate(PHASES)],
        "events": 30,
    }
    return {
        "status": "ok",
        "by_class": [],
        "meters": {ANATOMY: anatomy},
        "peak_memory_bytes": max(peaks),
        "usable_memory_bytes": 80 * GIB,
        "step_time_s": seconds,
    }


class Landscape:
    """Memory and time by the settings of a cell, in place of traces: what each setting takes off each phase
    and adds to the step, the savings of two together up to 20% more or less than their sum; those of
    recomputation of some layers ``of_some`` times their share of that of all."""

    def __init__(self, seed: int, of_some: float = 1.0):
        self.seed, self.of_some, self.traced, self.jobs = seed, of_some, 0, 2

    def drawn(self, *names: object) -> random.Random:
        return random.Random(repr((self.seed, *names)))

    def __call__(self, tasks: Sequence[Task], enough: Any = None) -> Iterator[tuple[Task, Outcome]]:
        for task in tasks:
            assert task.run is examine
            self.traced += 1
            yield task, Outcome("ok", "", measurement=self.measured(task.cell))

    def measured(self, cell: Cell) -> dict[str, Any]:
        options = {**cell.model_options, **cell.training.backend_options}.items()
        # of selective recomputation each module by itself
        values = ((n, v) for n, some in options for v in (some if isinstance(some, list) else [some]))
        on = sorted(f"{n}={v}" for n, v in values if n != "layers" and v != "selective")
        model, share = cast(Any, model_preset(*cell.model_arguments)), {"recompute=full": 1.0}
        if model.recompute_method == "block":
            on = [each for each in on if "recompute_" not in each]
            share["recompute=full"] = model.recompute_layers / model.layers
        bend = 1 + self.drawn(*on, share).uniform(-0.2, 0.2) * (len(on) > 1)
        if on == ["recompute=full"] and share != {"recompute=full": 1.0}:
            bend = self.of_some
        peaks = []
        for phase in PHASES:
            saved = sum(share.get(each, 1) * self.drawn(phase, each).uniform(0, 0.2) for each in on)
            start = self.drawn(phase).uniform(0.8, 1)
            peaks.append(int(GIB * max(0.05, start - bend * saved)))
        seconds = 1 + sum(share.get(each, 1) * self.drawn("time", each).uniform(-0.01, 0.2) for each in on)
        return measured_peaks(peaks, seconds)

    def verdict(self, change: Change) -> Verdict:
        cell = changed(MODEL, change.settings)
        return Verdict(cell, self.measured(cell), change)


def assert_none_that_fits_costs_less(land: Landscape, budget: int, each: Sequence[Change]) -> None:
    plan = plan_budget(MODEL, budget, cast(Asking, land))
    pairs = filter(None, map(together, itertools.combinations(each, 2)))
    fitting = [v for v in map(land.verdict, [*each, *pairs]) if plan.fits(v)]
    best = min((v.step_s or 0.0 for v in fitting), default=None)
    assert land.traced <= 60
    if best is not None:
        assert plan.chosen is not None
        assert plan.fits(plan.chosen)
        assert (plan.chosen.step_s or 0.0) <= best


@pytest.mark.parametrize("seed", range(16))
def test_no_single_switch_and_no_pair_that_fits_costs_less(seed: int) -> None:
    assert_none_that_fits_costs_less(Landscape(seed), int(0.62 * GIB), switches(MODEL))


@pytest.mark.parametrize("seed", range(3))
def test_some_layers_are_tried_where_they_may_be_enough(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, where they take off more than their share, and with a switch that computes all layers again,
    whose place they take."""
    kept = {f"model_options.{name}" for name in ("recompute", "recompute_method", "recompute_layers")}
    of_layers = [c for c in switches(MODEL) if {*c.settings} <= {*kept, "model_options.checkpoints"}]
    monkeypatch.setattr(suggestions, "switches", lambda cell: of_layers)
    for of_some, last in ((1.4, "model_options.recompute"), (1.0, "model_options.checkpoints")):
        land = Landscape(seed, of_some)
        least = next(land.verdict(c) for c in of_layers if [*c.settings][-1] == last).memory.total_bytes
        more = land.verdict(Change({}, "")).memory.total_bytes - least
        for part in (0.15, 0.3, 0.45):
            assert_none_that_fits_costs_less(land, int(least + part * more), of_layers)


def test_the_cheapest_of_a_million_sets_of_independent_switches() -> None:
    """Of 20 switches, beside the sums of all sets."""
    n, chance, before = 20, np.random.default_rng(0), [GIB, 9 * GIB // 10, GIB]
    saved, costs = chance.integers(0, GIB // 10, (n, len(PHASES))), chance.uniform(0, 0.2, n)
    one, *others = (
        Verdict(MODEL, measured_peaks(np.subtract(before, own).tolist(), 1 + float(more)))
        for own, more in zip([0 * saved[0], *saved], [0.0, *costs], strict=True)
    )
    rows = [_Row(Change({f"model_options.{at}": True}, ""), each) for at, each in enumerate(others)]
    every = (np.arange(2**n)[:, None] >> np.arange(n)) & 1
    need = np.array(before) - GIB // 2
    shortest = np.sort((every @ costs)[(every @ saved >= need).all(axis=1)])[:3]
    budget = one.memory.total_bytes - GIB // 2
    next(_Sums(one, rows[:2], budget).cheapest([0]), None)  # imports scipy.optimize
    begun = time.process_time()
    sets = [*itertools.islice(_Sums(one, rows, budget).cheapest(range(n)), 3)]
    assert time.process_time() - begun < 1
    assert [costs[[*taken]].sum() for _, taken in sets] == pytest.approx(shortest)


def test_what_fits_needs_no_switch_and_what_cannot_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    land = Landscape(1)
    enough = plan_budget(MODEL, 2 * GIB, cast(Asking, land))
    assert (enough.chosen, enough.alone, land.traced) == (enough.before, (), 1)
    assert plan_budget(MODEL, GIB // 100, cast(Asking, land)).chosen is None
    monkeypatch.setattr(suggestions, "switches", lambda cell: [])
    assert plan_budget(MODEL, GIB // 2, cast(Asking, land)).chosen is None


@pytest.mark.parametrize(
    ("status", "left_out"), [("ok", "step_time_s"), ("failed", ""), ("unsupported", "step_time_s")]
)
def test_a_budget_needs_a_time(status: Any, left_out: str) -> None:
    def asking(tasks: Sequence[Task], enough: Any = None) -> Iterator[tuple[Task, Outcome]]:
        measured = {k: v for k, v in Landscape(1).measured(tasks[0].cell).items() if k != left_out}
        yield tasks[0], Outcome(status, "", measurement=measured)

    with pytest.raises(UserError, match=r": --budget weighs times, and its step cannot be timed$"):
        plan_budget(MODEL, GIB, cast(Asking, asking))


def test_modules_are_put_together_and_unlike_values_are_not() -> None:
    by_module = {str(each.settings.get(MODULES)): each for each in switches(MODEL)}
    mlp, norm = by_module["['mlp']"], by_module["['layernorm']"]
    both = together([mlp, norm])
    assert both is not None
    assert both.settings == {"model_options.recompute": "selective", MODULES: ["layernorm", "mlp"]}
    full = Change({"model_options.recompute": "full"}, "")
    on_host = Change({**full.settings, "model_options.checkpoints": "host"}, "")
    assert together([mlp, full]) is None
    assert together([full, on_host]) is None  # the second is both


def test_switches_change_no_numbers_and_no_ranks() -> None:
    about = subject(["moonlight-16b-a3b"], Asked("dgx-h100", 8, None, {"seq_len": 4096, "sizes.ep": 8}))
    settings = [each.settings for each in switches(about.cells[0])]
    names = {name for each in settings for name in each}
    assert not names & {"training.state_dtype", "training.reduce_dtype", "training.backend", "batch"}
    modules = {each[MODULES][0] for each in settings if MODULES in each}
    assert modules == {
        *("core_attn", "moe_act", "moe", "shared_experts", "mlp", "layernorm", "mla_up_proj"),
    }


def test_the_command_says_what_was_chosen_and_its_price(
    fit: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {"model_options.cross_entropy", "model_options.recompute"}
    monkeypatch.setattr(
        suggestions, "switches", lambda cell: [c for c in switches(cell) if {*c.settings} <= kept]
    )
    job = longer(small_cards(tmp_path, 400))
    code, out, _ = fit(*job, "--budget", "110MiB")
    assert code == 0
    third = out.splitlines()[2]
    assert third.startswith("for 0.107 GiB at the least cost: --set model_options.")
    _, _, problem = fit(*job, "--budget", "180")
    assert "'180' is no number of bytes; write it as 78GiB" in problem


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.model)
def test_real_jobs_beside_all_pairs(job: Job) -> None:
    beside = beside_pairs(job)
    assert beside.plan.chosen is not None
    assert beside.fitting
    assert (beside.plan.chosen.step_s or 0.0) <= (beside.fitting[0].step_s or 0.0) * (1 + 1e-9)
