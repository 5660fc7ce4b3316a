"""Gated recurrences on real ranks: values, every gradient and the closed forms of bytes; planted faults;
sizes that are refused. Gated recurrences of packed documents on real ranks: values, every gradient, bytes,
and planted faults."""

import pytest
import torch

from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.models.model import Model, model_preset
from spbench.impls.strategies.base import Strategy, Unsupported
from spbench.impls.strategies.lasp import Lasp
from spbench.impls.strategies.lasp2 import Lasp2H
from spbench.impls.strategies.tensor_parallel import TensorParallel
from spbench.impls.strategies.ulysses import Ulysses
from tests.measure.verify import document_faults
from tests.measure.verify import recurrence_faults as faults
from tests.measure.verify.assertions import assert_red
from tests.slow import slow

ONE = {"layers": 1}
#: of Gated DeltaNet with as many heads of keys, of Mamba-2 with fewer
MIXERS = ["gated-deltanet-tiny", "mamba2-tiny"]


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("fault", faults.OF_RECURRENCES)
def test_planted_faults_are_red(pool: RankPool, fault: type[Strategy], name: str) -> None:
    assert_red(pool, Case(fault, model_preset(name, ONE), "attention"), 3, "output y", "gradient of")


@pytest.mark.parametrize(
    ("strategy", "n", "name", "seq_len", "message"),
    [
        (Lasp, 4, "mamba2-tiny", 8, "chunks of 2 positions lack .* 3 rows .* at least 12"),
        (TensorParallel, 3, "mamba2-tiny", 24, "3 ranks do not divide 4 heads of keys of a recurrence"),
        (Ulysses, 5, "mamba2-tiny", 25, "12 attention heads cannot be split over 5 ranks"),
        (Lasp2H, 4, "hybrid-tiny", 24, "a recurrence has no zigzag placement"),
        (
            Lasp2H,
            4,
            "gated-deltanet-tiny",
            24,
            "is for hybrids, which this model is not; use lasp, lasp2",
        ),
        (Lasp2H, 4, "causal-transformer-tiny", 24, "is for hybrids, .* use all_gather_kv"),
    ],
)
def test_sizes_that_are_refused(
    strategy: type[Strategy], n: int, name: str, seq_len: int, message: str
) -> None:
    options = {"placement": "zigzag"} if strategy is Lasp2H else {}
    with pytest.raises(Unsupported, match=message):
        strategy.planned(n, options=options).check(model_preset(name).sites(1, seq_len))


def test_heads_that_ranks_can_share_out_are_sent_as_they_are() -> None:
    strategy, heads = Ulysses.planned(4), torch.zeros(1, 3, 4, 5)
    assert strategy._for_ranks(heads, 2, 4) is heads
    assert strategy._for_ranks(heads[:, :, :2], 2, 4).shape == (1, 3, 4, 5)


#: on 4 ranks of 6 positions: one begins right before an edge, one at it, one is longer than a rank; on 2
#: ranks of 12 several lie within one
DOCUMENTS = (5, 1, 11, 7)


def packed(name: str, **options: object) -> Model:
    return model_preset(name, {"layers": 1, "documents": DOCUMENTS, **options})


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (fault, name) if (i + j) % 2 == 0 else slow(fault, name)
        for i, fault in enumerate(document_faults.OF_RECURRENCES)
        for j, name in enumerate(MIXERS)
    ],
)
def test_planted_faults_are_red_of_documents(pool: RankPool, fault: type[Strategy], name: str) -> None:
    row = assert_red(pool, Case(fault, packed(name), "model"), 4, "output")
    assert "of other documents" in row.verdict, row
