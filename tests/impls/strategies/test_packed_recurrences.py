"""Gated recurrences of packed documents on real ranks: values, every gradient, bytes, and planted faults."""

from __future__ import annotations

import pytest

from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.models.model import Model, model_preset
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.lasp import Lasp
from spbench.impls.strategies.lasp2 import Lasp2
from spbench.impls.strategies.lasp2h import Lasp2H
from spbench.impls.strategies.nesting import Nesting
from spbench.impls.strategies.tensor_parallel import TensorParallel
from spbench.impls.strategies.ulysses import Ulysses
from tests.measure.verify import document_faults as faults
from tests.measure.verify.assertions import assert_green, assert_red
from tests.slow import slow

#: on 4 ranks of 6 positions: one begins right before an edge, one at it, one is longer than a rank; on 2
#: ranks of 12 several lie within one
DOCUMENTS = (5, 1, 11, 7)
MIXERS = ["gated-deltanet-tiny", "mamba2-tiny"]


def packed(name: str, **options: object) -> Model:
    return model_preset(name, {"layers": 1, "documents": DOCUMENTS, **options})


@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        (Lasp, 4),  # by default the others run in tests.measure.verify.test_cases, among variants of models
        *(slow(Lasp, size) for size in (1, 2, 3)),
        *(slow(strategy, size) for strategy in (Lasp2, Ulysses) for size in (1, 2, 3, 4)),
        *(slow(TensorParallel, size) for size in (2, 4)),
    ],
)
@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.covering(1)
def test_values_gradients_and_bytes(pool: RankPool, strategy: type[Strategy], size: int, name: str) -> None:
    assert_green(pool, Case(strategy, packed(name), "model"), size)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_hybrids(pool: RankPool, size: int) -> None:
    assert_green(pool, Case(Lasp2H, packed("hybrid-tiny", layers=2), "model"), size)


@pytest.mark.covering(1)
@pytest.mark.parametrize("outer", [Ulysses, slow(TensorParallel)])
@pytest.mark.parametrize("name", [MIXERS[0], slow(MIXERS[1])])
def test_around_each_other(pool: RankPool, outer: type[Strategy], name: str) -> None:
    nested = Nesting((outer, Lasp2))
    assert_green(pool, Case(nested, packed(name, checkpointing=True), "model"), nested.meshes(4)[0])


@pytest.mark.parametrize(
    ("strategy", "name", "documents"),
    [
        (Lasp, "gated-deltanet-tiny", (65, 3, 64, 8)),
        slow(Lasp2, "gated-deltanet-tiny", (20, 90, 30)),
        slow(Lasp, "mamba2-tiny", (300, 29, 100, 231)),
        slow(Lasp2, "mamba2-tiny", (257, 300, 103)),
    ],
)
def test_documents_of_several_blocks(
    pool: RankPool, strategy: type[Strategy], name: str, documents: tuple[int, ...]
) -> None:
    model = packed(name, state_heads=2, state_key_heads=1, documents=documents)
    assert_green(pool, Case(strategy, model, "attention", batch=1, seq_len=sum(documents)), 2)


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (fault, name) if (i + j) % 2 == 0 else slow(fault, name)
        for i, fault in enumerate(faults.OF_RECURRENCES)
        for j, name in enumerate(MIXERS)
    ],
)
def test_planted_faults_are_red(pool: RankPool, fault: type[Strategy], name: str) -> None:
    row = assert_red(pool, Case(fault, packed(name), "model"), 4, "output")
    assert "of other documents" in row.verdict, row
