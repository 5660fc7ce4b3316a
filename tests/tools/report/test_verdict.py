"""The verdict on published numbers: planted records, one for each part of the rule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spbench.bench.tools.papers.comparison import Comparison
from spbench.bench.tools.papers.paper_findings import counts, verdict_on
from spbench.bench.tools.report.report_markdown import most_misses


def record(
    cell: str,
    error: float | None = 0.0,
    role: str = "predicted",
    statuses: tuple[str, str] = ("ok", "ok"),
    scenario: str = "planted",
) -> Comparison:
    published = None if statuses[0] == "oom" else 100.0
    ours = None if error is None or published is None else published * (1 + error)
    line = {
        "table": "planted-table" if role != "formula" else "planted-formula",
        "cell": cell,
        "quantity": "memory",
        "published": published,
        "reproduced": ours,
        "relative_error": error if ours is not None else None,
        "status_published": statuses[0] if role != "formula" else "",
        "status_reproduced": statuses[1] if role != "formula" else "",
        "role": role,
        "scenario": scenario,
        "variant": "",
        "source": cell.split("@")[0],
    }
    return Comparison.of_line(line)


@pytest.mark.parametrize(
    ("records", "word"),
    [
        ([record("a"), record("b", -0.1)], "yes"),
        ([record("a"), record("b", 0.1001)], "in part"),
        ([record("a", 0.2), record("b", 0.2), record("c")], "no"),
        ([], "not run"),
        # a rate was fitted to it: it proves nothing, right or wrong
        ([record("a", role="calibrated")], "not run"),
        ([record("a"), record("b", 0.5, role="calibrated")], "yes"),
        ([record("a", role="inferred")], "yes"),
        # statuses
        ([record("a", statuses=("oom", "oom"))], "yes"),
        ([record("a"), record("b", statuses=("oom", "ok"))], "in part"),
        ([record("a"), record("b", None, statuses=("ok", "oom"))], "in part"),
        ([record("a"), record("b", None, statuses=("ok", "failed"))], "in part"),
        # what was not run is not judged
        ([record("a", None, statuses=("ok", ""))], "not run"),
        ([record("a", statuses=("oom", ""))], "not run"),
        # a formula is one number, and must be equal at every cell
        ([record("f@1", role="formula"), record("f@2", role="formula")], "yes"),
        ([record("f@1", role="formula"), record("f@2", 0.001, role="formula")], "no"),
        # nothing is sent, and nothing has no relative error
        ([replace(record("f@1", None, role="formula"), published=0.0, reproduced=0.0)], "yes"),
        ([replace(record("f@1", None, role="formula"), published=0.0, reproduced=8.0)], "no"),
    ],
)
def test_the_word_of_planted_records(records: list[Comparison], word: str) -> None:
    assert verdict_on(records).word == word


def test_a_number_that_is_compared_twice_is_counted_once() -> None:
    twice = [record("a"), record("a", 0.5)]
    assert (verdict_on(twice).judged, verdict_on(twice).met) == (1, 1)


def test_the_sentence_has_the_numbers_and_the_scenario_with_the_most_misses() -> None:
    records = [record("a"), record("b", 0.3, scenario="bad"), record("c", -0.5, scenario="bad")]
    assert counts(verdict_on(records)) == "1 of 3 numbers met, median error 30.0%, worst 50%"
    assert most_misses(records) == ("bad", "2 of 2")
    assert most_misses(records[:1]) is None
    assert counts(verdict_on([])) == "nothing was judged"


def test_the_sentence_leaves_no_worst_error_out() -> None:
    """Closed forms have no part in the median, but are named where they are off."""
    off = [record("a"), record("f@1", role="formula"), record("f@2", 8.0, role="formula")]
    text = "1 of 2 numbers met, median error 0.0%, worst 0%; closed forms off by up to 800%"
    assert counts(verdict_on(off)) == text
    assert counts(verdict_on(off[2:])) == "0 of 1 numbers met, closed forms off by up to 800%"
    assert "closed" not in counts(verdict_on(off[:2]))
