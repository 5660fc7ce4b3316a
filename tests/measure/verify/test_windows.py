"""Sliding windows and sinks: planted faults, and attention as others compute it.

Packed documents against documents one by one, and the faults that public code has had with them.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.beside_values import seen_pairs
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.attended import Attended
from spbench.impls.models.model import model_preset
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.nesting import nesting
from spbench.impls.strategies.ring_attention import RingAttention
from spbench.impls.training.step import initialize
from tests.measure.verify import document_faults as faults
from tests.measure.verify.assertions import assert_green, assert_red
from tests.slow import slow

#: of four ranks' chunks of 6 positions, one and a part
WINDOWED = model_preset("causal-transformer-tiny", {"window": 8, "sinks": True})
SINKS = "gradient of layer.sinks"


@pytest.mark.parametrize(
    ("fault", "axis", "tensors"),
    [
        (faults.WindowOffByOne, "sp", ("output", "gradient of")),
        (faults.HaloForgotten, "sp", ("output", "gradient of")),
        (faults.SinkOnceAChunk, "sp", ("output", "gradient of")),
        (faults.SinkWithoutGradient, "sp", (SINKS,)),
        (faults.SinksOfOtherHeads, "sp", (SINKS,)),
        (faults.SinksOfOtherRounds, "sp", (SINKS,)),
        (faults.ChunksSeenWhole, "sp", ("output", "gradient of")),
        (faults.SinksSplitOtherwise, "tp", (SINKS,)),
    ],
)
def test_planted_fault_is_red(
    pool: RankPool, fault: type[Strategy], axis: str, tensors: tuple[str, ...]
) -> None:
    assert_red(pool, Case(fault, WINDOWED, "attention"), {axis: 4}, *tensors)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("ring_attention", {"placement": "zigzag"}),
        ("all_gather_kv", {"placement": "by_work"}),
        slow("fpdt", {"chunk": 8}),
        slow("upipe", {"heads_a_round": 3}),
    ],
)
def test_windows_of_some_layers_are_green_wherever_positions_lie(
    pool: RankPool, strategy: str, options: dict[str, Any]
) -> None:
    """The placement is that of the model, not of the layer."""
    model = model_preset("hybrid-tiny", {"pattern": "WS", "window": 5, "sinks": True, "documents": (17, 7)})
    assert_green(pool, Case(nesting(strategy), model, "model", options=options))


def attention(window: int, sinks: torch.Tensor | None) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
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

    (q, k, v), o = attention(7, None)
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
    inputs, o = attention(7, sinks)
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


DOCUMENTS = (7, 1, 11, 5)
PACKED = model_preset("causal-transformer-tiny", {"documents": DOCUMENTS})
OTHERS = ("output token_loss of other documents", "output hidden of other documents")


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


@pytest.mark.parametrize(
    ("fault", "tensors"),
    [
        (faults.DocumentsSeeEachOther, OTHERS),
        (faults.PositionsRunOn, ("output", "gradient of")),
        (faults.DocumentsEndAtTheRanksEdge, ("output", "gradient of")),
        (faults.KeyOffsetsIgnored, OTHERS),
        (faults.OddLengthsTakenForEven, OTHERS),
    ],
)
def test_a_fault_of_documents_is_red(pool: RankPool, fault: type[Strategy], tensors: tuple[str, ...]) -> None:
    model = replace(PACKED, position="learned", layers=1)  # type: ignore[type-var]
    row = assert_red(pool, Case(fault, model, "model"), 4, *tensors)
    assert ("of other documents" in row.verdict) == (tensors is OTHERS)


@pytest.mark.parametrize("fault", [faults.StateNotReset, faults.StateNotResetAtTheRanksEdge])
def test_a_state_that_is_not_reset_is_red(pool: RankPool, fault: type[Strategy]) -> None:
    # of which the first ends at the edge of the second rank
    model = model_preset("tnl-tiny", {"documents": (12, 7, 5), "attention_norm": "head"})
    assert "of other documents" in assert_red(pool, Case(fault, model, "model"), 4).verdict


@pytest.mark.one_in(2)
@pytest.mark.parametrize("placement", ["zigzag", "zigzag_by_document", "by_work"])
def test_documents_longer_than_a_rank_are_green(pool: RankPool, placement: str) -> None:
    assert_green(pool, Case(RingAttention, PACKED, "model", options={"placement": placement}), 4)
