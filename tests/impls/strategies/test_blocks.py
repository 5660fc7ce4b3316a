"""DeepSeek-V4's attention to blocks of positions, against its formulas in plain loops, and its messages.

Beyond these tests, layers C and H were compared once with transformers 5.24's DeepseekV4Attention, in float64
with the same weights: outputs and gradients differ by 1e-7, the rounding of its norms in float32.
"""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from spbench.impls import model_preset
from spbench.impls.attended import Attended
from spbench.impls.kernels import chosen_attention as kernels
from spbench.impls.kernels.chosen_attention import Choice, Index, Near, attention_to_chosen
from spbench.impls.models.blocks.compressed_mixer import Blocks
from spbench.impls.strategies.gathered_latents import GatheredLatents
from spbench.impls.training.step import initialize
from tests.impls.strategies.test_grouped_query import made

FLASH = "deepseek-v4-flash-without-mhc"
B, L, Z, A, M, W, J, D, K = 2, 12, 3, 6, 2, 4, 3, 4, 2


@pytest.mark.parametrize("letter", ["C", "H"])
def test_a_row_is_the_sum_of_a_block_weighted_by_gates_for_each_feature(letter: str) -> None:
    model: Any = model_preset("blocks-tiny", {"pattern": letter, "hca_block": 3})
    kind = model.mixing(0)
    maker = Blocks(kind, model, A)
    initialize(maker, 0, deviation=1.0, everything=True)
    maker.double()
    projected = maker.projected(x := made(B, L, model.hidden, seed=1))
    before = torch.zeros_like(projected[:, :, :1, :, :A]) if letter == "C" else None
    rows = maker(projected, before, first=True)
    m, values, gates, sums = kind.block, maker.values(x), maker.gates(x), torch.empty_like(rows)
    for b, block, feature in product(range(B), range(L // m), range(A)):
        # of a block that overlaps, the first features of the block before, and its own last ones
        parts = [(block - 1, feature), (block, A + feature)] if letter == "C" else [(block, feature)]
        places = [(n * m + place, place, f) for n, f in parts if n >= 0 for place in range(m)]
        weights = torch.stack([gates[b, at, f] + maker.bias[place, f] for at, place, f in places]).softmax(0)
        sums[b, block, feature] = sum(
            w * values[b, at, f] for w, (at, _, f) in zip(weights, places, strict=True)
        )
    torch.testing.assert_close(rows, maker.norm(sums), rtol=1e-12, atol=1e-13)


def seen_by(query: int, scores: Tensor | None) -> list[int]:
    """The places of a query's keys in the rows of L + W - 1 positions, then of blocks, in plain Python."""
    window = [s + W - 1 for s in range(max(0, query - W + 1), query + 1)]
    blocks = [j for j in range(L // M) if (j + 1) * M <= query + 1]
    if scores is not None:
        blocks = sorted(blocks, key=lambda j: (-float(scores[j]), j))[:K]
    return window + [L + W - 1 + j for j in blocks]


@pytest.mark.parametrize("way", kernels.WAYS)
@pytest.mark.parametrize("chooses", [True, False], ids=["CSA", "HCA"])
def test_attention_is_dense_attention_under_the_mask_with_sinks(way: str, chooses: bool) -> None:
    q, rows, sinks = made(B, L, Z, A, seed=1), made(B, L // M, A, seed=2), made(Z, seed=3)
    near = torch.cat((torch.zeros(B, W - 1, A, dtype=torch.float64), own := made(B, L, A, seed=4)), 1)
    made_of = made(B, L, J, D, seed=5), made(B, L // M, D, seed=6), made(B, L, J, seed=7)
    of = Index(*(x.detach() for x in made_of))
    scores = torch.einsum("bmjd,bld->bmjl", of.queries, of.keys).relu().mul(of.weights.unsqueeze(-1)).sum(2)
    how = Choice(K, 0, way, A, 0.4, Attended(), M)
    o = attention_to_chosen(q, rows, of if chooses else None, how, 0, Near(near, sinks))
    hidden = torch.ones(B, L, 1, L + W - 1 + L // M, dtype=torch.bool)
    for b, query in product(range(B), range(L)):
        hidden[b, query, 0, seen_by(query, scores[b, query] if chooses else None)] = False
    every = torch.cat((near, rows), 1)
    logits = (torch.einsum("bmzf,blf->bmzl", q, every) * 0.4).masked_fill(hidden, -torch.inf)
    exp = logits.exp()
    expected = exp @ every.unsqueeze(1) / (exp.sum(-1) + sinks.exp()).unsqueeze(-1)
    torch.testing.assert_close(o, expected, rtol=1e-12, atol=1e-14)
    weight, inputs = made(*o.shape, seed=8).detach(), (q, rows, own, sinks)
    ours, theirs = (torch.autograd.grad((y * weight).sum(), inputs) for y in (o, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


def test_a_rank_sends_blocks_and_what_lies_across_its_edge() -> None:
    """Of DeepSeek-V4-Flash's layers: a window, CSA and HCA, for 64K positions on eight ranks."""
    length, element = 2**16, 2
    sent = {}
    for letter in "WCH":
        model = model_preset(FLASH, {"layers": 1, "pattern": letter, "experts": 0})
        entries = GatheredLatents.planned(8).traffic(model.sites(1, length), element)
        sent[letter] = [(t.phase, t.collective, t.payload_bytes) for t in entries]
    passed = {"W": 127 * 512, "H": 127 * 512, "C": 127 * 512 + 4 * 2 * (512 + 128)}
    edges = {of: [(way, "send", n * element) for way in ("forward", "backward")] for of, n in passed.items()}
    assert {of: entries[:2] for of, entries in sent.items()} == edges
    row = 512 * element
    assert sent["W"][2:] == []
    assert sent["C"][2:] == [
        ("forward", "all_gather", length // 4 * 128 * element),
        ("forward", "all_gather", length // 4 * row),
        ("backward", "reduce_scatter", length // 4 * row),
    ]
    assert [nbytes for *_, nbytes in sent["H"][2:]] == [length // 128 * row] * 2


def test_deepseek_v4_flash_has_its_published_parameters() -> None:
    """284e9, published with its weights; hyper-connections, left out, are 0.03e9."""
    model: Any = model_preset(FLASH)
    assert model.parameters(model.vocabulary)["elements"] == pytest.approx(284e9, rel=5e-3)
