"""The search beside traces of all layouts that there are."""

from collections.abc import Sequence

import pytest

from spbench.bench.tools.choose import asking, ranking
from spbench.bench.tools.choose import layout_search as module
from spbench.bench.tools.choose.asking import Asking
from spbench.bench.tools.choose.candidates import Candidate, Candidates
from spbench.bench.tools.choose.estimates import Estimates
from spbench.bench.tools.choose.layout_search import BEST, Search
from spbench.bench.tools.choose.layouts import Refused
from spbench.bench.tools.choose.look import looks
from spbench.bench.tools.choose.question import Question
from spbench.bench.tools.choose.references import references
from spbench.impls.backends.sharding_options import ShardingOptions
from tests.bench.hosts import CrewHere
from tests.tools.choose.questions import asked

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kept_traces", "one_saving")]

#: of two layers, so that every trace is of all of them
SIZES = {"layers": 2, "hidden": 2048, "heads": 16, "inner": 5632, "vocabulary": 32000}
LEFT_OUT = ("dsp", "lasp", "lasp2", "ring_self_attention", "megatron_sp")
#: a micro-batch more takes as long as the one before, to within this
AT_MOST = 1.002
SETTINGS = {f"model_options.{name}": value for name, value in SIZES.items()}


def every(question: Question, ask: Asking) -> Sequence[Candidate]:
    savings = module.savings_of(question)
    estimates = Estimates(question.cell, question.gpus, *references(question, ask, savings))
    return [*Candidates(question, estimates, savings, Refused())]


def traced(question: Question, ask: Asking) -> tuple[int, dict[tuple[str, str], float]]:
    """How many layouts fit, and of each strategy and mesh the shortest step, by whole traces of all."""
    cells = [each.cell(question.cell) for each in every(question, ask)]
    n, best = 0, dict[tuple[str, str], float]()
    for cell, outcome in looks(ask, cells, "all_layers"):
        if outcome.status == "ok":
            n += 1
            kind = cell.strategy, cell.mesh_text
            best[kind] = min(best.get(kind, float("inf")), outcome.measurement["step_time_s"])
    return n, best


@pytest.mark.parametrize(
    ("least", "question"),
    [
        (12, {"gpus": 4, "only": ["tensor_parallel", "zero3"]}),  # 15 s
        (400, {"gpus": 8, "only": ["ddp", "zero3"], "without": LEFT_OUT}),  # 10 minutes
    ],
)
def test_traces_of_all_layouts_have_the_same_first_five(
    least: int, question: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "Crew", CrewHere)
    monkeypatch.setattr(ranking, "TOSS", 1.0)  # the fastest, not the simplest that is nearly as fast
    # of ZeRO-3 the states on cards alone, or all layouts would be twice as many
    monkeypatch.setattr(ShardingOptions, "searched", classmethod(lambda cls: iter([{}])))
    made = asked(seq_len=4096, batch=8, settings=SETTINGS, **question)  # type: ignore[arg-type]
    with Asking() as here:
        found = Search(made, here).run()
        n, true = traced(made, here)
    best = sorted(true.values())
    times = [seen.step_s for seen in found.best[:BEST]]
    assert n >= least
    print(f"{n} layouts fit; {found.counts['traced with few layers']} were traced")
    print(*(f"{a:.5f} {b:.5f} {a / b - 1:+.3%}" for a, b in zip(times, best, strict=False)), sep="\n")
    # a single change of a layout, as another order of the mesh, may be better than all of them
    assert len(times) == min(BEST, len(best))
    for place, (seen_s, least_s) in enumerate(zip(times, best, strict=False)):
        assert seen_s <= least_s * AT_MOST, (place, times, best[:BEST])
