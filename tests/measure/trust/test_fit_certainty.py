"""Verdicts on memory: what makes one tight, and the border that published runs give."""

from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.trust.fit_certainty import Evidence, Filled, certainty, packaged_evidence
from spbench.bench.measurement import filled

CARD = 2**36


def cell(model: str = "llama3-8b", strategy: str = "ulysses", **settings: Any) -> Cell:
    sizes = {"sp": 8, **settings.pop("sizes", {})}
    training = {"backend": settings.pop("backend", "zero3")}
    return Cell(
        model=model, strategy=strategy, sizes=sizes, batch=8, seq_len=8192, training=training, **settings
    )


def measured(part: float, status: str = "ok", returned: int = 0, step: int = 2) -> dict[str, Any]:
    entry = {"step": step, "reserved_memory_bytes": int(part * CARD), "returned_bytes": returned}
    return {"status": status, "usable_memory_bytes": CARD, "by_class": [entry]}


SPREAD = cell("qwen3-30b-a3b", sizes={"ep": 8})


@pytest.mark.parametrize(
    ("of", "measures", "word", "reason"),
    [
        (cell(), measured(0.5), "fits", ""),
        (
            cell(),
            measured(0.95),
            "tight",
            "PyTorch reserves 95% of what it can have, and a published run that",
        ),
        (cell(), measured(0.5, returned=2**31), "tight", "gives 2.00 GiB of segments back to the full card"),
        (cell(), measured(0.5, returned=2**31, step=0), "fits", ""),
        (cell(), measured(1.2, "oom"), "no", ""),
        (cell(backend="unwrapped"), measured(0.85), "tight", "one measured run in ten of unwrapped took 32%"),
        (SPREAD, measured(0.5), "tight", "no memory of experts spread over ranks under zero3 was ever"),
        (
            cell("tnl-1b"),
            measured(0.3),
            "tight",
            "no memory of ulysses of linear attention was ever measured",
        ),
        (cell("tnl-1b"), measured(0.09), "fits", ""),
        (cell(strategy="ulysses+ring_attention", sizes={"cp": 2}), measured(0.5), "fits", ""),
    ],
)
def test_a_verdict_is_as_sure_as_what_was_measured(
    of: Cell, measures: dict[str, Any], word: str, reason: str
) -> None:
    verdict = certainty(of, measures)
    assert verdict.word == word
    assert reason in verdict.reason
    assert bool(verdict.reason) is (word == "tight")


def test_without_a_limit_or_on_real_ranks_there_is_no_verdict() -> None:
    assert certainty(cell(), measured(0.5) | {"usable_memory_bytes": None}) is None
    assert certainty(cell(engine="distributed"), measured(0.5)) is None
    assert filled(measured(0.5, returned=1)) == 1.0


def test_the_border_is_that_of_measured_kinds() -> None:
    runs = [
        Filled(part, kinds, "zero3", "me", published_oom=oom, oom=False)
        for part, kinds, oom in [(0.93, {"a"}, True), (0.2, {"b"}, True), (0.8, {"a"}, False)]
    ]
    evidence = Evidence.of(runs, {"a"})
    assert evidence == Evidence(0.93, ["a"])
    assert [evidence.judged(run).word for run in runs] == ["tight", "tight", "fits"]
    assert Evidence.of([], {"a"}).border == 1.0
    assert 0.85 < packaged_evidence().border < 1
