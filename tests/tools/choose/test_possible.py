"""What stands in the way of an answer: what a refusal names is changed, and then there is an answer."""

import re
from dataclasses import replace
from typing import Any

import pytest

from spbench.bench.command_line.output import Table
from spbench.bench.errors import UserError
from spbench.bench.tools.choose.asked import Asked
from spbench.bench.tools.choose.candidates import Candidate
from spbench.bench.tools.choose.layouts import Layout, Refused, Way
from spbench.bench.tools.choose.possible import absence, left_out_by_length, possible, why_impossible
from spbench.bench.tools.choose.question import Question, question
from spbench.bench.tools.choose.ranking import SearchResult
from tests.grid import tabled
from tests.tools.choose import questions
from tests.tools.choose.questions import MODEL
from tests.tools.choose.test_advice import seen

#: options of `spbench advise` that have no answer
REFUSED: list[dict[str, Any]] = [
    {"gpus": 12, "seq_len": 2**17, "batch": 32, "only": ["ring_attention"]},  # neither divides by three
    {"gpus": 3, "seq_len": 256, "batch": 2, "only": ["ulysses"]},
    {"gpus": 8, "seq_len": 100001, "batch": 3, "only": ["ring_attention"]},
    {"gpus": 999, "only": ["single"]},
    {"fixed": [("tp", "8")], "only": ["ulysses"]},
    {"fixed": [("tp", "7")]},
    {"fixed": [("sp", "8")], "only": ["ulysses"]},  # of four heads
    {"fixed": [("dp", "3")]},
    {"fixed": [("pp", "8")]},  # of two layers
    {"fixed": [("pp", "2")], "only": ["zero3"]},
    {"fixed": [("cp", "2")], "only": ["ring_attention", "ddp"]},
    {"without": ["single"], "only": ["single"]},
    {"without": ["zero3"], "only": ["zero3"]},
    {"fixed": [("sp", "2")], "only": ["ulysses"], "program": "torchtitan", "model": "llama3-8b"},
]


def asked(gpus: int = 8, seq_len: int = 256, batch: int = 16, **more: Any) -> Question:
    return questions.asked(gpus, "dgx-h100", seq_len, batch, **more)


def with_change(options: dict[str, Any], change: str) -> dict[str, Any]:
    """The options with what a refusal names changed: ``with --batch 36`` or ``without --only ulysses``."""
    how, flag, value = change.split()
    name = {"--seq-len": "seq_len", "--for": "program"}.get(flag, flag.removeprefix("--"))
    if how == "with":
        return {**options, name: int(value)}
    if name == "program":
        return {**options, name: ""}
    gone = {tuple(value.split("="))} if name == "fixed" else {*value.split(",")}
    return {**options, name: [each for each in options[name] if each not in gone]}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("options", REFUSED, ids=str)
def test_what_a_refusal_names_is_the_cause(options: dict[str, Any]) -> None:
    reason = why_impossible(asked(**options))
    assert reason.startswith(f"no layout of {options.get('gpus', 8)} GPUs is possible")
    head, _, changes = reason.rpartition("; one is ")
    assert head
    for change in changes.split(", or "):
        assert possible(asked(**with_change(options, change)), Refused()), change


def test_what_can_be_is_not_refused() -> None:
    assert why_impossible(asked()) == ""


def test_the_batch_that_is_taken_is_one_that_the_gpus_divide() -> None:
    made = question((MODEL,), Asked("dgx-a100", 12, None, {"seq_len": 2**17}))
    assert made.cell.batch == 33
    assert made.remarks[0] == "not said, so taken: batch 33 (4325376 tokens); --batch-tokens"
    assert question((MODEL,), Asked("dgx-a100", 64, None, {"seq_len": 2**17})).cell.batch == 32
    assert possible(made, Refused())


@tabled(__file__, "layouts_that_cannot_be_are_not_said_to_be_slow")
def test_layouts_that_cannot_be_are_not_said_to_be_slow(
    options: dict[str, Any], why: dict[str, int], reason: str
) -> None:
    (sentence,) = absence(asked(**options), SearchResult(), why)
    assert isinstance(sentence, str)
    assert reason in sentence


@tabled(__file__, "what_was_not_traced_is_too_large_or_slow_by_the_estimate")
def test_what_was_not_traced_is_too_large_or_slow_by_the_estimate(
    tp: int, too_large: float, words: str
) -> None:
    candidates = [
        Candidate(
            Layout(Way("tensor_parallel", {"tp": n}), dp, pp, 1), {}, {}, {}, "", "", seconds, nbytes, 0.0
        )
        for n, dp, pp, seconds, nbytes in (
            (2, 4, 1, 3.0, 10.0),
            (2, 4, 1, 1.0, 50.0),
            (2, 4, 1, 2.0, 11.0),
            (4, 2, 1, 4.0, 10.0),
            (4, 1, 2, 1.0, 50.0),
        )
    ]
    found = absence(asked(gpus=8), SearchResult(), {"tp": tp}, candidates, too_large)
    assert found == ([f"not traced, of those with tp{tp}: {words}"] if words else [])


def test_numbers_by_few_layers_say_so() -> None:
    whole, few = (seen("tensor_parallel", {"tp": 2, "dp": 4}, step_s) for step_s in (1.0, 1.5))
    few = replace(few, depth="few_layers")
    (table,) = absence(asked(gpus=8), SearchResult(best=[whole], traced=[whole, few]), {"tp": 2})
    assert isinstance(table, Table)
    assert [line["why"] for line in table.lines] == ["takes +0.0%", "takes +50%, by a trace of few layers"]
    few = replace(few, measurement={**few.measurement, "status": "oom"})
    (table,) = absence(asked(gpus=8), SearchResult(traced=[few]), {"tp": 2})
    assert isinstance(table, Table)
    assert table.lines[0]["why"] == f"needs {few.peak / 2**30:.1f} GiB, by a trace of few layers"


def test_what_is_missing_is_asked_for_at_once() -> None:
    with pytest.raises(UserError) as error:
        question((MODEL,), Asked())
    assert re.search(r"give --cluster NAME, --gpus N and --seq-len N too", str(error.value))


def test_strategies_that_the_length_alone_leaves_out_are_named_with_one_that_does_not() -> None:
    """With that length each has a layout; a strategy that the model cannot use is not among them."""
    odd = asked(gpus=8, seq_len=257, batch=1)
    text = left_out_by_length(odd, ())
    said = re.search(r"^left out, .* divides 257 positions: (.+) \(--seq-len (\d+) has some\)$", text)
    assert said is not None
    names, length = said.groups()
    assert {"ulysses", "ring_attention"} <= {*names.split(", ")}
    assert {"dsp", "lasp", "tensor_parallel", "single"}.isdisjoint(names.split(", "))
    assert all(possible(asked(8, int(length), 1, only=[name]), Refused()) for name in names.split(", "))
    assert "ulysses" not in left_out_by_length(odd, {"ulysses"})
    assert left_out_by_length(asked(gpus=8, seq_len=256, batch=1), ()) == ""
