"""Layouts of models with experts: how these are shared out, what it costs, and few layers for all."""

from collections.abc import Callable, Sequence

import pytest

from spbench.bench.cell import Cell, Sizes, TrainingOptions
from spbench.bench.errors import UserError
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.deepened_traces import few_layers, leading_runs
from spbench.bench.tools.choose.advice import Advice
from spbench.bench.tools.choose.asked import Asked
from spbench.bench.tools.choose.estimates import CollectivePrices, Estimates
from spbench.bench.tools.choose.layout_search import Search
from spbench.bench.tools.choose.layouts import (
    Fold,
    Layout,
    Refused,
    Way,
    folded,
    folds_anew,
    groups_of,
    layouts,
    of_one_axis,
    ways,
)
from spbench.bench.tools.choose.look import Depth, look
from spbench.bench.tools.choose.possible import why_impossible
from spbench.bench.tools.choose.question import Question, question
from spbench.bench.tools.choose.ranking import SearchResult, Seen
from spbench.bench.tools.choose.references import BackendFigures, Depths, Reference
from spbench.bench.tools.choose.suggestions import single_changes
from spbench.impls.backends.optimizer import PRECISIONS
from spbench.impls.registries import backend_class, model_preset
from tests.grid import tabled
from tests.slow import slow
from tests.tools.choose import questions

MODEL = "moe-tiny"  # 12 experts of width 24, 3 a token
LAYERS, EXPERTS = 2, 12


def asked(gpus: int, fixed: Sequence[tuple[str, str]] = (), model: str = MODEL) -> Question:
    return questions.asked(gpus, "dgx-h100", model=model, fixed=fixed)


def every(about: Question) -> list[Layout]:
    unfolded = [each for way in ways(about) for each in layouts(about, way, LAYERS, Refused())]
    return [layout for each in unfolded for layout in folded(about, each)]


def estimates(about: Question) -> Estimates:
    layer = Depths(2.0, 3.0)
    backend = BackendFigures(4.0, 12.0, {"all_reduce": 4.0}, {})
    return Estimates(about.cell, about.gpus, {"": Reference(layer, layer)}, {"ddp": backend})


def test_experts_are_shared_out_over_the_ranks_of_a_stage() -> None:
    found = every(asked(8))
    for layout in found:
        assert layout.fold is not None
        ep, etp = layout.fold
        assert layout.stage_ranks % (ep * etp) == 0
        assert EXPERTS % ep == 0
        assert etp in (1, layout.way.axes.get("tp", 1))
        assert Sizes(**layout.sizes).world == 8
    of_all = {each.fold for each in found if each.way.strategy == "single" and each.pp == 1}
    assert of_all == {(1, 1), (2, 1), (4, 1)}


def test_a_model_without_experts_has_no_folds() -> None:
    assert {each.fold for each in every(asked(8, model="causal-transformer-tiny"))} == {None}


def test_a_fixed_size_holds_and_is_refused_where_it_cannot_be() -> None:
    assert {each.fold.ep for each in every(asked(8, [("ep", "4")])) if each.fold} == {4}
    assert "one is without --fixed ep=5" in why_impossible(asked(8, [("ep", "5")]))
    assert not why_impossible(asked(8, [("ep", "2")]))


@tabled(__file__, "folding_is_groups_of_their_own")
def test_folding_is_groups_of_their_own(sizes: dict[str, int], anew: bool) -> None:
    assert folds_anew(sizes) is anew


def test_more_ranks_hold_fewer_experts_and_send_more_rows() -> None:
    about = asked(16)
    estimated = estimates(about)
    way = Way("single", {})
    figures = estimated.figures(way, {})
    model = model_preset(*about.cell.model_arguments)
    of_layer = EXPERTS * 3 * model.hidden * 24  # type: ignore[attr-defined]
    assert figures.experts.layer == of_layer
    assert figures.dispatched.layer == 256 * 3 * model.hidden * 2  # type: ignore[attr-defined]
    whole, shared = (Layout(way, 16, 1, 1, fold=fold) for fold in folds_of(about, way))
    (of_whole,), (of_shared,) = estimated.states([whole, shared], figures)
    expected = LAYERS * of_layer * ((4 + 12 / 16) - (4 + 12 / 4) / 4)
    assert of_whole - of_shared == pytest.approx(expected)
    assert estimated.seconds("all_to_all", 2**20, ("ep",), shared.sizes) > 0
    assert estimated.seconds("all_to_all", 2**20, ("ep",), whole.sizes) == 0


@pytest.mark.parametrize(("ep", "etp"), [(1, 2), (2, 1), (2, 2)])
def test_rows_go_to_experts_by_an_all_to_all_and_to_their_parts_by_an_all_gather(ep: int, etp: int) -> None:
    estimated = estimates(asked(16))
    layout = Layout(Way("tensor_parallel", {"tp": 2}), 8, 1, 1, fold=Fold(ep, etp))
    to_each = estimated.seconds("all_to_all", 1e6, ("ep",), layout.sizes)
    of_parts = estimated.seconds("all_gather", etp * 1e6, ("etp",), layout.sizes)
    assert (to_each > 0, of_parts > 0) == (ep > 1, etp > 1)
    # there and back, and so the gradients
    assert estimated._dispatch_s(layout, 1e6) == pytest.approx(4 * (to_each + of_parts))


@pytest.mark.parametrize(("ep", "hidden"), [(1, 0.8), (4, 0.0)])
def test_gathers_hide_only_where_no_rows_go_to_other_ranks(ep: int, hidden: float) -> None:
    about, way, computed = asked(16), Way("single", {}), 2e-5
    reference = Reference(Depths(computed, 2 * computed), Depths(2.0, 3.0))
    zero3 = {"zero3": BackendFigures(0.0, 16.0, {}, {"all_gather": 40.0})}
    estimated = Estimates(about.cell, about.gpus, {"": reference}, zero3)
    figures, layout = estimated.figures(way, {}), Layout(way, 16, 1, 1, fold=Fold(ep, 1))

    def seconds(collective: str, nbytes: float, axis: str) -> float:
        return estimated.seconds(collective, float(f"{nbytes:.2g}"), (axis,), layout.sizes)

    # there and back, and so the gradients; a rank has one sample. Weights are read twice, gradients written
    of_experts, bandwidth = LAYERS * figures.experts.layer / ep, 1 / CollectivePrices(about.cell).s_of_byte
    to_experts = LAYERS * 4 * seconds("all_to_all", figures.dispatched.layer, "ep")
    computing = estimated.computing([layout], figures)
    assert computing == pytest.approx(LAYERS * computed + to_experts + 3 * 2 * of_experts / bandwidth)
    of_layers = LAYERS * figures.elements.layer + figures.elements.ends
    gathers = seconds("all_gather", 40 * of_layers, "dp") + seconds("all_gather", 40 * of_experts, "edp")
    left = gathers - hidden * computing[0, 0] + 2 * 40 * (of_layers + of_experts) / bandwidth
    assert estimated.times([layout], figures, computing) == pytest.approx(computing[:, None] + left)


@pytest.mark.parametrize("pp", [1, 2])
def test_gathered_weights_of_experts_are_on_the_card(pp: int) -> None:
    """With ZeRO-3 those of two layers and a layer's gradients, and shards of the gradients of micro-batches
    before; with stages all of a stage's."""
    about, way = asked(16), Way("single", {})
    zero3 = backend_class("zero3")
    beside = [
        zero3.bytes_in_backward(PRECISIONS["bf16"], zero3.options_type(), staged) for staged in (False, True)
    ]
    assert beside == [(0, 4, 8), (4, 0, 2)]
    reference = {"": Reference(Depths(1.0, 2.0), Depths(2.0, 3.0))}
    figures_of = {"zero3": BackendFigures(0.0, 0.0, {}, {}, in_backward=(beside[0], beside[1]))}
    estimated = Estimates(about.cell, about.gpus, reference, figures_of)
    figures = estimated.figures(way, {})
    of_layer = figures.elements.layer + figures.experts.layer / 4
    ends = figures.elements.ends + figures.experts.ends / 4
    whole, shared, at_once = beside[pp > 1]
    held = of_layer * LAYERS / pp + ends / pp
    every = LAYERS * (figures.elements.layer + figures.experts.layer) + figures.elements.ends
    for dp, micro_batches in ((16 // pp, 1), (8 // pp, 2)):
        states = estimated.states([Layout(way, dp, pp, 1, fold=Fold(4, 1))], figures)
        shards = shared * (micro_batches > 1) * every / dp
        assert states == pytest.approx(whole * held + shards + at_once * of_layer)


def folds_of(about: Question, way: Way) -> list[object]:
    every_fold = [each.fold for each in folded(about, Layout(way, 16, 1, 1))]
    return [every_fold[0], every_fold[-1]]


def test_groups_of_experts_are_consecutive_ranks_of_a_stage() -> None:
    estimated = estimates(asked(16))
    within = estimated.seconds("all_to_all", 2**24, ("ep",), {"dp": 4, "pp": 2, "sp": 2, "ep": 4})
    across = estimated.seconds("all_to_all", 2**24, ("edp",), {"dp": 16, "ep": 4})
    assert within < across  # 4 ranks of a node; ranks of both nodes


def test_folded_groups_are_the_same_whatever_axes_divide_a_sample() -> None:
    mesh = {"dp": 2, "pp": 2, "cp": 2, "sp": 1, "tp": 2}
    folds = {"edp": 2, "ep": 2, "etp": 2}
    for axes in (("ep",), ("etp",), ("edp",)):
        one_axis = groups_of(axes, of_one_axis(mesh) | folds)
        assert (one_axis == groups_of(axes, mesh | folds)).all()


def test_a_layout_that_fills_its_card_by_few_layers_counts_where_no_other_fits() -> None:
    search = Search(asked(8), questions.Answers(lambda cell: {}))  # type: ignore[arg-type]
    for dp, share in ((8, 0.97), (4, 0.9)):
        cell = asked(8).cell.model_copy(update={"sizes": Sizes(dp=dp, sp=8 // dp)})
        found = {"status": "ok", "step_time_s": 1 / dp, "peak_memory_bytes": int(share * search.usable)}
        search.seen[cell.key] = Seen(cell, found, depth="few_layers")
        assert [each.cell.sizes.dp for each in search.fitting()] == [dp]


def deep(layers: int, dense: int) -> Cell:
    options = {"layers": layers, "dense_layers": dense}
    return Cell(
        strategy="single", model=MODEL, model_options=options, cluster="dgx-h100", batch=2, seq_len=64
    )


@pytest.mark.slow
def test_a_deep_model_is_put_together_behind_its_dense_layers(kept_traces: None) -> None:
    cell = deep(24, 2)
    assert leading_runs(cell) == 2
    few = few_layers(cell, 0, "guess")
    assert few is not None
    assert [each.model_options["layers"] for each in few.sources] == [5, 7]
    whole = tracing.trace(cell, events=True, effort="whole")
    guess = tracing.trace(cell, events=True, effort="guess")
    assert guess.memory.peak().nbytes == pytest.approx(whole.memory.peak().nbytes, rel=0.01)


def test_few_layers_count_one_dense_layer_at_most(kept_traces: None) -> None:
    few, exact = (look(deep(14, 3), depth) for depth in ("few_layers", "all_layers"))
    assert few.peak_memory_bytes == pytest.approx(exact.peak_memory_bytes, rel=0.05)
    assert few.step_time_s == pytest.approx(exact.step_time_s, rel=0.1)


def traced(sizes: Sizes, step_s: float, depth: Depth = "all_layers", fits: bool = True) -> Seen:
    measurement = questions.measured(step_s, usable=2**31 if fits else 1, parts={"matmul_s": step_s})
    return Seen(deep(2, 0).model_copy(update={"sizes": sizes}), measurement, depth=depth)


def test_the_folding_of_the_fastest_layout_is_said() -> None:
    """It is compared with the fastest without it that fits and was traced whole."""
    folded, plain = Sizes(sp=4, ep=4), Sizes(dp=4, ep=4)
    slower = [traced(plain, 0.5, fits=False), traced(plain, 0.9, "few_layers"), traced(plain, 2.0)]
    for best, others, said in (
        (traced(folded, 1.0), [], "; none without it that was traced fits"),
        (traced(folded, 1.0), slower[:2], "; none without it that was traced fits"),
        (
            traced(folded, 1.0),
            [*slower, traced(plain, 1.5), traced(folded, 1.2)],
            "; without it single dp4·ep4 takes +50%: matmul 1.5 s against 1",
        ),
        (traced(plain, 1.0), [traced(folded, 1.5)], ""),
    ):
        answer = Advice(asked(4), SearchResult(best=[best], traced=[*others, best]))
        text = answer.text("folding")
        assert text.endswith(said)
        assert ("folding: the fastest layout, single sp4·ep4, has its experts over" in text) == bool(said)


@pytest.mark.parametrize(("stages", "dense"), [([7, 6], 1), slow([6, 5], 0), slow([6, 7], 1)])
def test_few_layers_of_unequal_stages(stages: list[int], dense: int, kept_traces: None) -> None:
    training = {"backend": "megatron", "stage_layers": stages, "micro_batches": 4}
    cell = deep(sum(stages), dense).model_copy(
        update={"sizes": Sizes(pp=2), "batch": 4, "training": TrainingOptions.model_validate(training)}
    )
    few, exact = (look(cell, depth) for depth in ("few_layers", "all_layers"))
    assert few.peak_memory_bytes == pytest.approx(exact.peak_memory_bytes, rel=0.01)
    assert few.step_time_s == pytest.approx(exact.step_time_s, rel=0.05)


def test_experts_of_a_rank_are_one_parameter_where_nothing_else_is_said() -> None:
    separate = {"seq_len": 256, "batch": 16, "model_options.stacked_experts": False}
    assert asked(8).model.stacked_experts  # type: ignore[attr-defined]
    assert not question((MODEL,), Asked("dgx-h100", 8, None, separate)).model.stacked_experts  # type: ignore[attr-defined]
    assert "stacked_experts" not in asked(8, model="causal-transformer-tiny").cell.model_options


@pytest.mark.slow
def test_an_answer_says_where_experts_go(
    advise: Callable[..., tuple[int, str, str]], one_saving: None
) -> None:
    narrow = ["--only", "ulysses,zero2", "--fixed", "sp=4,micro_batch=1,pp=1,ep=4"]
    code, output, err = advise(
        MODEL, "--cluster", "dgx-h100", "--gpus", "4", "--seq-len", "256", "--batch", "4", *narrow
    )
    assert code == 0, err
    assert (
        "folding: the fastest layout, ulysses sp4·ep4, has its experts over ranks of several axes" in output
    )


def test_a_size_that_is_no_axis_is_refused() -> None:
    with pytest.raises(UserError, match="ep"):
        asked(8, [("expert", "2")])


def test_fit_suggests_more_ranks_for_experts() -> None:
    changes = {str(dict(each.settings)): each.words for each in single_changes(deep(2, 0))}
    assert not any("sizes.ep" in settings for settings in changes)  # one rank
    cell = deep(2, 0).model_copy(update={"sizes": Sizes(dp=2), "batch": 4})
    changes = {str(dict(each.settings)): each.words for each in single_changes(cell)}
    assert changes["{'sizes.ep': 2}"] == "6 of 12 routed experts on a rank"
    assert any("moe_act" in settings for settings in changes)
