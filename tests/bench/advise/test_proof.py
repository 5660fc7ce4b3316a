"""The search beside traces of all layouts that there are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from spbench.bench.advise import search as module
from spbench.bench.advise.advice import Advice
from spbench.bench.advise.candidates import Candidate, candidates
from spbench.bench.advise.estimates import Estimates
from spbench.bench.advise.layouts import Refused
from spbench.bench.advise.looks import Look, look
from spbench.bench.advise.question import Question
from spbench.bench.advise.references import references
from spbench.bench.advise.search import BEST, Search
from spbench.bench.fit import answers
from spbench.bench.fit.answers import Answers
from tests.bench.advise.questions import asked
from tests.bench.crew import CrewHere

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kept_traces", "one_saving")]

#: of two layers, so that every trace is of all of them
SIZES = {"layers": 2, "hidden": 2048, "heads": 16, "inner": 5632, "vocabulary": 32000}
LEFT_OUT = ("dsp", "lasp", "lasp2", "ring_self_attention", "megatron_sp")
SETTINGS = {f"model_options.{name}": value for name, value in SIZES.items()}


def every(question: Question, answers: Answers) -> Sequence[Candidate]:
    savings = module.savings_of(question)
    estimates = Estimates(question.cell, question.gpus, *references(question, answers, savings))
    return [*candidates(question, estimates, savings, Refused())]


def traced(question: Question, answers: Answers) -> dict[tuple[str, str], float]:
    """The shortest step of each strategy and mesh that fits, by traces of all layouts."""
    cells = {
        made.key: made
        for each in every(question, answers)
        if (made := Look.of(each.cell(question.cell), "all_layers"))
    }
    best: dict[tuple[str, str], float] = {}
    for cell, outcome in answers([*cells.values()]):
        assert outcome.status in ("ok", "oom", "unsupported"), outcome
        if outcome.status == "ok":
            kind = cell.strategy, cell.mesh_text
            best[kind] = min(best.get(kind, float("inf")), outcome.measurement["step_time_s"])
    return best


@pytest.mark.parametrize(
    ("least", "question"),
    [
        (12, {"gpus": 4, "only": ["tensor_parallel", "zero3"]}),  # 15 s
        (400, {"gpus": 8, "only": ["ddp", "zero3"], "without": LEFT_OUT}),  # 8 minutes
    ],
)
def test_traces_of_all_layouts_have_the_same_winner(
    least: int, question: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "Crew", CrewHere)
    made = asked(seq_len=4096, batch=8, settings=SETTINGS, **question)  # type: ignore[arg-type]
    with Answers(look) as here:
        found = Search(made, here).run()
        assert found.counts["looked at"] - len(found.refused.reasons) >= least
        true = traced(made, here)
    advice = Advice(made, found, 0.0)
    best = sorted(true.values())
    # a single change of a layout, as another order of the mesh, may be better than all of them
    assert found.best[0].step_s <= best[0] * 1.002
    for seen, least_s in zip(found.best[:BEST], best, strict=False):
        if seen.step_s > least_s * 1.002 and not advice.is_tie(seen):
            pytest.xfail(f"the winner is found; of the next, {least_s:.4g} s is not, but {seen.step_s:.4g}")
