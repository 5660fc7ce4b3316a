"""Grouped-query attention over ranks: weights, values, gradients, bytes and what a rank holds."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.cases import verify_case
from spbench.bench.measure.verify.oracle import check_rank
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.models.model import Model
from spbench.impls.registries import all_backends, model_preset, strategy_class
from spbench.impls.strategies.base import Strategy, Unsupported, shard_of
from spbench.impls.strategies.nesting import nesting
from spbench.impls.strategies.placements import PLACEMENTS
from spbench.impls.strategies.tensor_parallel import TensorParallel
from spbench.impls.training.step import initialize
from tests.measure.verify.assertions import assert_green
from tests.slow import mostly_slow, slow

#: 12 heads, 4 of keys and values, norms of queries and keys
MODEL = "causal-transformer-tiny-gqa"
HEADS, HEAD_SIZE, HIDDEN = 12, 4, 48
SPLITTING = ("tensor_parallel", "megatron_sp")


def grouped(kv_heads: int, **options: Any) -> Model:
    return model_preset(MODEL, {"kv_heads": kv_heads, **options})


def fits(strategy: str, kv_heads: int, n: int) -> bool:
    return strategy not in SPLITTING or kv_heads % n == 0 or n % kv_heads == 0


# -- weights ---------------------------------------------------------------------------------------------

PARTS = [(4, 2), (4, 4), (4, 12), (2, 2), (2, 4), (2, 6), (2, 12), (1, 2), (1, 3), (1, 12)]


def projection(kv_heads: int, strategy: Strategy) -> torch.nn.Module:
    made = strategy.grouped_query_linear_in(HIDDEN, HEAD_SIZE, HEADS, kv_heads).double()
    initialize(made, 0, deviation=0.2)
    return made


@pytest.mark.parametrize(("kv_heads", "n"), PARTS)
def test_parts_of_the_weight_make_the_heads_of_the_whole(kv_heads: int, n: int) -> None:
    """Queries in the order of ranks, and to each of a rank's groups the key and the value of its queries."""
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64)
    q, k, v = projection(kv_heads, Strategy())(x)
    queries = []
    for rank in range(n):
        part = projection(kv_heads, TensorParallel.planned(n, rank))
        mine, keys, values = part(x)
        queries.append(mine.flatten(2, 3))
        groups = [rank * (HEADS // n) * kv_heads // HEADS + i for i in range(max(1, kv_heads // n))]
        torch.testing.assert_close(keys, k[:, :, groups])
        torch.testing.assert_close(values, v[:, :, groups])
        shard = shard_of(part.weight)  # type: ignore[arg-type]
        assert shard.full_shape(part.weight.shape) == [kv_heads, (HEADS // kv_heads + 2) * HEAD_SIZE, HIDDEN]  # type: ignore[arg-type,union-attr]
    torch.testing.assert_close(torch.cat(queries, 2), q.flatten(2, 3))


@pytest.mark.parametrize(
    ("kv_heads", "n", "mend"), [(4, 3, "2 or 4"), (4, 6, "4 or 12"), (2, 3, "2 or 4"), (6, 4, "3 or 6")]
)
@pytest.mark.parametrize("strategy", SPLITTING)
def test_nearest_sizes_are_told(strategy: str, kv_heads: int, n: int, mend: str) -> None:
    message = f"{n} ranks neither divide {kv_heads} heads of keys and values nor are a multiple; use {mend}"
    with pytest.raises(Unsupported, match=message):
        strategy_class(strategy).planned(n).check(grouped(kv_heads).sites(1, 24))


@pytest.mark.parametrize("kv_heads", [None, 12])
def test_as_many_heads_of_keys_are_no_groups(kv_heads: int | None) -> None:
    """Weights, names and sites are those of a model without the option."""
    plain = model_preset("causal-transformer-tiny")
    same = model_preset("causal-transformer-tiny", {"kv_heads": kv_heads})
    assert same.sites(3, 24) == plain.sites(3, 24)
    shapes = ({n: p.shape for n, p in m.build(Strategy(), 24).named_parameters()} for m in (plain, same))
    assert next(shapes) == next(shapes)


# -- values ----------------------------------------------------------------------------------------------


def on_ranks() -> Iterator[Any]:
    """Strategies, their ranks and options; of 3 ranks, and of 4 where heads are split, in the default run."""
    for strategy in (*SPLITTING, "ulysses"):
        for n in (2, 3, 4):
            yield (strategy, n, {}) if n > 2 else slow(strategy, n, {})
    for placement in PLACEMENTS:
        for n in (2, 3):
            case = "ring_attention", n, {"placement": placement}
            yield case if (n, placement) == (3, "zigzag") else slow(*case)
    yield "ring_attention", 2, {"placement": "zigzag", "repeated_keys": True}
    yield "ring_attention", 2, {"placement": "zigzag", "barrier": True}
    yield "single", 1, {}


@pytest.mark.covering(1)
@pytest.mark.parametrize("kv_heads", [4, slow(2), 1])
@pytest.mark.parametrize(("strategy", "n", "options"), [*on_ranks()])
def test_outputs_and_gradients(
    pool: RankPool, strategy: str, n: int, options: Mapping[str, Any], kv_heads: int
) -> None:
    model = grouped(kv_heads, checkpointing=kv_heads == 2)
    row = verify_case(pool, Case(strategy_class(strategy), model, "model", options=options), n)
    assert row.status == ("green" if fits(strategy, kv_heads, n) else "unsupported"), row


def worst(pool: RankPool, strategy: str, sizes: dict[str, int], kv_heads: int) -> tuple[float, str]:
    case: Any = Case(nesting(strategy), grouped(kv_heads), "model")  # type: ignore[arg-type]
    return max((f.discrepancy.error, f.tensor) for rank in pool.run(sizes, check_rank, case) for f in rank)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kv_heads", [slow(4), 1])
@pytest.mark.parametrize("outer", SPLITTING)
@pytest.mark.parametrize("inner", ["ring_attention", "ulysses"])
def test_around_each_other(pool: RankPool, outer: str, inner: str, kv_heads: int) -> None:
    assert worst(pool, f"{outer}+{inner}", {"tp": 2, "sp": 2}, kv_heads)[0] < 1e-10


@pytest.mark.parametrize("backend", mostly_slow(sorted(all_backends()), "fsdp_flat"))
def test_backends_hold_replicas(pool: RankPool, backend: str) -> None:
    case = Case(TensorParallel, grouped(2), "model", backend=backend)
    assert_green(pool, case, 4)


# -- what a step sends -----------------------------------------------------------------------------------


def cell(strategy: str, sizes: dict[str, int], kv_heads: int, **changes: Any) -> Cell:
    options = {"kv_heads": kv_heads, **changes.pop("model_options", {})}
    settings = {"model": MODEL, "strategy": strategy, "sizes": sizes, "batch": 4, "seq_len": 72}
    return Cell.model_validate(settings | {"model_options": options, "cluster": "dgx-a100"} | changes)


@pytest.mark.parametrize("precision", ["fp16", slow("fp32")])
@pytest.mark.parametrize("n", mostly_slow((2, 4, 6, 12), 4))
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("strategy", SPLITTING)
def test_formula_is_what_virtual_ranks_send(strategy: str, kv_heads: int, n: int, precision: str) -> None:
    if not fits(strategy, kv_heads, n):
        pytest.skip("refused")
    asked = cell(strategy, {"tp": n, "dp": 2}, kv_heads, precision=precision)
    measured = VirtualEngine().measure(asked)
    assert (measured.status, measured.formula_difference) == ("ok", [])
    replicated = [row for row in measured.formula if "replicated" in row["purpose"]]
    assert sum(row["count"] for row in replicated) == (2 if n > kv_heads else 0)  # layers


@pytest.mark.slow
def test_memory_of_keys_falls_with_their_heads() -> None:
    """8 of 12 heads of keys and values fewer are, in bfloat16, 2 x 8 x 4 x 2 bytes a token fewer."""
    peaks = {}
    for kv_heads in (12, 4):
        for seq_len in (4096, 8192):
            options = {"qk_norm": False, "vocabulary": 8, "layers": 3}
            asked = cell(
                "single", {}, kv_heads, batch=1, seq_len=seq_len, precision="bf16", model_options=options
            )
            peaks[kv_heads, seq_len] = tracing.trace(asked).memory.peak().nbytes
    a_token = {n: (peaks[n, 8192] - peaks[n, 4096]) / 4096 for n in (12, 4)}
    assert a_token[12] - a_token[4] >= 3 * 2 * 8 * 4 * 2


def test_ranks_of_a_group_time_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of two ranks out of four, simulated one for all or each alone, take as long a step."""
    asked = cell("tensor_parallel", {"tp": 4, "dp": 2}, 2, precision="bf16")
    folded = VirtualEngine().measure(asked)
    monkeypatch.setenv(tracing.PLAIN_TRACE, "1")
    assert folded.step_time_s == pytest.approx(VirtualEngine().measure(asked).step_time_s, rel=1e-12)
    assert folded.step_time_s
