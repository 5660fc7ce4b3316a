"""`spbench fit --budget`: the switches that cost least, against all single ones and all pairs."""

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

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
from spbench.bench.tools.choose.fit_verdict import Verdict
from spbench.bench.tools.choose.look import examine
from spbench.bench.tools.choose.proofs import plan_budget
from spbench.bench.tools.choose.subject import subject
from spbench.bench.tools.choose.suggestions import MODULES, Change, switches, together
from spbench.bench.units import GIB
from spbench.impls.registries import model_preset
from tests.tools.choose.questions import small_cards
from tests.tools.choose.test_fit import longer
from tests.tools.commands.conftest import Run

MODEL = Cell(
    model="causal-transformer-tiny",
    model_options={"layers": 8},
    strategy="single",
    batch=2,
    seq_len=64,
    cluster="dgx-h100",
)
PHASES = ("forward", "backward", "optimizer")


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


def test_what_fits_needs_no_switch_and_what_cannot_has_none() -> None:
    land = Landscape(1)
    enough = plan_budget(MODEL, 2 * GIB, cast(Asking, land))
    assert (enough.chosen, enough.alone, land.traced) == (enough.before, (), 1)
    assert plan_budget(MODEL, GIB // 100, cast(Asking, land)).chosen is None


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
    assert (beside.plan.chosen.step_s or 0.0) <= (beside.fitting[0].step_s or 0.0)
