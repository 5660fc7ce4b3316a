"""Every registered strategy computes what one device computes."""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.cases import verify_case, verify_cases
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.models.bert import BertModel
from spbench.impls.models.model import Model
from spbench.impls.registries import all_models as models
from spbench.impls.registries import all_strategies as strategies
from spbench.impls.registries import model_preset
from spbench.impls.strategies.base import Strategy, Unsupported
from spbench.impls.strategies.megatron_sp import MegatronSP
from spbench.impls.strategies.tensor_parallel import TensorParallel
from tests.measure.verify.assertions import assert_green
from tests.slow import slow

TINY = [name for name in models() if "-tiny" in name]
PARALLEL = [cls for cls in strategies().values() if cls.axes]


def ranks_for(strategy: type[Strategy], model: Model, numbers: tuple[int, ...] = (3, 4, 2)) -> int | None:
    """Ranks on which a strategy runs a model: three, a first, a middle and a last one, or else four or two;
    None: it does not run it, but for :func:`refused` on any number."""

    def runs(size: int) -> bool:
        plan = strategy.planned(size)
        try:
            plan.check(model.sites(3, 24, plan.vocabulary_parts))
        except Unsupported:
            return False
        return True

    return next(filter(runs, numbers), None)


def refused(strategy: str, model: str) -> set[int]:
    """The refused numbers of ranks: 3 neither divide 4 heads of keys and values nor are a multiple."""
    of_keys = model.endswith(("-gqa", "moe-tiny", "mamba2-tiny", "hybrid-tiny", "kda-tiny", "linear-tiny"))
    return {3} if strategies()[strategy].splits_features and of_keys else set()


CAN_RUN = [
    (strategy, model) for strategy in PARALLEL for model in TINY if ranks_for(strategy, models()[model])
]


#: a model of each kind of attention
ONE_OF_EACH_KIND = ["bert-tiny", "tnl-tiny", "st-dit-tiny"]


def largest_part(model: Model) -> str:
    return [*model.parts()][-1]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("strategy", "model"), CAN_RUN)
def test_whole_models_in_float64(pool: RankPool, strategy: type[Strategy], model: str) -> None:
    preset = models()[model]
    assert_green(pool, Case(strategy, preset, largest_part(preset)), ranks_for(strategy, preset) or 0)


#: options of which a rank between others may have a part of its own
OF_POSITIONS = {"documents", "window", "pattern", "mask_shape"}


def variants() -> Iterator[Any]:
    """Every variant of every model, with a number that says which strategy is asked first."""
    for i, name in enumerate(TINY):
        for j, varying in enumerate(models()[name].variants()):
            spelled = " ".join(f"{option}={value}" for option, value in varying.items())
            yield pytest.param(i + j, name, varying, id=f"{name}-{spelled}")


@pytest.mark.one_in(11)
@pytest.mark.parametrize(("first", "name", "variant"), [*variants()])
def test_variants_in_float64(pool: RankPool, first: int, name: str, variant: Mapping[str, Any]) -> None:
    """With the first strategy that runs it, on two ranks where a middle one is as the others."""
    model = model_preset(name, variant)
    numbers = (3, 4, 2) if OF_POSITIONS & {*variant} else (2, 3, 4)
    in_turn = [*PARALLEL[first % len(PARALLEL) :], *PARALLEL]
    strategy, n = next((cls, n) for cls in in_turn if (n := ranks_for(cls, model, numbers)))
    assert_green(pool, Case(strategy, model, largest_part(model)), n)


def test_what_a_strategy_cannot_run_is_a_row(pool: RankPool) -> None:
    cannot = {*product(PARALLEL, TINY)} - {*CAN_RUN}
    for strategy, name in cannot:
        model = models()[name]
        assert verify_case(pool, Case(strategy, model, largest_part(model)), 3).status == "unsupported"
    assert len(cannot) > 50


@pytest.mark.slow
@pytest.mark.parametrize("model", TINY)
@pytest.mark.parametrize("strategy", strategies())
def test_all_parts_in_float64(pool: RankPool, strategy: str, model: str) -> None:
    """All variants, and parts alone, which name what is wrong; one rank may run what several cannot."""
    sizes = {1, 2, 3, 4}
    rows = list(verify_cases([strategy], [model], sorted(sizes), ["fp64"], pool=pool))
    assert [row for row in rows if row.status == "RED"] == []
    sizes_as_preset = {row.size for row in rows if row.status == "green" and not row.variant}
    can = (strategies()[strategy], model) in CAN_RUN
    assert sizes_as_preset == sizes - refused(strategy, model) if can else sizes_as_preset <= {1}


def test_each_model_and_each_strategy_is_in_some_pair() -> None:
    assert {model for _, model in CAN_RUN} == {*TINY}
    assert {strategy for strategy, _ in CAN_RUN} == {*PARALLEL}


def collectives_of(strategy: type[Strategy]) -> set[str]:
    """The collectives of a strategy's closed forms of the tiny models on 4 ranks."""
    plan = strategy.planned(4)
    sites = [models()[model].sites(3, 24, plan.vocabulary_parts) for cls, model in CAN_RUN if cls is strategy]
    return {traffic.collective for some in sites for traffic in plan.communication(some, 2)}


def covering_all_collectives() -> list[type[Strategy]]:
    """Strategies that have every collective among them, those that run few models first."""
    chosen, covered = [], set[str]()
    for strategy in sorted(PARALLEL, key=lambda cls: ([of for of, _ in CAN_RUN].count(cls), cls.name)):
        if collectives_of(strategy) - covered:
            chosen.append(strategy)
            covered |= collectives_of(strategy)
    return chosen


@pytest.mark.parametrize("strategy", covering_all_collectives())
def test_bf16_is_at_its_noise_floor(pool: RankPool, strategy: type[Strategy]) -> None:
    """Whole models, for a lower precision is the strategy's business more than the model's."""
    of = [model for cls, model in CAN_RUN if cls is strategy]
    model = next((model for model in ONE_OF_EACH_KIND if model in of), of[0])
    assert_green(pool, Case(strategy, model_preset(model), "model", "bf16"), 4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp16"])
@pytest.mark.parametrize("strategy", PARALLEL)
def test_lower_precision_is_at_its_noise_floor(pool: RankPool, strategy: type[Strategy], dtype: str) -> None:
    rows = list(verify_cases([strategy.name], TINY, [4], [dtype], ["attention", "model"], pool=pool))
    assert [row for row in rows if row.status == "RED"] == []
    assert any(row.status == "green" for row in rows)


@pytest.mark.parametrize("strategy", [slow("tensor_parallel"), "megatron_sp"])
def test_closed_forms_know_of_layer_norms_of_queries_and_keys(strategy: str) -> None:
    settings = {"model": "gpt3-tiny", "strategy": strategy, "sizes": {"tp": 3}, "batch": 1, "seq_len": 24}
    options = {"qk_norm": True, "position": "rotary"}
    asked = Cell.model_validate(settings | {"model_options": options, "cluster": "dgx-a100"})
    assert VirtualEngine().measure(asked).formula_difference == []


def test_tiles_of_a_vocabulary_that_ranks_share_are_a_row(pool: RankPool) -> None:
    preset = model_preset("causal-transformer-tiny", {"vocabulary_tile": 40})
    row = verify_case(pool, Case(TensorParallel, preset, largest_part(preset)), 2)
    assert (row.status, row.error, row.tensor) == ("unsupported", None, "")
    assert "vocabulary_tile needs a head that no ranks split" in row.reason


def test_options_of_a_strategy_are_tried_in_turn(pool: RankPool) -> None:
    """Each switch and each word of an option, and the numbers that its class names."""
    rows = verify_cases(["upipe"], ["causal-transformer-tiny"], [2], parts=["model"], pool=pool)
    of_options = {row.variant: row.status for row in rows if "=" in row.variant and " " not in row.variant}
    assert of_options == {"fused_exchange=True": "green", "heads_a_round=2": "green"}
    # the loss of gathered logits goes with a split vocabulary alone
    tried = [{*each} for each in MegatronSP.options_type().variants()]
    assert {"vocabulary", "loss"} in tried
    assert {"loss"} not in tried


def with_first_models() -> Iterator[Any]:
    """The pairs of CAN_RUN with weights, in every run those with the first such model of each strategy."""
    with_weights = [(cls, model) for cls, model in CAN_RUN if models()[model].has_weights]
    for strategy, model in with_weights:
        first = next(name for cls, name in with_weights if cls is strategy)
        yield (strategy, model) if model == first else slow(strategy, model)


@pytest.mark.one_in(7)
@pytest.mark.parametrize(("strategy", "model"), [*with_first_models()])
def test_gradients_held_the_old_way_are_synchronized_too(
    pool: RankPool, strategy: type[Strategy], model: str
) -> None:
    case = Case(strategy, model_preset(model), "model", backend_options={"gradients": "stale"})
    assert_green(pool, case, 4 if refused(strategy.name, model) else 3)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, int]:
    """Small odd sizes: chunks of one position, one head, one sample, vocabularies that need padding."""
    size = draw(st.integers(1, 4))
    linformer = draw(st.none() | st.integers(1, 5))
    model = BertModel(
        layers=1,
        hidden=12 * draw(st.integers(1, 2)),
        heads=draw(st.sampled_from([1, 2, 3, 4, 6, 12])),
        vocabulary=draw(st.integers(2, 40)),
        vocabulary_multiple=draw(st.integers(1, 3)),
        mask_shape="keys" if linformer else draw(st.sampled_from(["keys", "square"])),
        linformer=linformer,
        checkpointing=draw(st.booleans()),
        softmax=draw(st.sampled_from(["fused", "plain", "megatron"])),
        fused_bias_gelu=draw(st.booleans()),
        fused_cross_entropy=draw(st.booleans()),
    )
    case = Case(
        draw(st.sampled_from(PARALLEL)),
        model,
        draw(st.sampled_from(["attention", "block", "model"])),
        batch=draw(st.integers(1, 3)),
        seq_len=size * draw(st.integers(1, 6)),
        seed=draw(st.integers(0, 99)),
    )
    return case, size


@given(cases())
@settings(max_examples=8, deadline=None, derandomize=True, database=None)
def test_any_sizes(pool: RankPool, drawn: tuple[Case, int]) -> None:
    case, size = drawn
    row = verify_case(pool, case, size)
    assert row.status in ("green", "unsupported"), row


def test_unknown_names(pool: RankPool) -> None:
    for wrong in ({"strategies": ["ulises"]}, {"models": ["bart"]}, {"dtypes": ["fp8"]}):
        with pytest.raises(KeyError, match="known"):
            next(verify_cases(**wrong, pool=pool))
