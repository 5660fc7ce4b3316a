"""The checker rejects every planted fault, and names a tensor that the fault spoils: of a strategy, of
strategies around each other, and of experts. Pairs of strategies agree with the single device.
Sliding windows and sinks: planted faults, and attention as others compute it.

Packed documents against documents one by one, and the faults that public code has had with them."""

import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.beside_values import seen_pairs
from spbench.bench.measure.verify.cases import VerifyRow, verify_case, verify_cases
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.attended import Attended
from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.models.model import Model
from spbench.impls.registries import all_strategies, model_preset, strategy_class
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.lasp2 import Lasp2
from spbench.impls.strategies.megatron_sp import MegatronSP
from spbench.impls.strategies.nesting import Nesting, all_pairs, nesting
from spbench.impls.strategies.ring_attention import RingAttention
from spbench.impls.strategies.ring_self_attention import RingSelfAttention
from spbench.impls.strategies.tensor_parallel import TensorParallel
from spbench.impls.strategies.ulysses import Ulysses
from spbench.impls.training.step import initialize
from tests.grid import data, tabled
from tests.measure.verify import attention_faults as attention
from tests.measure.verify import document_faults
from tests.measure.verify import expert_faults as faults
from tests.measure.verify import head_faults as heads
from tests.measure.verify import index_faults as index
from tests.measure.verify import layer_faults as layers
from tests.measure.verify import recurrence_faults as recurrences
from tests.measure.verify.assertions import assert_green, assert_red
from tests.measure.verify.attention_model import AttentionModel

BERT, DECODER = model_preset("bert-tiny"), model_preset("causal-transformer-tiny")
CAUSAL, LINEAR = AttentionModel("causal_attention"), AttentionModel("linear_attention")
LATENT = model_preset("mla-tiny")
INDEXED, BLOCKS = model_preset("indexer-tiny"), model_preset("blocks-tiny")
HYBRID, MOVED = model_preset("kimi-linear-tiny"), {"query_placement": "zigzag"}
ROTARY = AttentionModel("causal_attention", rotary=True)
TNL = model_preset("tnl-tiny", {"attention_norm": "head"})
IN_PLACE = {"library": "transformer-engine", "cross_entropy": "in_place", "recompute": "selective"}
#: two heads of keys and values, each of which two of four ranks hold
REPLICATED = model_preset("causal-transformer-tiny-gqa", {"kv_heads": 2})
KEY_NORMS, TWO_KEYS = heads.KeyNormModel(), AttentionModel(kv_heads=2)
GRID_6, GRID_8, GRID_12 = (model_preset("st-dit-tiny", {"temporal": n, "layers": 1}) for n in (6, 8, 12))
GROUPED, CHUNKS = AttentionModel(kv_heads=4), {"chunk": 8}
ZIGZAG, STRIPED, SPLIT = {"placement": "zigzag"}, {"placement": "striped"}, {"vocabulary": "split"}

Names, Options = tuple[str, ...], dict[str, Any]
QKV = ("gradient of layer.qkv", "gradient of input x")
ANY = ("output y", "gradient of")
INPUTS = ("gradient of input",)
GRADIENTS = ("gradient of",)
OUTPUTS = ("output", *GRADIENTS)
PROJECTION = ("gradient of layer.project.weight",)
NORMS = ("gradient of layer.q_norm", "gradient of layer.k_norm")
TEXT = ("gradient of text", "gradient of input text", "gradient of blocks")
ORDER = ("output order_loss", "gradient of order", "gradient of pooler", "gradient of embeddings")


def library(options: dict[str, str]) -> Model:
    return model_preset("causal-transformer-tiny-gqa", options)


MODULES = (attention, document_faults, heads, index, layers, recurrences)
#: by name with that of its module, as in `head_faults.KeysOneChunkLate`
PLANTED: dict[str, Any] = {
    f"{module.__name__.rpartition('.')[2]}.{name}": each
    for module in MODULES
    for name, each in vars(module).items()
}


def named(words: Any) -> Any:
    """What words of a table name: a planted fault, or in capitals a constant; a list of words as a tuple."""
    if isinstance(words, list):
        return tuple(map(named, words))
    return globals()[words] if words.isupper() else PLANTED.get(words, words)


FAULTS, OF_INDEXERS = (named(data(__file__)[table]) for table in ("FAULTS", "OF_INDEXERS"))

#: faults that bfloat16 may hide
IN_FLOAT64: list[tuple[type[Strategy], Model, str, Names, Options]] = [
    (layers.DenominatorOfOwnRows, library(IN_PLACE), "model", OUTPUTS, {}),
    (layers.GradientsOfOwnPositionsAlone, library({"cross_entropy": "fused"}), "model", OUTPUTS, SPLIT),
    (layers.LabelsOfOwnPositions, library(IN_PLACE), "model", OUTPUTS, SPLIT),
]

#: faults in one of two strategies around each other
NESTED: list[tuple[tuple[type[Strategy], type[Strategy]], Model, str, Names]] = [
    ((layers.SumLacksTheSequenceAxis, RingSelfAttention), BERT, "block", ("gradient of layer.",)),
    ((layers.SumHasTheTensorAxisToo, RingSelfAttention), BERT, "block", ("gradient of layer.",)),
    ((layers.GatherWithoutTheSum, RingAttention), DECODER, "block", GRADIENTS),
    ((TensorParallel, attention.PositionsOfTheLocalChunk), DECODER, "attention", ANY),
    ((MegatronSP, attention.PositionsOfTheLocalChunk), DECODER, "attention", ANY),
    ((heads.ChunksInTheOrderOfHeads, RingAttention), DECODER, "attention", ANY),
    ((layers.NestedHeadsWithOneDecay, Lasp2), TNL, "attention", ANY),
]

#: of four ranks' chunks of 6 positions, one and a part
WINDOWED = model_preset("causal-transformer-tiny", {"window": 8, "sinks": True})
SINKS = ("gradient of layer.sinks",)
DOCUMENTS = (7, 1, 11, 5)
PACKED = model_preset("causal-transformer-tiny", {"documents": DOCUMENTS, "position": "learned", "layers": 1})
#: of which the first ends at the edge of the second rank
STATES = model_preset("tnl-tiny", {"documents": (12, 7, 5), "attention_norm": "head"})
OTHER_DOCUMENTS = ("output token_loss of other documents", "output hidden of other documents")
TINY = asdict(model_preset("moe-tiny", {"layers": 2, "heads": 4, "aux_loss": "batch", "aux_weight": 0.1}))  # type: ignore[call-overload]
EXPERTS = tuple(f"gradient of blocks.{layer}.mlp.experts." for layer in (1, 0))

OF_DOCUMENTS = named(data(__file__)["OF_DOCUMENTS"])

#: faults in models with experts on two ranks, which are those of ep
OF_EXPERTS: list[tuple[type[CausalTransformerModel], type[Strategy], Names]] = [
    (faults.ExpertGradientsTimesEp, Ulysses, EXPERTS),
    (faults.ExpertGradientsOverAllRanks, Ulysses, ("gradient of blocks",)),
    (faults.RouterGradientNotSummed, RingAttention, ("gradient of blocks",)),
    (faults.CountsOfOwnTokens, RingAttention, GRADIENTS),
    (faults.AuxiliaryLossOverWrongGroup, MegatronSP, GRADIENTS),
    (faults.TokensDroppedInSilence, Ulysses, OUTPUTS),
]

#: faults that three ranks, the fewest with one that is neither first nor last, cannot have, or do not show
ON_FOUR_RANKS = {
    *(heads.ReplicasNotSummed, heads.ReplicasSummedOverAllRanks, heads.NormsOfOwnHeads),
    *(heads.KeyGradientsOfOneRound, heads.OneBufferOnTheHost, heads.KeysOneChunkLate),
    *(heads.QueryGradientsOfOneChunk, heads.PositionsOfOneChunk),
    *(layers.PartsInWrongOrder, layers.PaddingInTheLoss),
    *(layers.DenominatorOfOwnRows, layers.GradientsOfOwnPositionsAlone, layers.LabelsOfOwnPositions),
}


def case(fault: type[Strategy], model: Model, part: str, options: Options, dtype: str = "fp64") -> Case:
    batch = 1 if hasattr(model, "temporal") else 3
    return Case(fault, model, part, dtype, batch=batch, options=options)


def of_experts(cls: type[CausalTransformerModel], strategy: type[Strategy]) -> Case:
    return Case(strategy, cls(**TINY), "model", folds={"ep": 2})


def planted() -> Iterator[Any]:
    """In every run, of the faults of one strategy that spoil the same tensors of one model, the first."""
    seen = set[Any]()
    for number, (fault, model, part, tensors, *options) in enumerate([*FAULTS, *IN_FLOAT64]):
        alike = (fault.__mro__[1], repr(model), part, tensors, repr(options))
        # that noise hides no fault is seen by some of them
        for dtype in ("fp64", "bf16") if number < len(FAULTS) else ("fp64",):
            marks = pytest.mark.slow if (number % 18 if dtype == "bf16" else alike in seen) else ()
            seen.add(alike)
            asked, ranks = (
                case(fault, model, part, *options or [{}], dtype),
                4 if fault in ON_FOUR_RANKS else 3,
            )
            yield pytest.param(asked, ranks, tensors, id=f"{fault.__name__}-{dtype}", marks=marks)
    for classes, model, part, tensors in NESTED:
        name, strategy = "+".join(cls.__name__ for cls in classes), Nesting(classes)
        yield pytest.param(Case(strategy, model, part), strategy.meshes(4)[0], tensors, id=name)
    for fault, model, part, tensors in OF_DOCUMENTS:
        yield pytest.param(Case(fault, model, part), 4, tensors, id=fault.__name__)
    for fault, model, part, tensors in OF_INDEXERS:
        yield pytest.param(Case(fault, model, part), 2, tensors, id=fault.__name__)
    for cls, of, tensors in OF_EXPERTS:
        yield pytest.param(of_experts(cls, of), 2, tensors, id=cls.__name__)


@pytest.mark.parametrize(("case", "ranks", "tensors"), [*planted()])
def test_planted_fault_is_red(
    pool: RankPool, case: Case, ranks: int | dict[str, int], tensors: Names
) -> None:
    row = assert_red(pool, case, ranks, *tensors)
    assert ("of other documents" in row.verdict) == (tensors is OTHER_DOCUMENTS)
    if isinstance(case.model, faults.ExpertGradientsTimesEp):
        assert row.factor == pytest.approx(2.0)


@pytest.mark.parametrize("outer", [TensorParallel, MegatronSP, Ulysses])
def test_a_loss_averaged_by_rank_is_red(pool: RankPool, outer: type[Strategy]) -> None:
    averaged = layers.LossAveragedByRank(
        layers=2, hidden=48, heads=12, vocabulary=96, vocabulary_multiple=1, dropout=0.0
    )
    strategy = Nesting((outer, RingSelfAttention))
    assert_red(pool, Case(strategy, averaged, "model"), strategy.meshes(4)[0])


@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
def test_log_sum_exp_in_half_precision_is_red(pool: RankPool, dtype: str) -> None:
    """In bfloat16 it is within the noise of outputs; the operator's own test holds it to float32 there."""
    row = assert_red(pool, Case(attention.LogSumExpInHalfPrecision, CAUSAL, "attention", dtype))
    assert "not a scale" in row.verdict


def test_linformer_gradient_without_its_all_reduce(pool: RankPool) -> None:
    model = model_preset("bert-tiny-linformer")
    case = Case(attention.LinformerGradientNotReduced, model, "attention")
    assert_red(pool, case, 4, "gradient of layer.", "gradient of input x")


def test_a_norm_of_all_heads_before_the_all_to_all_is_green(pool: RankPool) -> None:
    assert_green(pool, Case(Ulysses, heads.KeyNormModel(), "attention"))


def test_faults_are_not_registered() -> None:
    assert not {fault for fault, *_ in FAULTS} & {*all_strategies().values()}


def test_text_that_is_gathered_again_is_metered(monkeypatch: pytest.MonkeyPatch) -> None:
    """N copies of the text change no number, for a softmax over all is that over one; but what is sent."""
    asked: Any = {"model": "st-dit-tiny", "strategy": "megatron_sp", "sizes": {"tp": 4}, "batch": 1}
    cell = Cell.model_validate({**asked, "seq_len": 24, "precision": "bf16"})
    assert VirtualEngine().measure(cell).formula_difference == []
    monkeypatch.setattr(MegatronSP, "linear_in_text", MegatronSP.linear_in)
    different = VirtualEngine().measure(cell).formula_difference
    assert {(row["phase"], row["collective"]) for row in different} == {
        ("forward", "all_gather"),
        ("backward", "all_gather"),
        ("backward", "reduce_scatter"),
    }


HEAD_NORM = model_preset("tnl-tiny", {"attention_norm": "head"})
#: of these models each pair is tried on the first that it can run
MODELS = ("bert-tiny", "causal-transformer-tiny", "linear-llama3-tiny", "st-dit-tiny", "hybrid-tiny")

PAIRS = [pair.name for pair in all_pairs()]


def runnable(pair: str, pool: RankPool, dtype: str = "fp64") -> VerifyRow:
    """The row of the first of MODELS that a pair can run on 2 x 2 ranks; of the last if there is none."""
    strategy = nesting(pair)
    for model in MODELS:
        row = verify_case(pool, Case(strategy, model_preset(model), "model", dtype), strategy.meshes(4)[0])
        if row.status != "unsupported":
            break
    return row


@pytest.mark.covering(1)
@pytest.mark.parametrize("pair", PAIRS)
def test_every_pair(pool: RankPool, pair: str) -> None:
    row = runnable(pair, pool)
    if pair in ("megatron_sp+dsp", "odysseus+dsp", "ulysses+dsp"):
        assert row.status == "unsupported"
        assert "stays cut along one dim" in row.reason
    elif pair in ("upipe+ulysses", "upipe+fpdt", "upipe+lasp2h"):
        # a round has one head, which is not split again (tests of chunks have more), and no recurrence
        assert row.status == "unsupported"
    else:
        assert row.status == "green", row


@pytest.mark.slow
def test_every_pair_on_every_tiny_model_and_variant() -> None:
    with RankPool(6) as pool:
        rows = list(verify_cases(PAIRS, None, [4, 6], pool=pool))
    assert not [asdict(row) for row in rows if row.status == "RED"]
    assert {row.mesh for row in rows if row.status == "green"} >= {"tp2xsp2", "tp2xsp3", "tp3xsp2", "sp2xcp3"}


# -- options, and three around each other ------------------------------------------------------------------


@pytest.mark.parametrize("order", [("sp", "cp"), ("cp", "sp")], ids="-".join)
def test_ulysses_and_a_ring_in_both_orders_of_the_mesh(pool: RankPool, order: tuple[str, str]) -> None:
    case = Case(nesting("ulysses+ring_attention"), DECODER, "model", options={"placement": "zigzag"})
    row = verify_case(pool, case, dict.fromkeys(order, 2))
    assert row.status == "green", row
    assert row.mesh == "x".join(f"{axis}2" for axis in order)


@pytest.mark.slow
@pytest.mark.parametrize("outer", ["tensor_parallel", "megatron_sp"])
@pytest.mark.parametrize("inner", ["ring_attention", "ring_self_attention", "lasp", "lasp2"])
def test_three_around_each_other(outer: str, inner: str) -> None:
    model = {"ring_attention": DECODER, "ring_self_attention": BERT}.get(inner, HEAD_NORM)
    strategy = nesting(f"{outer}+ulysses+{inner}")
    with RankPool(8) as pool:
        assert_green(pool, Case(strategy, model, "model"), {"tp": 2, "sp": 2, "cp": 2})


def test_in_half_precision_choices_are_those_of_the_reference(pool: RankPool) -> None:
    """There a token between two experts goes to either; what routers choose is proven in float64."""
    tossed = of_experts(faults.OtherChoices, Ulysses)
    assert verify_case(pool, tossed, 2).status == "RED"
    assert verify_case(pool, replace(tossed, dtype="bf16"), 2).status == "green"


@tabled(__file__, "sizes_that_cannot_be")
def test_sizes_that_cannot_be(
    pool: RankPool, strategy: str, model: str, folds: dict[str, int], reason: str
) -> None:
    asked = Case(strategy_class(strategy), model_preset(model), "model", seq_len=20, folds=folds)
    row = verify_case(pool, asked, max([2, *folds.values()]))
    assert row.status == "unsupported"
    assert re.search(reason, row.reason), row.reason


def windowed_attention(
    window: int, sinks: torch.Tensor | None
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Random q [2, 4, 24, 8], k, v [2, 2, 24, 8], and the attention here."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, 24, 8, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (4, 2, 2)
    )
    o = Strategy().causal_attention(q, k, v, Attended(window=window), sinks)
    return (q, k, v), o


@pytest.mark.slow
def test_windows_are_those_of_flex_attention() -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    (q, k, v), o = windowed_attention(7, None)
    mask = create_block_mask(lambda b, h, i, j: (j <= i) & (i - 7 < j), None, None, 24, 24, device="cpu")
    with torch.no_grad():
        given = (x.detach() for x in (q, k, v))
        theirs = flex_attention(*given, block_mask=mask, enable_gqa=True)
    torch.testing.assert_close(o.detach(), theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_windows_and_sinks_are_those_of_gpt_oss() -> None:
    """As in transformers' own code: its mask, its attention, and the gradients that autograd makes."""
    oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    masks = pytest.importorskip("transformers.masking_utils")
    sinks = torch.linspace(-1, 2, 4, dtype=torch.float64, requires_grad=True)
    inputs, o = windowed_attention(7, sinks)
    q, k, v = inputs
    config = oss.GptOssConfig(sliding_window=7, _attn_implementation="eager")
    places = torch.arange(24).unsqueeze(0)
    hidden = torch.zeros(2, 24, 8, dtype=torch.float64)
    mask = masks.create_sliding_window_causal_mask(config, hidden, attention_mask=None, position_ids=places)
    assert torch.equal(mask[0, 0] == 0, seen_pairs(Attended(window=7), 24))
    layer = SimpleNamespace(num_key_value_groups=2, sinks=sinks, training=False)
    theirs, _ = oss.eager_attention_forward(layer, q, k, v, mask, scaling=8**-0.5)
    theirs = theirs.transpose(1, 2)
    torch.testing.assert_close(o, theirs, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(o)
    ours = torch.autograd.grad((o * weights).sum(), [*inputs, sinks])
    expected = torch.autograd.grad((theirs * weights).sum(), [*inputs, sinks])
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"position": "learned", "max_positions": 11}], ids=str)
def test_packed_documents_are_documents_one_by_one(options: dict[str, object]) -> None:
    """Neither by a mask nor by cu_seqlens: each document is a sequence of its own."""
    losses, gradients = [], []
    for lengths in ([24], DOCUMENTS):
        model = model_preset(
            "causal-transformer-tiny", options | {"documents": [] if len(lengths) > 1 else DOCUMENTS}
        )
        whole = model.inputs(2, 24, torch.Generator().manual_seed(0))
        torch.set_default_dtype(torch.float64)
        try:
            modules = [model.build(Strategy(), n) for n in lengths]
        finally:
            torch.set_default_dtype(torch.float32)
        parts = zip(*(x.split(list(lengths), 1) for x in whole.values()), strict=True)
        found = []
        for module, part in zip(modules, parts, strict=True):
            initialize(module, 0, deviation=0.2, everything=True)
            outputs = module(dict(zip(whole, part, strict=True)))
            outputs["loss"].backward()
            found.append(outputs["token_loss"])
        losses.append(torch.cat(found, 1))
        named = [dict(module.named_parameters()) for module in modules]
        gradients.append({n: sum(each[n].grad for each in named) for n in named[0]})
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-14)
