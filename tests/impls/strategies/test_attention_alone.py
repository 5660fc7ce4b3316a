"""Attention alone on real ranks: values, all three gradients, bytes, and sizes that strategies refuse. The
attention of UPipe's rounds: one graph for all of them.
Gated recurrences on real ranks: values, every gradient and the closed forms of bytes; planted faults;
sizes that are refused. Gated recurrences of packed documents on real ranks: values, every gradient, bytes,
and planted faults.
Bytes that a rank of packed sequences keeps, and that its kernels make, against a count from the documents
alone, for random packings. A fake process group runs one rank on real tensors; what would come from other
ranks is never looked at. What a rank attends to and holds of packed sequences, against a mask of all pairs,
for random packings."""

import gc
import random
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from spbench.bench.measure.engines.tracing import fake_mesh
from spbench.bench.measure.engines.unlike_ranks import MOST_SETS, Load, roles_by_load
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.beside_values import document_of_positions, seen_pairs
from spbench.bench.measure.verify.cases import verify_case
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.attended import Attended
from spbench.impls.kernels import gated_delta_operators, linear_attention, state_space_operators
from spbench.impls.kernels.decay import DecayMask
from spbench.impls.kernels.gated_delta import GatedDelta
from spbench.impls.kernels.ranged_attention import Seen
from spbench.impls.kernels.recurrence import Rule
from spbench.impls.kernels.state_space import StateSpace
from spbench.impls.models.model import Model
from spbench.impls.place import Place
from spbench.impls.registries import model_preset
from spbench.impls.strategies.all_gather_kv import AllGatherKV, joint_meetings
from spbench.impls.strategies.base import Strategy, Unsupported
from spbench.impls.strategies.lasp import Lasp
from spbench.impls.strategies.lasp2 import Lasp2
from spbench.impls.strategies.meetings import Meetings
from spbench.impls.strategies.placed_chunks import PlacedChunks
from spbench.impls.strategies.placements import BALANCED, PLACEMENTS
from spbench.impls.strategies.repeated_attention import RepeatedAttention
from spbench.impls.strategies.ring_attention import RingAttention
from spbench.impls.strategies.ulysses import Ulysses
from tests.impls.kernels.made import bytes_kept, made
from tests.measure.verify import document_faults, recurrence_faults
from tests.measure.verify import recurrence_faults as faults
from tests.measure.verify.assertions import assert_green, assert_red
from tests.measure.verify.attention_model import AttentionModel, formula, metered
from tests.slow import mostly_slow, slow

CAUSAL, LINEAR = AttentionModel("causal_attention"), AttentionModel("linear_attention")
UNDECAYED = AttentionModel("linear_attention", decay=False)
THREE_HEADS = AttentionModel("linear_attention", heads=3)
OF_ULYSSES = [
    CAUSAL,
    *(replace(CAUSAL, kv_heads=kv_heads) for kv_heads in (4, 2, 1)),
    LINEAR,
    replace(LINEAR, way="left_product"),
    replace(UNDECAYED, way="quadratic"),
    AttentionModel("attention"),
    AttentionModel("attention", masked=True),
]
OF_LASP: list[tuple[type[Strategy], dict[str, bool]]] = [
    (Lasp, {}),
    (Lasp, {"kernel_fusion": False}),
    (Lasp, {"state_caching": False}),
    (Lasp, {"barrier": True}),
    (Lasp2, {}),
]


def cases() -> Iterator[tuple[type[Strategy], Mapping[str, Any], AttentionModel]]:
    for model in OF_ULYSSES:
        yield Ulysses, {}, model
    for model in (THREE_HEADS, replace(UNDECAYED, heads=2)):
        for strategy, options in OF_LASP:
            yield strategy, options, model
    for cls in (RingAttention, AllGatherKV):
        for placement in PLACEMENTS:
            yield cls, {"placement": placement}, replace(CAUSAL, rotary=True)
            yield cls, {"placement": placement}, replace(CAUSAL, kv_heads=4)
        yield cls, {}, replace(CAUSAL, kv_heads=1)
        yield cls, {}, AttentionModel("attention")
        yield cls, {"placement": "striped"}, AttentionModel("attention")
        yield cls, {}, AttentionModel("full_attention")
    yield RingAttention, {}, LINEAR
    yield RingAttention, {}, UNDECAYED


def named(x: Any) -> str:
    return getattr(x, "name", str(x))


def sized() -> Iterator[Any]:
    """All cases on 1 to 4 ranks, in two precisions and lengths; by default on 4, in one of these in turns."""
    for number, case in enumerate(cases()):
        for n in (1, 2, 3, 4):
            # 2 n: a position or two a rank
            yield slow(*case, n, [("fp64", 24), ("fp64", 2 * n), ("bf16", 24)])
        yield *case, 4, [("fp64", 8 if number % 2 else 24)]


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("strategy", "options", "model", "n", "sizes"), [*sized()], ids=named)
def test_all_three_gradients(
    pool: RankPool,
    strategy: type[Strategy],
    options: Mapping[str, Any],
    model: AttentionModel,
    n: int,
    sizes: list[tuple[str, int]],
) -> None:
    for dtype, seq_len in sizes:
        assert_green(pool, Case(strategy, model, "attention", dtype, 3, seq_len, 0, options), n)


@pytest.mark.parametrize("fault", recurrence_faults.OF_STATES)
def test_planted_faults_of_states_are_red(pool: RankPool, fault: type[Strategy]) -> None:
    # one position of weak decay is less than bf16 can tell
    for dtype in ("fp64",) if fault is recurrence_faults.ChunkDecayOffByOne else ("fp64", "bf16"):
        assert_red(pool, Case(fault, THREE_HEADS, "attention", dtype), 4)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("heads", "model"),
    [(6, model) for model in OF_ULYSSES] + [(2, CAUSAL)] + [slow(2, model) for model in OF_ULYSSES[1:]],
    ids=str,
)
def test_heads_that_ranks_do_not_divide_are_padded(pool: RankPool, heads: int, model: AttentionModel) -> None:
    model = replace(model, heads=heads, kv_heads=None if model.kv_heads is None else heads // 2)
    assert_green(pool, Case(Ulysses, model, "attention", options={"pad_heads": True}), 4)
    refused = verify_case(pool, Case(Ulysses, model, "attention"), 4)
    assert (refused.status, "option pad_heads" in refused.reason) == ("unsupported", True)


def test_masks_of_own_queries_are_refused() -> None:
    site, _ = AttentionModel("attention").sites(1, 24)
    rows = type(site)(site.kind, 1, {**site.dims, "mask_rows": 24})
    with pytest.raises(Unsupported, match="same for all queries; use mask_shape keys"):
        Ulysses.planned(2).check([rows])


@pytest.mark.parametrize("length", [2048, 4194304])
def test_bytes_of_lasp_do_not_depend_on_the_length(length: int) -> None:
    """Table 1: B d^2 / h elements a layer forward, d = Z A, here as float32; of a rank in the middle."""
    model = AttentionModel("linear_attention", heads=16, head_size=128, key_size=128)
    with fake_mesh({"sp": 64}, 1) as mesh, FakeTensorMode():
        sent = metered(mesh, Lasp, {}, model, torch.bfloat16, length, batch=1)
    state = 2048**2 // 16 * 4
    assert sent == {("forward", "send"): state, ("backward", "send"): state}


@pytest.mark.parametrize("n", [2, 4, 12])
def test_bytes_of_ulysses_are_those_of_the_paper(n: int) -> None:
    """Section 3.2: 4 messages of M/N forward, M = B L Z A elements, of which (N-1)/N leave the rank."""
    sent = formula(n, Ulysses, {}, CAUSAL, torch.float32, 24)
    one_way = 4 * (3 * 24 * 12 * 4) * 4 * (n - 1) / n**2
    assert sent == {("forward", "all_to_all"): one_way, ("backward", "all_to_all"): one_way}


@pytest.mark.parametrize(
    ("n", "kv_heads", "sent"),
    [(2, 4, 4), (4, 4, 4), (3, 4, 12), (4, 2, 4), (12, 4, 12), (3, 1, 3), (4, 1, 4)],
)
def test_keys_are_sent_with_as_few_heads_as_ranks_allow(n: int, kv_heads: int, sent: int) -> None:
    """Their own where N divides them, else the least common multiple; q and the output with all 12."""
    payload = 3 * (24 // n) * 4 * 4
    entries = Ulysses.planned(n).communication(replace(CAUSAL, kv_heads=kv_heads).sites(3, 24), 4)
    forward = {t.purpose: (t.count, t.payload_bytes // payload) for t in entries if t.phase == "forward"}
    assert forward == {"q and the output": (2, 12), "k and v": (2, sent)}


def test_every_rank_has_one_role() -> None:
    for n in range(1, 6):
        assert sorted(rank for role in Lasp.roles("sp", n) for rank in role) == list(range(n))


def test_it_is_given_up_with_its_graph() -> None:
    """A cycle through a graph, which nothing collects, would keep the process groups of a strategy."""

    class Attend:
        def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    attend, x = Attend(), torch.randn(1, 2, 4, 3)
    attention, held = RepeatedAttention(attend), weakref.ref(attend)
    attention.forward(x, x, x)
    del attend, attention
    gc.collect()
    assert held() is None


ONE = {"layers": 1}
#: of Gated DeltaNet with as many heads of keys, of Mamba-2 with fewer
MIXERS = ["gated-deltanet-tiny", "mamba2-tiny"]


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("fault", faults.OF_RECURRENCES)
def test_planted_faults_are_red(pool: RankPool, fault: type[Strategy], name: str) -> None:
    assert_red(pool, Case(fault, model_preset(name, ONE), "attention"), 3, "output y", "gradient of")


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


PACKED_PLACEMENTS = ("contiguous", "zigzag", *BALANCED)


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
@pytest.mark.parametrize("placement", PACKED_PLACEMENTS)
@pytest.mark.parametrize("strategy", [RingAttention, AllGatherKV])
def test_ranks_attend_to_what_a_mask_says(strategy: type[PlacedChunks], placement: str, packed: int) -> None:
    for attended, size, length in packings(packed, PACKED_PLACEMENTS.index(placement)):
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
