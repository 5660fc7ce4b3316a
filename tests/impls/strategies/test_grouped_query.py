"""Grouped-query attention over ranks: weights, values, gradients, bytes and what a rank holds. Attention to
positions that an indexer chooses: the choice and the attention against plain formulas, whole and by ranks,
and the bytes of index scores.
"""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.beside_values import seen_pairs
from spbench.bench.measure.verify.cases import verify_case
from spbench.bench.measure.verify.oracle import check_rank
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.attended import CAUSAL, Attended
from spbench.impls.kernels import chosen_attention as kernels
from spbench.impls.kernels.chosen_attention import Choice, Index, attention_to_chosen, chosen_positions
from spbench.impls.models.model import Model
from spbench.impls.registries import all_backends, model_preset, strategy_class
from spbench.impls.strategies.base import Strategy, Unsupported, shard_of
from spbench.impls.strategies.gathered_latents import GatheredLatents
from spbench.impls.strategies.nesting import nesting
from spbench.impls.strategies.placements import PLACEMENTS
from spbench.impls.strategies.tensor_parallel import TensorParallel
from spbench.impls.training.step import initialize
from tests.impls.kernels.made import made
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


@pytest.mark.parametrize("backend", mostly_slow(sorted(all_backends()), "megatron"))
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
    """8 fewer heads of keys and values are, in bfloat16, 2 x 8 x 4 x 2 bytes fewer a token and layer."""
    peaks = {}
    for kv_heads in (12, 4):
        for seq_len in (4096, 8192):
            options = {"qk_norm": False, "vocabulary": 8, "layers": 3}
            asked = cell(
                "single", {}, kv_heads, batch=1, seq_len=seq_len, precision="bf16", model_options=options
            )
            peaks[kv_heads, seq_len] = tracing.trace(asked).memory.peak().held["activations"]
    a_token = {n: (peaks[n, 8192] - peaks[n, 4096]) / 4096 for n in (12, 4)}
    assert a_token[12] - a_token[4] == 3 * 2 * 8 * 4 * 2


def test_ranks_of_a_group_time_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of two ranks out of four, simulated one for all or each alone, take as long a step."""
    asked = cell("tensor_parallel", {"tp": 4, "dp": 2}, 2, precision="bf16")
    folded = VirtualEngine().measure(asked)
    monkeypatch.setenv(tracing.PLAIN_TRACE, "1")
    assert folded.step_time_s == pytest.approx(VirtualEngine().measure(asked).step_time_s, rel=1e-12)
    assert folded.step_time_s


B, L, Z, F, C, J, D, K = 2, 24, 3, 7, 5, 3, 4, 6
PACKED = Attended((7, 1, 11, 5))


def how(**changed: Any) -> Choice:
    return Choice(K, 0, "chosen", C, 0.4, CAUSAL)._replace(**changed)


def index() -> Index:
    weights = made(B, L, J, seed=3).detach()
    return Index(made(B, L, J, D, seed=1).detach(), made(B, L, D, seed=2).detach(), weights)


def part(of: Index, first: int, length: int) -> Index:
    """What the indexer makes of some positions' queries, with the keys of all positions."""
    mine = slice(first, first + length)
    return Index(of.queries[:, mine], of.keys, of.weights[:, mine])


def best_by_hand(of: Index, attended: Attended) -> list[list[set[int]]]:
    """The positions that each query chooses, by a sort of (score, position) in plain Python."""
    scores = torch.einsum("bmjd,bld->bmjl", of.queries, of.keys).relu().mul(of.weights.unsqueeze(-1)).sum(2)
    seen = seen_pairs(attended, L)
    return [
        [
            set(sorted(seen[m].nonzero().flatten().tolist(), key=lambda s: (-float(row[m, s]), s))[:K])
            for m in range(L)
        ]
        for row in scores
    ]


@pytest.mark.parametrize("attended", [CAUSAL, PACKED], ids=["one text", "documents"])
@pytest.mark.parametrize("way", kernels.WAYS)
def test_the_best_positions_are_chosen_and_the_first_of_equal_ones(way: str, attended: Attended) -> None:
    of = index()
    chosen = chosen_positions(of, how(way=way, attended=attended))
    sets = [[{n for n in row.tolist() if n >= 0} for row in sample] for sample in chosen]
    assert sets == best_by_hand(of, attended)
    zero = Index(of.queries, of.keys, torch.zeros_like(of.weights))  # all scores are equal
    assert chosen_positions(zero, how(way=way))[0, 20].tolist() == [*range(K)]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("tile", [0, 5])
@pytest.mark.parametrize("attended", [CAUSAL, PACKED], ids=["one text", "documents"])
def test_ranks_choose_what_one_device_chooses(ranks: int, tile: int, attended: Attended) -> None:
    of, length = index(), L // ranks
    whole = chosen_positions(of, how(attended=attended))
    parts = [
        chosen_positions(part(of, first, length), how(attended=attended, tile=tile), first)
        for first in range(0, L, length)
    ]
    assert torch.equal(torch.cat(parts, 1), whole)


def dense(q: Tensor, rows: Tensor, chosen: Tensor) -> Tensor:
    """Attention by all scores under the mask of chosen positions."""
    hidden = torch.ones(B, L, L, dtype=torch.bool)
    for b, m, place in product(range(B), range(L), range(chosen.shape[-1])):
        if (key := int(chosen[b, m, place])) >= 0:
            hidden[b, m, key] = False
    scores = torch.einsum("bmzf,blf->bmzl", q, rows) * 0.4
    p = scores.masked_fill(hidden.unsqueeze(2), -torch.inf).softmax(-1)
    return torch.einsum("bmzl,blc->bmzc", p, rows[..., :C])


@pytest.mark.parametrize("way", kernels.WAYS)
def test_attention_is_dense_attention_under_the_mask_with_its_gradients(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_TILE", 7)
    q, rows, of = made(B, L, Z, F, seed=4), made(B, L, F, seed=5), index()
    o = attention_to_chosen(q, rows, of, how(way=way))
    expected = dense(q, rows, chosen_positions(of, how()))
    torch.testing.assert_close(o, expected, rtol=1e-12, atol=1e-14)
    weight = made(*o.shape, seed=6).detach()
    ours, theirs = (torch.autograd.grad((y * weight).sum(), (q, rows)) for y in (o, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


def test_gradients_are_those_of_differences() -> None:
    q, rows, of = made(B, L, Z, F, seed=4), made(B, L, F, seed=5), index()
    q, rows = q[:, :6].detach().requires_grad_(), rows[:, :8].detach().requires_grad_()
    few = Index(of.queries[:, :6], of.keys[:, :8], of.weights[:, :6])
    assert torch.autograd.gradcheck(lambda *x: attention_to_chosen(*x, few, how(), 2), (q, rows))


class _Results(TorchDispatchMode):
    """The largest result of each operator, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func._schema.name.split("::")[1]
        if isinstance(result, Tensor):
            self.largest[name] = max(self.largest.get(name, 0), result.nbytes)
        return result


@pytest.mark.parametrize(
    ("way", "tile", "operator", "expected"),
    [
        ("chosen", 0, "index_scores", 4096 * 131072 * 4),
        ("chosen", 256, "index_scores", 256 * 131072 * 4),
        # "the indexer scores alone are 64 GiB": huggingface/transformers, pull request 48788
        ("masked", 0, "_unsafe_view", 64 * 2**30),
    ],
)
def test_bytes_of_index_scores(way: str, tile: int, operator: str, expected: int) -> None:
    """Of GLM-5's indexer, for 4,096 queries and 128K keys: one number a pair in float32, for each head where
    all scores are in memory."""
    glm = model_preset("glm-5")
    heads, size = glm.index_n_heads, glm.index_head_dim  # type: ignore[attr-defined]
    asked = how(most=2048, way=way, tile=tile)
    with FakeTensorMode(), _Results() as results:
        queries, keys = torch.empty(1, 4096, heads, size), torch.empty(1, 131072, size)
        of = Index(queries.bfloat16(), keys.bfloat16(), torch.empty(1, 4096, heads).bfloat16())
        assert chosen_positions(of, asked).shape == (1, 4096, 2048)
    assert results.largest[operator] == expected


def test_a_rank_sends_latents_and_index_keys() -> None:
    """In each of DeepSeek-V3.2's layers 512 + 64 and 128 numbers a position, and back 512 + 64 gradients."""
    model = model_preset("deepseek-v3.2", {"layers": 1, "experts": 0, "mtp_layers": 0})
    sites = [s for s in model.sites(1, 4096) if s.kind == "indexed_attention"]
    entries = GatheredLatents.planned(8).traffic(sites, 2)
    assert [(t.phase, t.collective, t.payload_bytes) for t in entries] == [
        ("forward", "all_gather", 4096 * 128 * 2),
        ("forward", "all_gather", 4096 * 576 * 2),
        ("backward", "reduce_scatter", 4096 * 576 * 2),
    ]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("model", ["indexer-tiny", "blocks-tiny"])
def test_the_meter_agrees_on_virtual_ranks(model: str, recompute: str) -> None:
    asked = {"model": model, "model_options": {"recompute": recompute, "index_tile": 64}}
    asked |= {"strategy": "gathered_latents", "sizes": {"sp": 4}, "batch": 1, "seq_len": 512}
    measured = VirtualEngine().measure(Cell.model_validate({**asked, "precision": "bf16"}))
    assert measured.formula_difference == []
