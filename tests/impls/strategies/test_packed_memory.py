"""Bytes that a rank of packed sequences keeps, and that its kernels make, against a count from the documents
alone, for random packings.

A fake process group runs one rank on real tensors; what would come from other ranks is never looked at.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from spbench.bench.measure.engines.tracing import fake_mesh
from spbench.bench.measure.verify.beside_values import document_of_positions, seen_pairs
from spbench.impls.attended import Attended
from spbench.impls.kernels import gated_delta_operators, linear_attention, state_space_operators
from spbench.impls.kernels.decay import DecayMask
from spbench.impls.kernels.gated_delta import GatedDelta
from spbench.impls.kernels.recurrence import Rule
from spbench.impls.kernels.state_space import StateSpace
from spbench.impls.place import Place
from spbench.impls.strategies.all_gather_kv import AllGatherKV
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.lasp import Lasp
from spbench.impls.strategies.lasp2 import Lasp2
from spbench.impls.strategies.placements import BALANCED
from spbench.impls.strategies.ring_attention import RingAttention
from tests.impls.kernels.made import bytes_kept, made
from tests.impls.strategies.test_packed_ranks import packings
from tests.slow import mostly_slow, slow

#: batch, heads, heads of keys, features of queries and keys, of values; bytes of a number
B, Z, G, D, A, E = 2, 2, 1, 4, 3, 4
BLOCK = 4


class Made(TorchDispatchMode):
    """Counts the bytes that operators return whose names have a part."""

    def __init__(self, part: str):
        super().__init__()
        self.part, self.nbytes = part, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "spbench" and self.part in func.name():
            for x in result if isinstance(result, tuple) else (result,):
                self.nbytes += x.numel() * x.element_size()
        return result


@dataclass
class Rank:
    """One of a world of fake ranks, and what a packing gives it, by the documents' numbers alone.

    Attributes:
        mine: its positions.
        documents: which document each position of the sequence is of.
    """

    strategy: Strategy
    attended: Attended
    whole: int
    mine: Tensor
    documents: Tensor

    @property
    def length(self) -> int:
        return len(self.mine)

    def parts(self) -> list[int]:
        """How many positions of each document it has, where these are one run."""
        return [len([*run]) for _, run in groupby(self.documents[self.mine].tolist())]

    def goes_on(self) -> bool:
        """Whether its first document began before its first position."""
        first = int(self.mine[0])
        return first > 0 and bool(self.documents[first] == self.documents[first - 1])


def ranks(cls: type[Strategy], count: int, options: dict[str, Any]) -> Iterator[Rank]:
    """A rank of each of some random packings."""
    draw = random.Random(f"{cls.name} {options}")
    for attended, size, length in packings(count, draw.randrange(10**6)):
        seen, whole = Attended(attended.documents), size * length
        with fake_mesh({"sp": size}, draw.randrange(size)) as mesh:
            strategy = cls.configured(Place.on(mesh), options)
            strategy.pack(seen)
            mine = strategy.shard(torch.arange(whole), 0)
            yield Rank(strategy, seen, whole, mine, document_of_positions(seen, whole))


def inputs(rank: Rank, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [made(*shape, dtype=torch.float32, seed=seed) for seed, shape in enumerate(shapes)]


def run(rank: Rank, part: str, forward: Callable[[], Tensor]) -> tuple[int, int, int]:
    """Bytes kept between forward and backward, and made by operators in either."""
    outputs = []
    with Made(part) as before:
        kept = bytes_kept(lambda: outputs.append(forward()))
    with Made(part) as after:
        outputs[0].sum().backward()
    return kept, before.nbytes, after.nbytes


def span(of: Tensor) -> int:
    """From the first that is True to the last."""
    places = of.nonzero().flatten()
    return int(places[-1] - places[0]) + 1 if len(places) else 0


@pytest.mark.parametrize("count", [25, slow(200)])
@pytest.mark.parametrize(
    "placement", mostly_slow(["contiguous", "zigzag", *BALANCED], "contiguous", "by_work")
)
@pytest.mark.parametrize("cls", [RingAttention, AllGatherKV])
def test_softmax_attention(cls: type[Strategy], placement: str, count: int) -> None:
    """Kernels make outputs of the queries from the first to the last that see a block, and gradients of these
    and of the keys from the first to the last that are seen; all that is kept is as of one text."""
    for rank in ranks(cls, count, {"placement": placement}):
        n, mask = rank.length, seen_pairs(rank.attended, rank.whole)[rank.mine]
        q, k, v = inputs(rank, (B, Z, n, D), (B, G, n, D), (B, G, n, D))
        forward = partial(rank.strategy.causal_attention, q, k, v, rank.attended)
        found = run(rank, "flash_attention", forward)
        owners = [Place({"sp": rank.strategy.size}, {"sp": r}) for r in range(rank.strategy.size)]
        blocks = []
        for owner in owners:
            other = cls.configured(owner, {"placement": placement})
            other.pack(rank.attended)
            blocks.append(mask[:, other.shard(torch.arange(rank.whole), 0)])
        if cls is AllGatherKV:  # one block, of all owners from the first to the last that are seen
            met = [number for number, block in enumerate(blocks) if block.any()]
            queries, keys = [n], [n * (met[-1] - met[0] + 1)]
        else:
            queries, keys = [span(each.any(1)) for each in blocks], [span(each.any(0)) for each in blocks]
        of_query, of_key = B * Z * D * E, 2 * B * G * D * E
        kept = n * (2 * of_query + of_key + B * Z * E)
        made_forward = sum(queries) * (of_query + B * Z * E)
        assert found == (kept, made_forward, sum(queries) * of_query + sum(keys) * of_key), rank.attended


@pytest.mark.parametrize("count", [25, slow(200)])
@pytest.mark.parametrize("cls", [Lasp, Lasp2])
def test_linear_attention(cls: type[Strategy], count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state at each edge of each document's blocks is made, and kept."""
    monkeypatch.setattr(linear_attention, "BLOCK", BLOCK)
    for rank in ranks(cls, count, {}):
        n = rank.length
        q, k, v = inputs(rank, (B, Z, n, D), (B, Z, n, D), (B, Z, n, A))
        mask = DecayMask(torch.tensor([0.1, 0.2]), rank.attended)
        found = run(rank, "attention_states", partial(rank.strategy.linear_attention, q, k, v, mask))
        state = B * Z * D * A * E
        states = state * sum(-(-part // BLOCK) + 1 for part in rank.parts())
        initial = state if cls is Lasp2 or rank.goes_on() else 0
        inputs_kept = B * Z * n * (2 * D + A) * E + Z * E  # and the rates
        assert found == (inputs_kept + states + initial, states, 0), rank.attended


@pytest.mark.parametrize("count", [25, slow(200)])
@pytest.mark.parametrize("cls", [Lasp, Lasp2])
@pytest.mark.parametrize("rule", [GatedDelta, StateSpace])
def test_gated_recurrences(
    rule: type[Rule], cls: type[Strategy], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fla's kernels have a state before each block of each document, mamba_ssm's one before each block of the
    chunk; neither keeps them."""
    for module in (gated_delta_operators, state_space_operators):
        monkeypatch.setattr(module, "BLOCK", BLOCK)
    for rank in ranks(cls, count, {}):
        n, strategy = rank.length, rank.strategy
        q, k, v, g, b = inputs(rank, (B, n, G, D), (B, n, G, D), (B, n, Z, A), (B, n, Z), (B, n, Z))
        starts = strategy.document_starts(rank.attended, n)
        forward = partial(strategy.gated_recurrence, rule, q, k, v, g, b, starts=starts)
        block, state = min(BLOCK, n), B * Z * D * A * E
        kept = B * n * (2 * G * D + Z * A + 2 * Z) * E
        if cls is Lasp2 or strategy.rank > 0:
            kept += state
        if rule is GatedDelta:
            blocks = sum(-(-part // block) for part in rank.parts())
            made_forward = blocks * state + B * n * Z * A * E  # and what each position writes
            kept += B * n * Z * (1 + block) * E  # sums of decays, T
            found = run(rank, "gated_delta_states", forward)
        else:
            made_forward = -(-n // block) * state
            found = run(rank, "state_space_passed", forward)
        again = made_forward if rule is GatedDelta else 2 * made_forward  # and those of gradients
        assert found == (kept, made_forward, again), rank.attended
