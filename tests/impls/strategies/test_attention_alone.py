"""Attention alone on real ranks: values, all three gradients, bytes, and sizes that strategies refuse. The
attention of UPipe's rounds: one graph for all of them.
Gated recurrences on real ranks: values, every gradient and the closed forms of bytes; planted faults;
sizes that are refused. Gated recurrences of packed documents on real ranks: values, every gradient, bytes,
and planted faults.
Bytes that a rank of packed sequences keeps, and that its kernels make, against a count from the documents
alone, for random packings. A fake process group runs one rank on real tensors; what would come from other
ranks is never looked at. What a rank attends to and holds of packed sequences, against a mask of all pairs,
for random packings.

Ring Attention, plain and in full, and gathered keys and values: results, bytes, memory, within other
strategies, misuse of a ring. The halo of a window, against a mask of all pairs, for random windows and
packings.
Placements of positions on ranks, of each strategy that has them.
Our context parallelism beside torch's own (torch.distributed.tensor.experimental): the same positions on
each rank, and the same messages, for each rotate method, with load balancing and without.
"""

import gc
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.plan import plan, rank_classes
from spbench.bench.measure.engines.tracing import fake_mesh, trace
from spbench.bench.measure.engines.unlike_ranks import MOST_SETS, Load, roles_by_load
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.beside_values import document_of_positions, seen_pairs
from spbench.bench.measure.verify.cases import verify_case
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.attended import Attended
from spbench.impls.collectives import Ring
from spbench.impls.kernels import gated_delta_operators, linear_attention, state_space_operators
from spbench.impls.kernels.decay import DecayMask
from spbench.impls.kernels.gated_delta import GatedDelta
from spbench.impls.kernels.ranged_attention import Seen
from spbench.impls.kernels.recurrence import Rule
from spbench.impls.kernels.state_space import StateSpace
from spbench.impls.models.model import Model
from spbench.impls.place import Place
from spbench.impls.registries import model_preset, strategy_class
from spbench.impls.strategies.all_gather_kv import AllGatherKV, joint_meetings
from spbench.impls.strategies.base import Strategy, Unsupported
from spbench.impls.strategies.lasp import Lasp
from spbench.impls.strategies.lasp2 import Lasp2
from spbench.impls.strategies.meetings import Meetings, meeting
from spbench.impls.strategies.placed_chunks import PlacedChunks
from spbench.impls.strategies.placements import BALANCED, PLACEMENTS
from spbench.impls.strategies.plain_ring_attention import PlainRingAttention
from spbench.impls.strategies.repeated_attention import RepeatedAttention
from spbench.impls.strategies.ring_attention import RingAttention
from spbench.impls.strategies.sequence_chunks import chunk_of
from spbench.impls.strategies.ulysses import Ulysses
from tests.cells import make_cell
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
#: of Gated DeltaNet with as many heads of keys, of Mamba-2 and KDA with fewer
MIXERS = ["gated-deltanet-tiny", "mamba2-tiny", "kda-tiny"]


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


@pytest.mark.parametrize("n", [2, 8])
def test_as_many_bytes_as_a_ring_sends(n: int) -> None:
    """Keys and values take N - 1 hops either way; the sums of their gradients take N - 1 here, and in a ring
    one more, to come home."""
    case: Any = {}, AttentionModel(), torch.bfloat16, 2 * n
    gathers, travels = formula(n, AllGatherKV, *case), formula(n, RingAttention, *case)
    assert gathers["forward", "all_gather"] == travels["forward", "send"]
    assert gathers["backward", "all_gather"] == gathers["forward", "all_gather"]
    sums = travels["backward", "send"] - travels["forward", "send"]
    assert gathers["backward", "reduce_scatter"] * n == sums * (n - 1)


def of_both_rings(mesh: DeviceMesh, causal: bool, dtype: torch.dtype) -> list[float]:
    """How far the output of the plain ring and its gradients of q, k and v are from those of the full one."""
    generator = torch.Generator().manual_seed(mesh.get_local_rank("sp"))
    q, k, v, d_o = (torch.randn(2, heads, 5, 4, generator=generator, dtype=dtype) for heads in (6, 3, 3, 6))
    results = []
    for strategy in (PlainRingAttention(Place.on(mesh)), RingAttention(Place.on(mesh))):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o = strategy.causal_attention(*leaves) if causal else strategy.full_attention(*leaves)
        results.append([o, *torch.autograd.grad(o, leaves, d_o)])
    return [(plain - full).abs().max().item() for plain, full in zip(*results, strict=True)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-14), (torch.bfloat16, 0.03)])
def test_the_plain_ring_computes_what_the_full_one_does(
    pool: RankPool, causal: bool, dtype: torch.dtype, most: float
) -> None:
    for apart in pool.run({"sp": 4}, of_both_rings, causal, dtype):
        assert max(apart) < most


@pytest.mark.parametrize(
    ("model", "options"), [("causal-transformer-tiny", {"kv_heads": 4}), ("st-dit-tiny", {})]
)
def test_the_plain_ring_sends_what_the_full_one_does(model: str, options: dict[str, Any]) -> None:
    of: Any = {"model": model, "model_options": options | {"checkpointing": True}, "precision": "bf16"}
    plain, full = (
        VirtualEngine().measure(cell(name, {"sp": 4}, **of))
        for name in ("plain_ring_attention", "ring_attention")
    )
    assert plain.communication == full.communication
    assert plain.formula_difference == []


def cell(strategy: str, sizes: dict[str, int], **changes: Any) -> Cell:
    settings = {"model": "causal-transformer-tiny", "strategy": strategy, "sizes": sizes, "batch": 4}
    return Cell.model_validate(settings | {"seq_len": 24} | changes)


def peaks_of_ranks(n: int, strategy: str, **options: str) -> tuple[list[int], int]:
    """Peak bytes of every rank, and the largest of the ranks that are traced for their classes."""
    of: Any = {"precision": "bf16", "model_options": {"vocabulary": 16}, "strategy_options": options}
    asked = cell(strategy, {"sp": n}, seq_len=768, **of)
    peaks = [tracing.trace(asked, rank).memory.peak().nbytes for rank in range(n)]
    return peaks, max(peaks[each.first] for each in rank_classes(asked))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [*({"placement": p} for p in PLACEMENTS), {"gradients": "ring"}], ids=str)
@pytest.mark.parametrize("n", [4, slow(3)])
def test_no_peak_is_larger_than_those_of_the_ranks_that_are_traced(n: int, options: dict[str, str]) -> None:
    peaks, traced = peaks_of_ranks(n, "all_gather_kv", **options)
    assert max(peaks) == traced


@pytest.mark.one_in(2)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_no_rank_of_a_ring_holds_more_than_the_last(placement: str) -> None:
    """Which stands for all: one that skips blocks must not keep the gradients of the block before."""
    of: Any = {"batch": 2, "seq_len": 4096, "precision": "bf16", "strategy_options": {"placement": placement}}
    asked = cell("ring_attention", {"sp": 4}, **of)
    peaks = [tracing.trace(asked, rank).memory.peak().nbytes for rank in range(4)]
    assert peaks == [peaks[-1]] * 4


def test_gradients_round_a_ring_leave_half_a_block_out_of_the_peak() -> None:
    """The last rank, which is traced, holds gradients of half of the keys of each other rank."""
    peaks, traced = peaks_of_ranks(4, "all_gather_kv", placement="zigzag", gradients="ring")
    half_a_block = 4 * (768 // 4) * 48 * 2  # of k and v in bfloat16
    assert max(peaks) - half_a_block <= traced <= max(peaks)


def misuse(mesh: DeviceMesh) -> list[str]:
    ring, x = Ring(mesh.get_group("sp")), torch.zeros(3)
    said = []

    def fails(what: Any) -> None:
        with pytest.raises(RuntimeError) as raised:
            what()
        said.append(str(raised.value))

    fails(ring.finish)
    ring.start(x, torch.zeros(2))
    fails(lambda: ring.start(x))
    x.add_(1)
    fails(ring.finish)
    return said


def test_misuse_of_the_ring_raises(pool: RankPool) -> None:
    for said in pool.run({"sp": 2}, misuse):
        assert [s.split(";")[0] for s in said] == [
            "nothing is under way",
            "tensors are under way already",
            "a tensor was written to while it was being sent",
        ]


def linear_attention_of_ones(mesh: DeviceMesh, values: list[float]) -> float:
    strategy = RingAttention(Place.on(mesh))
    one, mine = (torch.tensor(x, dtype=torch.bfloat16).view(1, 1, 1, 1) for x in (1.0, values[strategy.rank]))
    return strategy.linear_attention(one, one, mine, DecayMask()).item()


def test_linear_attention_adds_up_in_float32(pool: RankPool) -> None:
    """In bfloat16 three times 0.75 added to 256, whose next number is 258, would be lost."""
    assert pool.run({"sp": 4}, linear_attention_of_ones, [0.75, 0.75, 0.75, 256.0])[-1] == 258


def test_only_heads_of_keys_and_values_travel() -> None:
    """A third of them, a third of the bytes."""
    whole, third = (
        formula(3, RingAttention, {}, AttentionModel(kv_heads=n), torch.float32, 24) for n in (12, 4)
    )
    assert third == {key: sent / 3 for key, sent in whole.items()}


def chunk(rank: int, length: int) -> slice:
    return slice(rank * length, (rank + 1) * length)


@pytest.mark.parametrize("drawn", [60, slow(600)])
def test_no_row_more_or_less_than_the_window_needs(drawn: int) -> None:
    draw = random.Random(0)
    for _ in range(drawn):
        size, length = draw.randint(2, 6), draw.randint(1, 9)
        window = draw.randint(1, size * length - 1)
        mask = seen_pairs(Attended(window=window), size * length)
        last = size - 1  # which has all the others before it
        needed = [
            int(mask[chunk(last, length), chunk(last - d, length)].any(0).sum()) for d in range(1, size)
        ]
        rows = Meetings("contiguous", last, size, length, Attended(window=window)).halo
        assert rows == tuple(n for n in needed if n)
        assert sum(needed) == min(window - 1, (size - 1) * length)


@pytest.mark.parametrize("drawn", [40, slow(400)])
def test_queries_see_in_the_halo_what_a_mask_says(drawn: int) -> None:
    """By chunks, as in a ring, and in one piece, as gathered; what comes from the far end is not seen."""
    for attended, size, length in packings(drawn, 7):
        attended = attended if attended.window else Attended(attended.documents, 1 + len(attended.documents))
        mask = seen_pairs(attended, size * length).int()
        for rank in range(size):
            meetings = Meetings("contiguous", rank, size, length, attended)
            halo = meetings.halo or ()
            mine = mask[chunk(rank, length)]
            together = torch.zeros(length, sum(halo) + length, dtype=torch.int)
            count(together, meetings.of_halo())
            assert together.sum() == mine.sum()
            first = rank * length - sum(halo)
            wrapped, seen = max(0, -first), max(0, first)
            assert torch.equal(together[:, wrapped:], mine[:, seen : (rank + 1) * length])
            for owner in range(size):
                met = torch.zeros(length, length, dtype=torch.int)
                if (found := meetings.of(owner)) is not None:
                    queries, keys, what = found
                    count(met[queries, keys], what)
                    back = rank - owner
                    assert keys.start >= length - [length, *halo][back]
                assert torch.equal(met, mine[:, chunk(owner, length)])


@pytest.mark.parametrize("strategy", [RingAttention, AllGatherKV])
@pytest.mark.parametrize(("window", "rows"), [(1, 0), (2, 1), (7, 6), (14, 13), (19, 18), (23, 18)])
def test_as_many_bytes_as_the_window_has(strategy: type[PlacedChunks], window: int, rows: int) -> None:
    """Two bytes an element, gradients four; of 24 positions on 4 ranks there are 18 before the last chunk."""
    model = model_preset("attention-call-tiny", {"window": window})  # 4 heads of keys of 4 features
    sent = {"forward": 0, "backward": 0}
    for t in strategy.planned(4).communication(model.sites(3, 24), 2):
        assert t.collective == "send"
        sent[t.phase] += t.count * t.payload_bytes
    row = 2 * 3 * 4 * 4
    assert sent == {"forward": rows * row * 2, "backward": rows * row * (2 + 4)}


@pytest.mark.parametrize("strategy", [RingAttention, AllGatherKV])
def test_a_window_of_the_whole_sequence_is_none(strategy: type[PlacedChunks]) -> None:
    sites = [model_preset("attention-call-tiny", o).sites(3, 24) for o in ({}, {"window": 24})]
    with_window, without = ([*strategy.planned(4).communication(s, 2)] for s in sites)
    assert with_window == without


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ring_attention", "all_gather_kv"])
@pytest.mark.parametrize("window", [9, 13, 20, 40])
def test_no_rank_holds_more_than_those_that_are_traced(strategy: str, window: int) -> None:
    """A part of a chunk of 12, all of it, two and four; bytes are the closed form's on each rank."""
    asked = make_cell(
        "causal-transformer-tiny-gqa",
        strategy,
        {"sp": 5},
        2,
        60,
        model_options={"window": window, "sinks": True, "vocabulary": 16},
    )
    traces = [tracing.trace(asked, rank) for rank in range(5)]
    planned = plan(asked)
    for rank, each in enumerate(traces):
        assert not planned.difference(each.communication, rank)
    peaks = [each.memory.peak().nbytes for each in traces]
    assert max(peaks) == max(peaks[each.first] for each in rank_classes(asked))


SIZES = [*((p, 4) for p in PLACEMENTS), ("striped", 1)]


def positions(placement: str, n: int, length: int) -> list[Tensor]:
    """Those of each of n ranks."""
    ranks = [RingAttention.planned(n, r, {"placement": placement}) for r in range(n)]
    return [strategy.shard(torch.arange(n * length), 0) for strategy in ranks]


def assert_covered(met: Tensor, mine: Tensor, theirs: Iterable[Tensor]) -> None:
    """Every query has met the keys that are not later once, and no other."""
    keys = torch.cat([*theirs])
    assert torch.equal(met, (mine.unsqueeze(-1) >= keys).int())


def count_pairs(met: Tensor, causal: bool) -> None:
    met.add_(torch.ones_like(met).tril() if causal else 1)


@pytest.mark.parametrize(("placement", "length"), SIZES)
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_blocks_cover_what_causality_allows(n: int, placement: str, length: int) -> None:
    places = positions(placement, n, length)
    for rank in range(n):
        for owner in range(n):
            met = torch.zeros(length, length, dtype=torch.int)
            if (found := meeting(placement, rank, owner, length)) is not None:
                mine, theirs, causal = found
                count_pairs(met[mine, theirs], causal)
            assert_covered(met, places[rank], [places[owner]])


@pytest.mark.parametrize(("placement", "length"), SIZES)
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_joint_blocks_cover_what_causality_allows(n: int, placement: str, length: int) -> None:
    places, calls = positions(placement, n, length), set()
    for rank in range(n):
        found = [*joint_meetings(Meetings(placement, rank, n, length))]
        met = torch.zeros(length, n, length, dtype=torch.int)
        for owners, mine, theirs, causal in found:
            block = met[mine, owners, theirs]
            if causal:
                assert block.shape[1] == 1
                count_pairs(block[:, 0], causal)
            else:
                count_pairs(block, causal)
        assert_covered(met.flatten(1), places[rank], places)
        assert found[0][1] == slice(None)  # all queries
        calls.add(len(found))
    assert max(calls) <= {"contiguous": 2, "zigzag": 3, "striped": n}[placement]


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_chunk_is_that_of_torch(dim: int) -> None:
    x = torch.arange(6 * 12 * 18).view(6, 12, 18)
    for parts in (1, 2, 3):
        for number, expected in enumerate(x.chunk(parts, dim)):
            chunk = chunk_of(x, dim, number, parts)
            assert torch.equal(chunk, expected)
            assert chunk.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


N, LENGTH = 4, 48
#: torch's rotate method and, of ours, the strategy that sends what it sends
OURS: dict[str, tuple[str, dict[str, str]]] = {
    "allgather": ("all_gather_kv", {"gradients": "ring"}),
    "alltoall": ("ring_attention", {}),
}


@pytest.mark.parametrize("strategy", ["ring_attention", "all_gather_kv"])
@pytest.mark.parametrize("balanced", [True, False])
def test_a_rank_has_the_positions_that_torch_gives_it(strategy: str, balanced: bool) -> None:
    positions = torch.arange(LENGTH)
    if balanced:
        positions = positions[_HeadTailLoadBalancer(LENGTH, N, "cpu")._generate_indices()[0].long()]
    placement = "zigzag" if balanced else "contiguous"
    for rank, theirs in enumerate(positions.chunk(N)):
        place = Place({"sp": N}, {"sp": rank})
        ours = strategy_class(strategy).configured(place, {"placement": placement})
        assert torch.equal(ours.shard(torch.arange(LENGTH)[None], 1)[0], theirs)


def messages(strategy: str, **options: str) -> Counter[tuple[str, bool, int]]:
    """How many messages of how many bytes of payload, by phase and by whether each is an all-gather; an
    all-to-all of torch's ring goes to one rank whole, as a send does."""
    cell = make_cell("causal-transformer-tiny-gqa", strategy, {"sp": N}, 2, LENGTH, strategy_options=options)
    found: Counter[tuple[str, bool, int]] = Counter()
    for operation, times in trace(cell, N - 1).communication.counts.items():
        if operation.collective in ("all_gather", "all_to_all", "send"):
            gathers = operation.collective == "all_gather"
            found[operation.phase, gathers, operation.payload_bytes] += times
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("rotate", OURS)
@pytest.mark.parametrize("placement", ["contiguous", "zigzag"])
def test_messages_are_those_of_torch(rotate: str, placement: str) -> None:
    strategy, options = OURS[rotate]
    ours: Any = messages(strategy, placement=placement, **options)
    theirs = messages("torch_context_parallel", placement=placement, rotate=rotate)
    assert ours == theirs
    assert ours
