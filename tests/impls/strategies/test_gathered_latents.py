"""Attention to positions that an indexer chooses: the choice and the attention against plain formulas, whole
and by ranks, and the bytes of index scores."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.verify.beside_values import seen_pairs
from spbench.impls.attended import CAUSAL, Attended
from spbench.impls.kernels import chosen_attention as kernels
from spbench.impls.kernels.chosen_attention import Choice, Index, attention_to_chosen, chosen_positions
from spbench.impls.registries import model_preset
from spbench.impls.strategies.gathered_latents import GatheredLatents
from tests.impls.kernels.made import made

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


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_meter_agrees_on_virtual_ranks(recompute: str) -> None:
    asked = {"model": "indexer-tiny", "model_options": {"recompute": recompute, "index_tile": 64}}
    asked |= {"strategy": "gathered_latents", "sizes": {"sp": 4}, "batch": 1, "seq_len": 512}
    measured = VirtualEngine().measure(Cell.model_validate({**asked, "precision": "bf16"}))
    assert measured.formula_difference == []
