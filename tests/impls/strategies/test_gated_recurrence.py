"""Gated recurrences on real ranks: values, every gradient and the closed forms of bytes; planted faults;
sizes that are refused. Gated recurrences of packed documents on real ranks: values, every gradient, bytes,
and planted faults."""

from typing import Any

import pytest
import torch

from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.models.model import Model, model_preset
from spbench.impls.strategies.base import Strategy, Unsupported
from spbench.impls.strategies.lasp import Lasp
from spbench.impls.strategies.lasp2 import Lasp2, Lasp2H
from spbench.impls.strategies.megatron_sp import MegatronSP
from spbench.impls.strategies.nesting import Nesting
from spbench.impls.strategies.tensor_parallel import TensorParallel
from spbench.impls.strategies.ulysses import Ulysses
from tests.measure.verify import document_faults
from tests.measure.verify import recurrence_faults as faults
from tests.measure.verify.assertions import assert_green, assert_red
from tests.slow import slow

ONE = {"layers": 1}
#: of Gated DeltaNet with as many heads of keys, of Mamba-2 with fewer
MIXERS = ["gated-deltanet-tiny", "mamba2-tiny"]
STRATEGIES = [Lasp, Lasp2, Ulysses, TensorParallel, MegatronSP]


@pytest.mark.covering(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MIXERS)
def test_values_gradients_and_bytes(pool: RankPool, strategy: type[Strategy], name: str) -> None:
    assert_green(pool, Case(strategy, model_preset(name, {"checkpointing": True} | ONE), "model"), 4)


@pytest.mark.parametrize(
    ("strategy", "n", "seq_len", "options"),
    [
        (Ulysses, 3, 24, {}),  # 4 heads of keys become 12
        (Lasp2, 3, 24, {}),
        (Lasp, 2, 6, {}),  # chunks that are no longer than a convolution's halo
        slow(Lasp, 3, 24, {}),
        slow(Lasp2, 2, 6, {}),
        slow(Ulysses, 2, 24, {}),
    ],
)
def test_other_sizes(
    pool: RankPool, strategy: type[Strategy], n: int, seq_len: int, options: dict[str, Any]
) -> None:
    model = model_preset("mamba2-tiny", options | ONE)
    assert_green(pool, Case(strategy, model, "model", seq_len=seq_len), n)


def test_states_are_gathered_or_keys_and_values(pool: RankPool) -> None:
    for name in ("hybrid-tiny", "linear-llama3-tiny-hybrid"):
        assert_green(pool, Case(Lasp2H, model_preset(name), "model"), 3)


@pytest.mark.parametrize("name", MIXERS)
def test_heads_that_ranks_do_not_divide_are_padded(pool: RankPool, name: str) -> None:
    model = model_preset(name, {"state_heads": 6, "state_key_heads": 2} | ONE)
    assert_green(pool, Case(Ulysses, model, "model", options={"pad_heads": True}), 4)


@pytest.mark.parametrize(
    ("strategy", "name", "seq_len"),
    [
        (Lasp, "gated-deltanet-tiny", 2 * 70),
        slow(Lasp2, "gated-deltanet-tiny", 2 * 140),
        slow(Lasp, "mamba2-tiny", 2 * 330),
        slow(Lasp2, "mamba2-tiny", 2 * 330),
    ],
)
def test_chunks_of_several_blocks_and_a_rest(
    pool: RankPool, strategy: type[Strategy], name: str, seq_len: int
) -> None:
    model = model_preset(name, {"state_heads": 2, "state_key_heads": 1} | ONE)
    assert_green(pool, Case(strategy, model, "attention", batch=1, seq_len=seq_len), 2)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("outer", [Ulysses, TensorParallel])
def test_around_each_other(pool: RankPool, outer: type[Strategy], name: str) -> None:
    nested = Nesting((outer, Lasp2))
    assert_green(pool, Case(nested, model_preset(name, ONE), "model"), nested.meshes(4)[0])


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
def test_values_and_bytes_of_documents(
    pool: RankPool, strategy: type[Strategy], size: int, name: str
) -> None:
    assert_green(pool, Case(strategy, packed(name), "model"), size)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_hybrids(pool: RankPool, size: int) -> None:
    assert_green(pool, Case(Lasp2H, packed("hybrid-tiny", layers=2), "model"), size)


@pytest.mark.covering(1)
@pytest.mark.parametrize("outer", [Ulysses, slow(TensorParallel)])
@pytest.mark.parametrize("name", [MIXERS[0], slow(MIXERS[1])])
def test_around_each_other_of_documents(pool: RankPool, outer: type[Strategy], name: str) -> None:
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
        for i, fault in enumerate(document_faults.OF_RECURRENCES)
        for j, name in enumerate(MIXERS)
    ],
)
def test_planted_faults_are_red_of_documents(pool: RankPool, fault: type[Strategy], name: str) -> None:
    row = assert_red(pool, Case(fault, packed(name), "model"), 4, "output")
    assert "of other documents" in row.verdict, row
