"""Packed documents against documents one by one, and the faults that public code has had with them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.models.model import model_preset
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.ring_attention import RingAttention
from spbench.impls.training.step import initialize
from tests.measure.verify import document_faults as faults
from tests.measure.verify.planting import assert_green, assert_red

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
def test_planted_fault_is_red(pool: RankPool, fault: type[Strategy], tensors: tuple[str, ...]) -> None:
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
