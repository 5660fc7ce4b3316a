"""Bytes that a rank of packed sequences keeps, and that its kernels make, against a count from the documents
alone, for random packings. A fake process group runs one rank on real tensors; what would come from other
ranks is never looked at. What a rank attends to and holds of packed sequences, against a mask of all pairs,
for random packings."""

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
from spbench.bench.measure.engines.unlike_ranks import MOST_SETS, Load, roles_by_load
from spbench.bench.measure.verify.beside_values import document_of_positions, seen_pairs
from spbench.impls.attended import Attended
from spbench.impls.kernels import gated_delta_operators, linear_attention, state_space_operators
from spbench.impls.kernels.decay import DecayMask
from spbench.impls.kernels.gated_delta import GatedDelta
from spbench.impls.kernels.ranged_attention import Seen
from spbench.impls.kernels.recurrence import Rule
from spbench.impls.kernels.state_space import StateSpace
from spbench.impls.layout import Unsupported
from spbench.impls.models.model import model_preset
from spbench.impls.place import Place
from spbench.impls.strategies.all_gather_kv import AllGatherKV, joint_meetings
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.lasp import Lasp
from spbench.impls.strategies.lasp2 import Lasp2
from spbench.impls.strategies.meetings import Meetings
from spbench.impls.strategies.placed_chunks import PlacedChunks
from spbench.impls.strategies.placements import BALANCED
from spbench.impls.strategies.ring_attention import RingAttention
from tests.impls.kernels.made import bytes_kept, made
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


PLACEMENTS = ("contiguous", "zigzag", *BALANCED)


def packings(count: int, seed: int) -> Iterator[tuple[Attended, int, int]]:
    """(what is attended, ranks, positions of a rank): documents of one position to all, half of them with a
    window."""
    draw = random.Random(seed)
    for _ in range(count):
        size, length = draw.randint(2, 5), 2 * draw.randint(1, 12)
        documents, left = [], size * length
        while left:
            documents.append(draw.randint(1, draw.choice((3, left, left))) if left > 3 else left)
            left -= documents[-1]
        window = draw.choice((None, draw.randint(1, size * length)))
        yield Attended(tuple(documents), window), size, length


def planned(cls: type[PlacedChunks], size: int, placement: str, attended: Attended) -> list[PlacedChunks]:
    ranks = [cls.planned(size, rank, {"placement": placement}) for rank in range(size)]
    for strategy in ranks:
        strategy.pack(attended)
    return ranks


def count(met: Tensor, seen: Seen) -> None:
    """Add the pairs of a block [queries, keys] that its queries see."""
    if isinstance(seen, bool):
        met.add_(torch.ones_like(met).tril_() if seen else 1)
        return
    for each in seen:
        part = met[each.first_query :, each.first_key :][: each.queries, : each.keys]
        back = torch.arange(each.keys) - torch.arange(each.queries)[:, None]
        part.add_(((back >= each.low) & (back <= each.high)).int())


@pytest.mark.parametrize("packed", [25, slow(200)])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("strategy", [RingAttention, AllGatherKV])
def test_ranks_attend_to_what_a_mask_says(strategy: type[PlacedChunks], placement: str, packed: int) -> None:
    for attended, size, length in packings(packed, PLACEMENTS.index(placement)):
        mask, ranks = seen_pairs(attended, size * length).int(), planned(strategy, size, placement, attended)
        places = [each.shard(torch.arange(size * length), 0) for each in ranks]
        assert torch.equal(torch.cat(places).sort()[0], torch.arange(size * length))
        for each, mine in zip(ranks, places, strict=True):
            assert len(mine) == length
            meetings = Meetings(placement, each.rank, size, length, attended)
            expected = torch.stack([mask[mine][:, theirs] for theirs in places], 1)  # [queries, ranks, keys]
            met = torch.zeros_like(expected)
            if strategy is RingAttention:
                for owner in range(size):
                    if (found := meetings.of(owner)) is not None:
                        queries, keys, seen = found
                        count(met[queries, owner, keys], seen)
                        # no more rows are computed or held than see something
                        rows = expected[:, owner].any(1).nonzero().flatten()
                        assert (queries.start or 0, queries.indices(length)[1]) == (rows[0], rows[-1] + 1)
                    else:
                        assert not expected[:, owner].any()
            else:
                ((owners, _, _, seen),) = joint_meetings(meetings)
                block = torch.zeros_like(met[:, owners]).flatten(1)
                count(block, seen)
                met[:, owners] = block.unflatten(1, (-1, length))
            assert torch.equal(met, expected)
            assert each.attended_pairs(attended, size * length) == expected.sum()


@pytest.mark.parametrize("placement", BALANCED)
def test_placements_by_documents_are_even(placement: str) -> None:
    """Over the lengths that MagiAttention has, at 128K tokens on 8 ranks."""
    attended = model_preset("causal-transformer-tiny", {"documents": "magi-attention"}).attended(2**17)
    pairs = [each.attended_pairs(attended, 2**17) for each in planned(RingAttention, 8, placement, attended)]
    assert sum(pairs) == int(attended.pairs([(0, 2**17)]).sum())
    assert max(pairs) * 8 < 1.01 * sum(pairs)


def test_sets_of_ranks_have_the_heaviest_first() -> None:
    assert roles_by_load([[3, 0, 1, 2]], [Load(n) for n in (5, 7, 5, 7)]) == [[1, 3], [0, 2]]
    parts = [Load(5, 1, (4,)), Load(5, 2, (2, 2)), Load(5, 2, (2, 2)), Load(5, 2, (3, 1))]
    assert roles_by_load([[0, 1, 2, 3]], parts) == [[3], [1, 2], [0]]
    many = roles_by_load([[*range(1000)]], [Load(n) for n in range(1000)])
    assert len(many) == MOST_SETS
    assert sorted(rank for ranks in many for rank in ranks) == [*range(1000)]
    # the heaviest alone; of all sets the first stands for its mean
    assert many[0] == [999]
    assert sum(ranks[0] * len(ranks) for ranks in many) == sum(range(1000))


def test_stripes_have_no_documents() -> None:
    model = model_preset("causal-transformer-tiny", {"documents": [5, 7]})
    with pytest.raises(Unsupported, match="striped placement; use placement contiguous or zigzag"):
        RingAttention.planned(2, 0, {"placement": "striped"}).check(model.sites(1, 24))
