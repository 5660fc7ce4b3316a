"""What stands in the way of an answer: what a refusal names is changed, and then there is an answer. The
changes that options and backends declare: each can be made, and asks for something else. Also those of a
cell that does not fit, with made-up memory: pairs where no single one is enough.
"""

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.command_line.output import Table
from spbench.bench.errors import UserError
from spbench.bench.measure.scenarios.scenario import changed, given, written
from spbench.bench.measure.trace.memory_log import MemoryLog
from spbench.bench.tools.choose.anatomy import ANATOMY, anatomy
from spbench.bench.tools.choose.asked import Asked
from spbench.bench.tools.choose.candidates import Candidate
from spbench.bench.tools.choose.fit_verdict import Verdict
from spbench.bench.tools.choose.layouts import Layout, Refused, Way
from spbench.bench.tools.choose.possible import absence, left_out_by_length, possible, why_impossible
from spbench.bench.tools.choose.proofs import ENOUGH, MOST, MOST_PAIRS, Proofs, prove
from spbench.bench.tools.choose.question import Question, question
from spbench.bench.tools.choose.ranking import SearchResult
from spbench.bench.tools.choose.suggestions import single_changes, together
from spbench.impls.registries import all_backends, all_models, all_strategies
from tests.grid import data, tabled
from tests.tools.choose import questions
from tests.tools.choose.questions import MODEL, Answers, measured
from tests.tools.choose.test_advice import seen

#: options of `spbench advise` that have no answer
REFUSED: list[dict[str, Any]] = data(__file__)["REFUSED"]


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
    gone = [value.split("=")] if name == "fixed" else value.split(",")
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


def test_a_strategy_that_no_search_takes_says_so() -> None:
    reason = why_impossible(asked(only=["group_cast"]))
    assert "possible: group_cast is in no search (spbench fit" in reason


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


@pytest.mark.slow
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


GIB = 2**30
#: of the card, and of the cell as it is
USABLE, NOW = 40 * GIB, 100 * GIB


def proved(needs: Callable[[Cell], float], states: int = 2**30, most: int = MOST) -> tuple[Proofs, Answers]:
    asked = cell(sizes={"dp": 8, "sp": 1}, strategy="single", training={"backend": "ddp"}, cluster="l40s")
    taken_apart = replace(
        anatomy(MemoryLog([states], [1])), held={"optimizer_state": states}, least_usable_bytes=NOW
    )
    meters = {ANATOMY: asdict(taken_apart)}
    before = Verdict(asked, {"usable_memory_bytes": USABLE, "step_time_s": 1.0, "meters": meters})
    asking: Any = Answers(lambda each: measured(nbytes=round(needs(each)), usable=USABLE))
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
    assert len(asking.cells) == found.tried + found.pairs_tried


def test_where_a_single_change_is_enough_no_pair_is() -> None:
    def needs(each: Cell) -> float:
        return NOW * (0.3 if each.strategy == "ulysses" else 0.9)

    found, _ = proved(needs)
    assert found.pairs_tried == 0
    assert {each["strategy"] for each in settings_of(found)} == {"ulysses"}


def test_as_many_as_are_asked_for_are_enough() -> None:
    found, asking = proved(lambda each: NOW * 0.3, most=ENOUGH)
    assert len(found.fitting) == found.tried == len(asking.cells) == ENOUGH


def test_switches_of_the_model_are_not_tried_where_its_states_alone_are_too_large() -> None:
    def needs(each: Cell) -> float:
        return NOW * (0.3 if each.strategy == "ulysses" else 0.9)

    found, asking = proved(needs, states=USABLE + 1)
    whole, asking_of_all = proved(needs, states=USABLE)
    assert settings_of(found) == settings_of(whole) != []
    assert len(asking.cells) < len(asking_of_all.cells)
    # where pairs follow, it must be known what each takes off
    found, asking = proved(shares(0.6, 0.5), states=USABLE + 1)
    assert found.fitting
    assert len(asking.cells) == len(proved(shares(0.6, 0.5))[1].cells)


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
    for one, other in itertools.combinations(single, 2):
        if (change := together([one, other])) is not None:
            assert change.settings == {**one.settings, **other.settings} == {**other.settings, **one.settings}
            assert [one.other_job, other.other_job, one.of_ranks and other.of_ranks] == [False] * 3


@pytest.mark.parametrize("name", sorted(all_models()))
def test_what_models_declare_are_their_options(name: str) -> None:
    model: Any = all_models()[name]
    for saving in model.savings(stages=1):
        assert replace(model, **saving.options) != model
        assert saving.words


def test_what_strategies_and_backends_declare_are_their_options() -> None:
    for cls in (*all_strategies().values(), *all_backends().values()):
        options = cls.options_type()
        for saving in options.savings():
            assert {*saving.options} <= {field.name for field in fields(options)}
            assert replace(options, **saving.options) != options


def cell(**changes: Any) -> Cell:
    settings = {"model": "causal-transformer-tiny", "strategy": "ulysses", "batch": 8, "seq_len": 64}
    return Cell.model_validate(settings | changes)


def sets(asked: Cell) -> list[str]:
    return [written(change.settings) for change in single_changes(asked)]


def test_sizes_are_divided_anew_with_micro_batches_of_the_same_size() -> None:
    found = sets(cell(sizes={"dp": 4, "sp": 2}, training={"backend": "ddp"}))
    assert "sizes.sp=4,sizes.dp=2,training.micro_batches=2" in found
    assert "sizes.pp=2,sizes.sp=1" in found
    assert "sizes.dp=8,sizes.sp=1" in found  # whose micro-batches are of one sample, for there are no more
    assert {"training.backend=zero1", "training.backend=zero3", "training.micro_batches=2"} <= {*found}


def test_what_shares_out_less_is_no_help() -> None:
    found = sets(cell(sizes={"dp": 2, "sp": 2}, training={"backend": "zero2"}))
    assert "training.backend=zero3" in found
    assert not {"training.backend=zero1", "training.backend=ddp"} & {*found}
    of_megatron = sets(cell(sizes={"dp": 2, "sp": 2}, training={"backend": "megatron"}))
    assert "training.distributed_optimizer=true" in of_megatron
    assert not [each for each in of_megatron if "backend" in each]


def test_another_length_or_batch_is_another_job() -> None:
    others = [written(c.settings) for c in single_changes(cell(sizes={"dp": 2})) if c.other_job]
    assert others == ["batch=4", "seq_len=32"]


def test_experts_have_changes_of_their_own() -> None:
    asked = cell(model="moe-tiny", sizes={"dp": 2, "sp": 2}, training={"backend": "megatron"})
    found = sets(asked)
    assert "model_options.recompute=selective,model_options.recompute_modules=moe_act" in found
    assert {"sizes.ep=2", "model_options.capacity=1.0"} <= {*found}
    part = "training.distributed_optimizer=true,training.optimizer=host,"
    assert f"{part}training.optimizer_offload_fraction=0.5" in found
    (capacity,) = (c for c in single_changes(asked) if "model_options.capacity" in c.settings)
    assert capacity.other_job


def test_changes_are_read_as_they_are_written() -> None:
    settings: dict[str, Any] = {"training.backend": "zero1", "sizes.sp": 2, "mesh": ["sp", "dp"]}
    settings |= {"model_options.tied": True, "model_options.recompute_modules": ["layernorm", "mlp"]}
    pairs = [tuple(pair.split("=")) for pair in written(settings).split(",")]
    assert given(pairs) == settings  # type: ignore[arg-type]
    assert given([("seq_len", "4K"), ("batch", "3")]) == {"seq_len": 4096, "batch": 3}


def test_a_search_for_what_is_set_is_over() -> None:
    searched = cell(seq_len=None, search={"quantity": "seq_len"})
    assert changed(searched, {"seq_len": 128}).search is None
    assert changed(searched, {"batch": 4}).search is not None


@tabled(__file__, "a_change_that_cannot_be_is_named")
def test_a_change_that_cannot_be_is_named(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as error:
        changed(cell(), settings)
    assert problem in str(error.value)
