"""Ring Attention, plain and in full, and gathered keys and values: results, bytes, memory, within other
strategies, misuse of a ring. The halo of a window, against a mask of all pairs, for random windows and
packings.
Placements of positions on ranks, of each strategy that has them.
Our context parallelism beside torch's own (torch.distributed.tensor.experimental): the same positions on
each rank, and the same messages, for each rotate method, with load balancing and without."""

import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.plan import plan, rank_classes
from spbench.bench.measure.engines.tracing import trace
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.beside_values import seen_pairs
from spbench.impls.attended import Attended
from spbench.impls.collectives import Ring
from spbench.impls.kernels.decay import DecayMask
from spbench.impls.place import Place
from spbench.impls.registries import model_preset, strategy_class
from spbench.impls.strategies.all_gather_kv import AllGatherKV, joint_meetings
from spbench.impls.strategies.meetings import Meetings, meeting
from spbench.impls.strategies.placed_chunks import PlacedChunks
from spbench.impls.strategies.placements import PLACEMENTS
from spbench.impls.strategies.plain_ring_attention import PlainRingAttention
from spbench.impls.strategies.ring_attention import RingAttention
from spbench.impls.strategies.sequence_chunks import chunk_of
from tests.cells import make_cell
from tests.impls.strategies.test_attention_alone import count, packings
from tests.measure.verify.attention_model import AttentionModel, formula
from tests.slow import slow


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
